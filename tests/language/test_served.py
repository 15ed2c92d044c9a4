"""A language model elsewhere: clients unfold with an outline, in which there are no weights."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch

import cellrt
from cellrt.definition.outline import cell_of, outline_of
from cellrt.errors import DefinitionError
from cellrt.language import served
from cellrt.process.model_names import source_of
from cellrt.process.source import ModelSource
from tests.language import tiny

pytest.importorskip("tokenizers")


@pytest.mark.parametrize("checkpoint", [tiny.checkpoint(), tiny.embedder()], ids=["decoder", "encoder"])
def test_an_outline_makes_a_model_of_the_same_cells_without_weights(checkpoint: object) -> None:
    made = served.served(checkpoint)  # type: ignore[arg-type]
    copy = served.from_outline(json.loads(json.dumps(made.outline))["value"])
    assert copy.language == made.language
    for cell, its in zip(copy.cells, made.cells, strict=True):
        assert (cell.identity, cell.declaration) == (its.identity, its.declaration)
        with pytest.raises(DefinitionError, match="in another process"):
            cell.module()


def test_an_outline_keeps_the_longest_span() -> None:
    cell = served.served(tiny.embedder()).cells[0]
    assert cell_of(outline_of(cell)).module.longest_span == cell.module.longest_span == 64  # type: ignore[attr-defined]


def test_a_client_has_no_weights_and_the_same_answers() -> None:
    with cellrt.EngineProcess(workers=1, page_bytes=1 << 20) as client:
        client.register("tests.serve.language_models:decoder")
        unfolder = client.binding("tiny").unfolder
        model = cellrt.LanguageModel(unfolder, client, is_registered=True)
        assert not [cell for cell in unfolder.cells if isinstance(cell.module, cellrt.cells.GreedyLanguageModel)]
        here = served.served(tiny.checkpoint())
        with cellrt.LanguageModel(here, workers=1, page_bytes=1 << 20) as own:
            assert model.generate("hello", max_tokens=9) == own.generate("hello", max_tokens=9)
        with model.conversation() as session:
            assert model.generate("hello", max_tokens=9, session=session).num_tokens == 9


def test_a_checkpoint_is_a_model_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Smol-1.5"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "some.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert source_of("Smol-1.5") == source_of(f"{folder}/") == f"{folder}:Smol-1.5"
    assert source_of("Smol-1.5:other name") == f"{folder}:other name"
    assert source_of("some.gguf") == f"{tmp_path}/some.gguf:some"
    with pytest.raises(DefinitionError, match="no file none.gguf"):
        source_of("none.gguf")
    monkeypatch.setattr(served, "load", lambda *read: served.served(tiny.checkpoint("|".join(read))))
    assert ModelSource(f"{folder}:other name").load().name == f"{folder}|other name"


def test_the_environment_says_what_checkpoints_compute_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.dtype_said() is None
    monkeypatch.setenv("CELLRT_DTYPE", "bfloat16")
    assert served.dtype_said() is torch.bfloat16
    monkeypatch.setenv("CELLRT_DTYPE", "float64")
    with pytest.raises(DefinitionError, match="CELLRT_DTYPE: expected one of float32, bfloat16"):
        served.dtype_said()


def test_a_tokenizer_is_not_kept_before_a_text_is_read() -> None:
    language = served.served(tiny.checkpoint()).language
    assert "tokenizer" not in vars(language)
    assert language.tokens_of("hello")
    assert "tokenizer" in vars(language)


def test_a_wrong_tokenizer_is_told_when_a_model_is_made() -> None:
    with pytest.raises(DefinitionError, match=r"tokenizer\.json cannot be read"):
        served.served(tiny.checkpoint(tokenizer=b"[]"))


def test_a_model_that_is_dropped_is_freed() -> None:
    made = served.served(tiny.checkpoint())
    module = weakref.ref(made.cells[0].module)
    copy = served.from_outline(made.outline["value"])  # type: ignore[index]
    del made
    assert module() is None and copy.name == "tiny"
