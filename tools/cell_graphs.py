"""Cell graphs of three small models, as ``engine.graph(...).save(...)`` draws them.

python -m tools.cell_graphs    # writes docs/images/graph-*.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import cellrt
from cellrt import cells, unfolders

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SIZE = 8


def models() -> list[tuple[cellrt.Unfolder, Any]]:
    """Return each model with a request."""
    lstm = nn.LSTM(SIZE, SIZE, bidirectional=True)
    leaf = cellrt.cell(
        cells.EmbeddingTreeLSTMLeaf(20, SIZE, SIZE), {"token": cellrt.rows(dtype=torch.int64)}, name="leaf"
    )
    children = {name: (SIZE,) for name in ("h_left", "c_left", "h_right", "c_right")}
    inner = cellrt.cell(cells.BinaryTreeLSTMCell(None, SIZE), children, name="inner")
    return [
        (unfolders.chain("chain", lstm), torch.randn(6, SIZE)),
        (unfolders.tree("tree", leaf=leaf, inner=inner), (((1, 2), 3), (4, (5, 6)))),
    ]


def main() -> None:
    """Write a picture a model."""
    torch.manual_seed(0)
    with cellrt.Engine(1) as engine:
        for unfolder, request in models():
            engine.register(unfolder, warm_up=False)
            engine.graph(unfolder.name, request).save(IMAGES / f"graph-{unfolder.name}.png")


if __name__ == "__main__":
    main()
