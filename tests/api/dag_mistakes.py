"""What an unfolder can get wrong of a ``graph.dag``: a graph for each mistake, and what must be told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from cellrt.definition.define import cell
from cellrt.definition.spec import ragged
from cellrt.graph.graph import Graph
from tests.api.models import SIZE, attending, child_sum, recurrent

STEP, ATTEND, SUM = recurrent(), attending(), child_sum()
NARROW = cell(lambda h: {"h": h.offsets.diff()[:, None].float()}, {"h": ragged(SIZE)}, name="narrow")
ROW = torch.ones(SIZE)

DAG_MISTAKES: dict[str, tuple[Callable[[Graph], object], str]] = {
    "offsets that are no integers": (
        lambda graph: graph.dag(SUM, [0.0, 0.0], [], {"x": ROW}),
        r"dag: expected offsets as integers \[nodes \+ 1\], at least two, got list \[0.0, 0.0\]",
    ),
    "a dag without nodes": (
        lambda graph: graph.dag(SUM, [0], [], {"x": ROW}),
        r"dag: expected offsets as integers \[nodes \+ 1\], at least two, got list \[0\]",
    ),
    "sources as a matrix": (
        lambda graph: graph.dag(SUM, [0, 0, 1], torch.zeros(1, 1, dtype=torch.int64), {"x": ROW}),
        r"dag: expected sources as integers \[sources\], got int64\[1, 1\]",
    ),
    "sources of text": (
        lambda graph: graph.dag(SUM, [0, 0, 1], "a", {"x": ROW}),
        r"dag: expected sources as integers \[sources\], got str 'a'",
    ),
    "offsets that begin late": (
        lambda graph: graph.dag(SUM, [1, 1, 2], [0, 0], {"x": ROW}),
        r"dag: offsets begin with 1; expected 0",
    ),
    "offsets that decrease": (
        lambda graph: graph.dag(SUM, [0, 0, 2, 1, 2], [0, 0], {"x": ROW}),
        r"dag: node 2: expected offsets that do not decrease, got 2 and then 1",
    ),
    "unsigned offsets that decrease": (
        lambda graph: graph.dag(SUM, np.array([0, 0, 2, 1, 2], np.uint64), [0, 0], {"x": ROW}),
        r"dag: node 2: expected offsets that do not decrease, got 2 and then 1",
    ),
    "offsets beyond the sources": (
        lambda graph: graph.dag(SUM, [0, 0, 3], [0], {"x": ROW}),
        r"dag: offsets end with 3; expected 1, as many as there are sources",
    ),
    "sources that nobody reads": (
        lambda graph: graph.dag(SUM, [0, 0, 1], [0, 0], {"x": ROW}),
        r"dag: offsets end with 1; expected 2, as many as there are sources",
    ),
    "an offset beyond 32 bits": (
        lambda graph: graph.dag(SUM, [0, 1 << 32], [0], {"x": ROW}),
        r"dag: offsets end with 4294967296; expected 1",
    ),
    "a node that reads itself": (
        lambda graph: graph.dag(SUM, [0, 0, 2], [0, 1], {"x": ROW}),
        r"dag: node 1 reads itself; expected a node before it, from 0 to 0",
    ),
    "a node that reads a later one": (
        lambda graph: graph.dag(SUM, [0, 0, 1, 2, 2], [0, 3], {"x": ROW}),
        r"dag: node 2 reads node 3; expected a node before it, from 0 to 1",
    ),
    "a source below 0": (
        lambda graph: graph.dag(SUM, [0, 0, 1], [-1], {"x": ROW}),
        r"dag: node 1 reads node -1; expected a node before it, from 0 to 0",
    ),
    "a source beyond 32 bits": (
        lambda graph: graph.dag(SUM, [0, 0, 1], [1 << 32], {"x": ROW}),
        r"dag: node 1 reads node 4294967296; expected a node before it",
    ),
    "a first node that reads": (
        lambda graph: graph.dag(SUM, [0, 1, 1], [1], {"x": ROW}),
        r"dag: node 0 reads node 1; expected no sources, as no node comes before it",
    ),
    "a dag of no cell": (lambda graph: graph.dag(SUM.module, [0, 0], []), r"node 0: expected a cell, got ChildSum"),
    "a dag without its inputs": (
        lambda graph: graph.dag(SUM, [0, 0], []),
        r"cell 'ChildSum', node 0, input 'x': missing; expected float32\[4\]",
    ),
    "a dag with an unknown input": (
        lambda graph: graph.dag(SUM, [0, 0], [], {"x": ROW, "y": ROW}),
        r"cell 'ChildSum', node 0, input 'y': unknown; the cell has inputs",
    ),
    "a dag with too few rows": (
        lambda graph: graph.dag(SUM, [0, 0, 1, 1], [0], {"x": torch.ones(2, SIZE)}),
        r"cell 'ChildSum', node 0, input 'x': expected 3 rows, one a node, got 2",
    ),
    "a dag with a row of another shape": (
        lambda graph: graph.dag(SUM, [0, 0, 1], [0], {"x": [ROW, ROW[1:]]}),
        r"cell 'ChildSum', node 0, input 'x\[1\]': expected float32\[4\], got float32\[3\]",
    ),
    "a dag with given sources": (
        lambda graph: graph.dag(SUM, [0, 0, 1], [0], {"x": ROW, "h": [ROW]}),
        r"cell 'ChildSum', node 0, input 'h': reads the sources of a node and cannot be given",
    ),
    "a dag of a cell that reads no source": (
        lambda graph: graph.dag(STEP, [0, 0, 1], [0], {"x": ROW}),
        r"dag: cell 'Recurrent' reads no source: none of its outputs \['h'\] has the name of a ragged input",
    ),
    "a dag with a ragged input of another name": (
        lambda graph: graph.dag(ATTEND, [0, 0, 1], [0], {"x": ROW}),
        r"cell 'Attending', node 0, input 'memory': missing, and not the name of an output.*expected ragged float32",
    ),
    "a dag with too few rows of its sources": (
        lambda graph: graph.dag(ATTEND, [0, 0, 1, 2], [0, 0], {"x": ROW, "memory": torch.ones(3, SIZE)}),
        r"cell 'Attending', node 0, input 'memory': expected 2 rows, one a source, got 3",
    ),
    "a dag's sources of another shape than its outputs": (
        lambda graph: graph.dag(NARROW, [0, 0, 1], [0]),
        r"cell 'narrow', node 0, input 'h': expected float32\[4\], got float32\[1\] of 'narrow'",
    ),
    "an output that a dag does not have": (
        lambda graph: {"c": graph.dag(SUM, [0, 0], [], {"x": ROW}).c},
        r"cell 'ChildSum' has outputs \['h'\], not 'c'",
    ),
    "a dag as a result": (
        lambda graph: {"h": graph.dag(SUM, [0, 0], [], {"x": ROW})},
        r"result 'h': expected an output of a node, a chain's or loop's steps or a list of outputs, got Dag",
    ),
}
