"""What is wrong in a checkpoint is named where it is read, and nothing else comes of it."""

import json
import os
import pickle
import struct
import tracemalloc

import pytest
import torch

from cellrt.errors import DefinitionError
from cellrt.language.checkpoints import read_checkpoint
from tests.language.plain_llama import tensors, write, write_index

MANY = 10**9


def refused(folder, *said, **options):
    """That a folder is refused, with these words, and without much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DefinitionError) as raised:
            read_checkpoint(folder, **options)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    for words in said:
        assert words in str(raised.value)


def test_the_checkpoint_that_these_tests_spoil_is_good(tmp_path):
    assert read_checkpoint(write(tmp_path)).name == tmp_path.name
    assert read_checkpoint(write(tmp_path, files=3), name="mine").name == "mine"


def test_a_missing_weight_is_named(tmp_path):
    weights = tensors()
    del weights["model.layers.0.mlp.up_proj.weight"]
    refused(write(tmp_path, weights=weights), "expected a weight model.layers.0.mlp.up_proj.weight", str(tmp_path))


def test_weights_that_nobody_needs_are_named(tmp_path):
    weights = tensors() | {f"model.layers.0.extra.{number}": torch.ones(1) for number in range(7)}
    refused(write(tmp_path, weights=weights), "no use for the weights model.layers.0.extra.0", "and 2 more")


@pytest.mark.parametrize("made", [torch.ones(8), torch.ones(20, 9), torch.ones(0), torch.ones(20, 8).int()])
def test_a_misshapen_weight_is_named(made, tmp_path):
    refused(write(tmp_path, weights=tensors() | {"lm_head.weight": made}), "lm_head.weight", "model.safetensors")


def test_what_may_lie_beside_the_weights_is_left_out(tmp_path):
    weights = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert (
        read_checkpoint(write(tmp_path, weights=weights, tie_word_embeddings=True)).num_bytes
        < read_checkpoint(write(tmp_path)).num_bytes
    )


CONFIGS = {
    "a negative number": ({"hidden_size": -8}, "hidden_size"),
    "a huge number": ({"intermediate_size": 10**30}, "intermediate_size"),
    "more layers than weights": ({"num_hidden_layers": MANY}, "num_hidden_layers"),
    "no number": ({"num_hidden_layers": "1"}, "num_hidden_layers"),
    "true": ({"num_attention_heads": True}, "num_attention_heads"),
    "a vocabulary of nothing": ({"vocab_size": 0}, "vocab_size"),
    "a missing number": ({"vocab_size": None}, "expected vocab_size"),
    "heads that do not divide": ({"num_attention_heads": 3}, "heads"),
    "an odd head": ({"head_dim": 3}, "even head_dim"),
    "another activation": ({"hidden_act": "__import__('os').abort()"}, "hidden_act"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "rotary positions of another kind": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    "a scaling that is no object": ({"rope_scaling": [1]}, "rope_scaling"),
    "a scaling by nothing": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    "a scaling by infinity": ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor"),
    "not a number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "tokens that are none": ({"eos_token_id": [2, "x"]}, "eos_token_id"),
    "another architecture": ({"architectures": ["OsSystem"], "auto_map": {"AutoModel": "evil.py"}}, "OsSystem"),
    "no architecture": ({"architectures": []}, "architectures"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_cannot_be_is_refused(case, tmp_path):
    changed, said = CONFIGS[case]
    refused(write(tmp_path, **changed), said)


@pytest.mark.parametrize(
    "said",
    [
        {"do_sample": "yes"}, {"temperature": "hot"}, {"temperature": -1}, {"temperature": [1]}, {"top_k": 2.5},
        {"top_k": 10**12}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": float("nan")}, {"min_p": True},
        {"repetition_penalty": 0}, {"repetition_penalty": float("inf")}, {"eos_token_id": -1},
    ],
)  # fmt: skip
def test_how_answers_cannot_be_made_is_said_when_it_is_read(said, tmp_path):
    (write(tmp_path) / "generation_config.json").write_text(json.dumps(said))
    refused(tmp_path, "generation_config.json", *said)


def test_how_answers_are_made_may_be_anything_that_a_request_may_say(tmp_path):
    said = {"do_sample": True, "temperature": 0.0, "top_k": -1, "top_p": None, "min_p": 0, "repetition_penalty": 1.1}
    (write(tmp_path) / "generation_config.json").write_text(json.dumps(said))
    assert read_checkpoint(tmp_path).generation == said


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"{", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 100_000, b'{"hidden_size": ' + b"9" * 5000]
)
def test_a_configuration_that_is_no_object_is_refused(content, tmp_path):
    (write(tmp_path) / "config.json").write_bytes(content)
    refused(tmp_path, "config.json")


def test_a_configuration_that_is_too_large_is_not_read(tmp_path):
    with (write(tmp_path) / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    refused(tmp_path, "config.json", "expected at most")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_what_is_no_plain_file_is_not_read(name, tmp_path):
    path = write(tmp_path) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refused(tmp_path, name)


def header_of(described):
    content = json.dumps(described).encode()
    return struct.pack("<Q", len(content)) + content


HEADERS = {
    "nothing": b"",
    "a huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "a large header": struct.pack("<Q", (1 << 26) + 1) + b"{}",
    "a header that is cut off": struct.pack("<Q", 1000) + b"{}",
    "a list": struct.pack("<Q", 2) + b"[]",
    "a deep header": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "data that is not there": header_of(
        {"lm_head.weight": {"dtype": "F32", "shape": [20, 8], "data_offsets": [0, 640]}}
    ),
    "offsets that end before they begin": header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}),
    "a shape of another size": header_of({"a": {"dtype": "F32", "shape": [MANY] * 4, "data_offsets": [0, 4]}})
    + bytes(4),
    "a negative shape": header_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + bytes(4),
    "an unknown type": header_of({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_file_that_is_no_whole_file_of_safetensors_is_refused(case, tmp_path):
    (write(tmp_path) / "model.safetensors").write_bytes(HEADERS[case])
    refused(tmp_path, "model.safetensors")


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    path = write(tmp_path) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    refused(tmp_path, "model.safetensors", "no whole file")


INDICES = {
    "a path outside": ("../model-1.safetensors", "in its own folder"),
    "a path from the root": ("/etc/passwd", "in its own folder"),
    "a folder": ("..", "in its own folder"),
    "the index itself": ("model.safetensors.index.json", "names of safetensors files"),
    "a file that is not there": ("model.safetensors", "model.safetensors"),
    "a name with a zero": ("model\0.safetensors", "model"),
    "another of its files": ("model-2.safetensors", "lm_head.weight"),
    "a number": (3, "weight_map"),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_leads_elsewhere_is_refused(case, tmp_path):
    file, said = INDICES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, files=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["lm_head.weight"] == "model-1.safetensors"
    write_index(folder, index | {"lm_head.weight": file})
    refused(folder, said)


@pytest.mark.parametrize("index", [None, [], "model.safetensors", 7])
def test_an_index_that_is_no_index_is_refused(index, tmp_path):
    write_index(write(tmp_path, files=2), index)
    refused(tmp_path, "expected weight_map")


def test_links_that_lead_to_each_other_are_refused(tmp_path):
    path = write(tmp_path) / "model.safetensors"
    path.unlink()
    path.symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(path)
    refused(tmp_path, "model.safetensors")


class Evil:
    def __reduce__(self):
        return os.abort, ()


def test_pickles_are_never_read(tmp_path):
    (write(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path, "expected model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path, "model.safetensors")


def test_what_is_not_there_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "expected a folder")
    refused(tmp_path, "config.json")
    refused(write(tmp_path), "torch.int16", dtype=torch.int16)


def test_an_option_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(DefinitionError, match="colour"):
        read_checkpoint(write(tmp_path)).make("lm", colour="red")
