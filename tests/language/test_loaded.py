"""Checkpoints of every architecture, served by their path: an engine elsewhere, clients without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cellrt
from cellrt.errors import DefinitionError
from cellrt.language.model import LanguageModel
from tests.language import small_models

pytest.importorskip("tokenizers")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
PROMPT = [3, 9, 4, 9, 12]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in ("SmolLM", "Llama 3", "GPT-2", "Mamba 2", "T5", "BERT"):
        made[name] = tmp_path_factory.mktemp("checkpoints") / name
        small_models.saved(name, made[name])
    return made


def asked(model: LanguageModel) -> Any:
    if model.language.kind == "encoder":
        return model.embed([PROMPT]).tolist()
    return model.generate(PROMPT, max_tokens=8).tokens


@pytest.mark.timeout(300)
def test_a_client_answers_as_the_engine_that_has_the_weights(folders: dict[str, Path]) -> None:
    with cellrt.EngineProcess(workers=1) as client, cellrt.Engine(workers=1) as engine:
        for path in folders.values():
            here, there = cellrt.load(path, engine=engine), cellrt.load(path, engine=client)
            assert asked(here) == asked(there)
            cells = client.binding(there.name).unfolder.cells
            assert not [cell for cell in cells if isinstance(cell.module, torch.nn.Module)]


def test_answers_are_drawn_as_they_are_asked_for(folders: dict[str, Path]) -> None:
    with cellrt.load(folders["SmolLM"], workers=1) as model:
        likeliest = model.generate(PROMPT, max_tokens=8)
        drawn = model.samples(PROMPT, 4, max_tokens=8, temperature=2.0, seed=5)
        assert drawn == model.samples(PROMPT, 4, max_tokens=8, temperature=2.0, seed=5)
        assert len({answer.tokens for answer in drawn}) > 1
        assert drawn[1] == model.generate(PROMPT, max_tokens=8, temperature=2.0, seed=6)
        told = model.generate(PROMPT, max_tokens=8, logprobs=3).tokens
        assert [len(token.likeliest) for token in told] == [3] * len(told)
        assert [token.id for token in told] == [token.likeliest[0][0] for token in told]
        assert [token.id for token in told] == [token.id for token in likeliest.tokens]
        made = [token.id for token in told]
        stopped = model.generate(PROMPT, max_tokens=8, stop_tokens=[made[2]])
        assert (stopped.finish_reason, stopped.num_tokens) == ("stop", made.index(made[2]) + 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", torch.int8])
def test_a_model_is_loaded_in_the_dtype_that_is_said(folders: dict[str, Path], dtype: Any) -> None:
    with cellrt.load(folders["SmolLM"], workers=1, dtype=dtype) as model:
        made = model.generate(PROMPT, max_tokens=8)
    name = str(dtype).removeprefix("torch.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CELLRT_DTYPE", name)
        with cellrt.load(folders["SmolLM"], workers=1) as model:
            assert model.generate(PROMPT, max_tokens=8) == made
    with pytest.raises(DefinitionError, match="dtype: expected one of float32"):
        cellrt.load(folders["SmolLM"], workers=1, dtype="float64")


@pytest.mark.parametrize(
    "how", [{"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0}]
)
def test_a_conversation_changes_no_answer_that_is_drawn(folders: dict[str, Path], how: dict[str, Any]) -> None:
    with cellrt.load(folders["SmolLM"], workers=1) as model, model.conversation() as session:
        prompt, read = PROMPT, 0
        for _ in range(3):
            within = model.generate(prompt, max_tokens=6, session=session, ignore_eos=True, **how)
            alone = model.generate(prompt, max_tokens=6, ignore_eos=True, **how)
            assert (within.tokens, within.num_cached_tokens) == (alone.tokens, read)
            read = len(prompt) + 5
            prompt = [*prompt, *(token.id for token in within.tokens), 4]


def test_a_conversation_with_a_state_of_fixed_size_begins_anew_where_a_prompt_differs(folders: dict[str, Path]) -> None:
    with cellrt.load(folders["Mamba 2"], workers=1) as model, model.conversation() as session:
        for prompt, cached in ((PROMPT, 0), ([*PROMPT[:3], 7, 7], 0), ([*PROMPT[:2], 5], 0)):
            within = model.generate(prompt, max_tokens=6, session=session)
            assert (within.tokens, within.num_cached_tokens) == (model.generate(prompt, max_tokens=6).tokens, cached)
        read = [*PROMPT[:2], 5, *(token.id for token in within.tokens), 9]
        longer = model.generate(read, max_tokens=6, session=session)
        assert (longer.tokens, longer.num_cached_tokens) == (model.generate(read, max_tokens=6).tokens, 8)
