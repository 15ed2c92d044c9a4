"""annalog, a trained encoder-decoder Transformer of molecules: greedy answers are those of its own code."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import pickle
import re
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from cellrt.cells.transformer_stack import StackSizes, TransformerStack, encoder_decoder_cells
from cellrt.unfolders.attention import transduce
from tests.engine.helpers import close_and_check, small_engine

NUM_MOLECULES, MAX_STEPS, TOO_CLOSE = 500, 100, 1e-3
PIECE = re.compile(r"\[[^\]]*\]|%\d\d|Br|Cl|.")
SIZES = StackSizes(59, 102, 256, 512, 3, 8, activation=relu, scale=16.0)
NAMES = {
    "attention.query": "self_attention.fc_q",
    "attention.key": "self_attention.fc_k",
    "attention.value": "self_attention.fc_v",
    "attention.out": "self_attention.fc_o",
    "attention_norm": "self_attn_layer_norm",
    "mlp.up": "positionwise_feedforward.fc_1",
    "mlp.down": "positionwise_feedforward.fc_2",
    "mlp_norm": "ff_layer_norm",
}
CROSS_NAMES = {
    "cross.query": "encoder_attention.fc_q",
    "cross.key": "encoder_attention.fc_k",
    "cross.value": "encoder_attention.fc_v",
    "cross.out": "encoder_attention.fc_o",
    "cross_norm": "enc_attn_layer_norm",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def folder_of(package: str, install: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs {package}: pip install --no-deps {install}")
    return Path(found.submodule_search_locations[0])


class Plain(pickle.Unpickler):
    """Reads lists, dicts, text and numbers alone."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


@pytest.fixture(scope="module")
def folder() -> Path:
    return folder_of("annalog", "annalog==1.0.6") / "ckpt_and_vocab"


@pytest.fixture(scope="module")
def weights(folder):
    return torch.load(folder / "Lev_extended.pt", weights_only=True, map_location="cpu")


@pytest.fixture(scope="module")
def vocabulary(folder) -> dict[str, int]:
    with (folder / "stereo_experiment_vocab_ttf.pkl").open("rb") as file:
        return dict(Plain(file).load()["stoi"])


@pytest.fixture(scope="module")
def molecules(vocabulary) -> list[torch.Tensor]:
    path = folder_of("moses", "molsets==0.3.1") / "dataset" / "data" / "test.csv.gz"
    with gzip.open(path, "rt") as file:
        texts = [row["SMILES"] for row in islice(csv.DictReader(file), NUM_MOLECULES)]
    unknown, start, end = (vocabulary[name] for name in ("<unk>", "<sos>", "<eos>"))
    return [torch.tensor([start, *(vocabulary.get(piece, unknown) for piece in PIECE.findall(t)), end]) for t in texts]


@pytest.fixture
def code(folder, monkeypatch):
    """The package's model, without what else the package imports."""
    place = folder.parent / "model_files"
    spec = importlib.util.spec_from_file_location(
        "annalog_model", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "annalog_model", module)
    spec.loader.exec_module(module)
    return module.seq2seq_attention


def stack(weights, part: str) -> TransformerStack:
    made = TransformerStack(SIZES, is_decoder=part == "decoder")
    names = NAMES | (CROSS_NAMES if part == "decoder" else {})
    state = {"embedding.weight": f"{part}.tok_embedding.weight", "positions.weight": f"{part}.pos_embedding.weight"}
    for layer in range(SIZES.layers):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                state[f"layers.{layer}.{ours}.{kind}"] = f"{part}.layers.{layer}.{theirs}.{kind}"
    made.load_state_dict({ours: weights[theirs] for ours, theirs in state.items()})
    return made.eval()


def test_greedy_answers_are_those_of_the_packages_own_code(weights, vocabulary, molecules, code):
    """Its code has no cache: all tokens made are read at once, and of each the likeliest next one must be the one made,
    unless two are as good as equally likely."""
    start, end, padding = (vocabulary[name] for name in ("<sos>", "<eos>", "<pad>"))
    head = nn.Linear(256, 59)
    head.load_state_dict({kind: weights[f"decoder.fc_out.{kind}"] for kind in ("weight", "bias")})
    cells = encoder_decoder_cells(stack(weights, "encoder"), stack(weights, "decoder"), head, end)
    engine = small_engine(page_bytes=1 << 26, max_queue=1 << 12)
    try:
        engine.register(transduce("molecules", cells, start=start, max_steps=MAX_STEPS), warm_up=False)
        futures = engine.submit_many("molecules", molecules)
        found = [future.result(300)["token"] for future in futures]
    finally:
        close_and_check(engine)

    cpu = torch.device("cpu")
    parts = [make(59, 256, 3, 8, 512, 0.1, cpu, 102) for make in (code.Encoder, code.Decoder)]
    reference = code.Seq2Seq(*parts, padding, padding, cpu)
    reference.load_state_dict(weights)
    reference.eval()
    num_close = 0
    with torch.inference_mode():
        for source, tokens in zip(molecules, found):
            read = torch.cat([torch.tensor([start]), tokens[:-1]])
            logits = reference(source[None], read[None])[0][0]
            best = logits.topk(2)
            close = (best.values[:, 0] - best.values[:, 1] <= TOO_CLOSE).nonzero().flatten().tolist()
            sure = close[0] if close else len(tokens)
            num_close += bool(close)
            assert tokens[:sure].tolist() == best.indices[:sure, 0].tolist()
            assert tokens[-1] == end or len(tokens) == MAX_STEPS
    assert len(molecules) == NUM_MOLECULES
    assert num_close < NUM_MOLECULES // 20
