"""What a checkpoint says beside its weights, and what becomes of these."""

import json
from pathlib import Path

import pytest
import torch

import cellrt
from cellrt.errors import DefinitionError, RequestError
from cellrt.language.checkpoints import read_checkpoint
from tests.language.plain_llama import tensors, write
from tests.language.small_models import saved


@pytest.fixture(scope="module")
def engine():
    with cellrt.Engine(page_bytes=1 << 20, workers=1) as engine:
        yield engine


def put(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_what_lies_beside_the_weights_is_read(tmp_path):
    put(
        write(tmp_path, bos_token_id=1),
        tokenizer={"model": {}},
        tokenizer_config={
            "chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}],
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "pad_token": None,
        },
        generation_config={"eos_token_id": [2, 7], "temperature": 0.6},
    )
    found = read_checkpoint(tmp_path)
    assert (found.kind, found.context, found.end_tokens, found.start_token) == ("decoder", 32, (2, 7), 1)
    assert found.tokenizer == b'{"model": {}}'
    assert found.chat_template == "d"
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert found.generation["temperature"] == 0.6
    assert found.num_bytes == 4 * sum(weight.numel() for weight in tensors().values())


def test_a_template_of_its_own_file_counts_first(tmp_path):
    put(write(tmp_path), tokenizer_config={"chat_template": "old"})
    assert read_checkpoint(tmp_path).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_checkpoint(tmp_path).chat_template == "new"


def test_without_them_there_is_nothing(tmp_path):
    found = read_checkpoint(write(tmp_path, eos_token_id=None))
    assert (found.tokenizer, found.chat_template, found.end_tokens, found.start_token) == (None, None, (), None)
    assert (found.special_tokens, found.generation) == ({}, {})


def test_several_files_are_one_checkpoint(engine, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, files in (whole, 1), (parts, 4):
        folder.mkdir()
        write(folder, files=files)
        engine.register(read_checkpoint(folder).make(folder.name))
    made = [engine.submit(name, [1, 5, 3]).result(timeout=60) for name in ("whole", "parts")]
    assert torch.equal(made[0]["logprob"], made[1]["logprob"])


def test_models_of_one_checkpoint_share_their_cells(tmp_path):
    checkpoint = read_checkpoint(write(tmp_path))
    one, other, third = (checkpoint.make(name, **own) for name, own in (("a", {}), ("b", {}), ("c", {"page_size": 8})))
    assert one.cells[0] is other.cells[0]
    assert third.cells[0].inputs["kv"].page_size == 8


def test_a_request_that_does_not_fit_the_context_is_refused(engine, tmp_path):
    engine.register(read_checkpoint(write(tmp_path, eos_token_id=None)).make("small", max_tokens=31))
    with pytest.raises(RequestError, match="at most 32 tokens"):
        engine.submit("small", list(range(20)) + list(range(12)))
    with pytest.raises(RequestError, match="got 20 and max_tokens=13"):
        engine.submit("small", {"prompt": list(range(20)), "max_tokens": 13})
    assert len(engine.submit("small", list(range(20))).result(timeout=60)["token"]) == 12


def test_weights_are_not_copied_from_their_file(tmp_path):
    """Small ones are few; so the test looks at those of one that is large enough to stay in its file."""
    large = {"vocab_size": 3000}
    weights = tensors() | {name: torch.randn(3000, 8) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    module = read_checkpoint(write(tmp_path, weights=weights, **large)).make("lm").cells[0].module
    found, address = module.model.embedding.weight, module.model.embedding.weight.data_ptr()
    ranges = [line.split() for line in maps.read_text().splitlines()]
    of = next(line for line in ranges if int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16))
    assert of[-1] == str(tmp_path / "model.safetensors")
    assert torch.equal(found, weights["model.embed_tokens.weight"])


def test_weights_that_are_converted_rest_in_a_file_too(tmp_path):
    weights = {name: weight.to(torch.bfloat16) for name, weight in tensors().items()}
    weights["model.embed_tokens.weight"] = torch.randn(5000, 8).to(torch.bfloat16)
    folder = write(tmp_path, weights=weights, vocab_size=5000, tie_word_embeddings=True)
    module = read_checkpoint(folder).make("lm").cells[0].module
    assert module.model.embedding.weight._lies_in_file_of_cellrt
    assert torch.equal(module.model.head.weight, weights["model.embed_tokens.weight"].float())


POOLINGS = {
    "mean": (lambda rows: rows.mean(0), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
    "first": (lambda rows: rows[0], {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}),
}


def sentences(folder, pooling, *kinds, path="1_Pooling"):
    """The files of ``sentence-transformers``."""
    types = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", *kinds)]
    put(folder, modules=[{"type": kind, "path": path if "Pooling" in kind else ""} for kind in types])
    put(folder, sentence_bert_config={"max_seq_length": 20})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    put(folder / "1_Pooling", config=pooling)


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
@torch.inference_mode()
def test_an_encoder_pools_as_its_files_say(pooling, is_normed, engine, tmp_path):
    reference = saved("BERT", tmp_path)
    sentences(tmp_path, POOLINGS[pooling][1], *["Normalize"] * is_normed)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.context == 20
    name = f"{pooling} {is_normed}"
    engine.register(checkpoint.make(name))
    for text in [[3, 4, 5, 6], [9]]:
        expected = POOLINGS[pooling][0](reference(torch.tensor([text])).last_hidden_state[0])
        expected = torch.nn.functional.normalize(expected, dim=0) if is_normed else expected
        found = engine.submit(name, text).result(timeout=60)["embedding"]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "kinds", "path", "said"),
    [
        ({"pooling_mode_max_tokens": True}, (), "1_Pooling", "pooling_mode_max_tokens"),
        (POOLINGS["mean"][1], ("Dense",), "1_Pooling", "Dense"),
        (POOLINGS["mean"][1], (), "../1_Pooling", "within its own"),
    ],
)
def test_another_pooling_is_refused(pooling, kinds, path, said, tmp_path):
    saved("BERT", tmp_path)
    sentences(tmp_path, pooling, *kinds, path=path)
    with pytest.raises(DefinitionError, match=said):
        read_checkpoint(tmp_path)


def test_a_session_of_a_recurrent_model_goes_on_where_it_was(engine, tmp_path):
    saved("Mamba 2", tmp_path)
    engine.register(read_checkpoint(tmp_path).make("recurrent", keep=True))
    prompt = [1, 7, 9, 3, 3, 11, 50]
    whole = engine.submit("recurrent", {"prompt": prompt, "max_tokens": 6}).result(timeout=60)["token"].tolist()
    with engine.session("recurrent") as session:
        first = session.submit({"prompt": prompt, "max_tokens": 2}).result(timeout=60)["token"].tolist()
        rest = session.submit({"prompt": first[-1:], "max_tokens": 4}).result(timeout=60)["token"].tolist()
    assert first + rest == whole
