"""The model of ``docs/serving.md`` in a module of its own: an engine's process and its clients all import it."""

import torch

import cellrt
from cellrt.cells import GRUCell

torch.manual_seed(0)  # the same weights in every process; yours come from a file
gru = cellrt.cell(GRUCell(8, 16), inputs={"x": (8,), "h": (16,)})


@cellrt.unfold("listen", example=torch.zeros(1, 8))
def listen(graph: cellrt.Graph, frames: torch.Tensor) -> dict[str, object]:
    """Return the state after each frame ``[frames, 8]``."""
    return {"h": graph.chain(gru, keep=True, x=frames).h}
