"""Ready-made cells of the same weights are the same cell in whatever process they were made."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from cellrt import cells
from cellrt.definition.define import cell
from cellrt.definition.spec import rows

SIZE = 4
DIGESTS = "from tests.cells.test_identities import digests; print(digests())"


def made() -> dict[str, nn.Module]:
    """Cells that are given the weights of trained modules."""
    torch.manual_seed(0)
    words, lstm, gru = nn.Embedding(9, SIZE), nn.LSTM(SIZE, SIZE), nn.GRU(SIZE, SIZE)
    head = nn.Linear(SIZE, 9)
    return {
        "lstm": cells.LSTMCell.from_torch(lstm),
        "folded lstm": cells.EmbeddingLSTMCell.from_torch(words, lstm, fold=True),
        "gru": cells.GRUCell.from_torch(gru),
        "folded gru": cells.EmbeddingGRUCell.from_torch(words, gru, fold=True),
        "lstm decoder": cells.EmbeddingLSTMDecoder.from_torch(words, lstm, head, end_token=1),
        "gru decoder": cells.EmbeddingGRUDecoder.from_torch(words, gru, head, end_token=1),
    }


def digests() -> dict[str, str]:
    """The identities of all, by name."""
    found = {}
    for name, module in made().items():
        if isinstance(module, cells.EmbeddingLSTMDecoder | cells.EmbeddingGRUDecoder):
            inputs = module.input_specs()
        else:
            inputs = {"token": rows(dtype=torch.int64)} if name.startswith("folded") else {"x": rows(SIZE)}
            inputs |= {key: rows(SIZE) for key in (("h", "c") if name.endswith("lstm") else ("h",))}
        found[name] = cell(module, inputs).identity
    return found


@pytest.mark.slow
def test_from_torch_gives_the_same_cell_in_every_process() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] == f"{digests()}\n"
