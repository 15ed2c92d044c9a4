"""A cell over acyclic graphs as a user writes it: each node reads messages of those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import cellrt
from benchmarks.compiled_peer import compiled_step, warmed
from benchmarks.own_models import HIDDEN, TOKENS, seeded
from benchmarks.server import Runner
from cellrt import RaggedRows

MOST_SOURCES, REACH = 3, 8
"""A node reads so many at most, of so many before it."""


class Circuit(NamedTuple):
    """A request: node n reads nodes ``sources[offsets[n]:offsets[n + 1]]``; the last is its result."""

    offsets: NDArray[np.int32]
    sources: NDArray[np.int32]
    tokens: NDArray[np.int64]


class Gate(nn.Module):
    """A node from its token and the sum of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.message = nn.Embedding(TOKENS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.update = nn.GRUCell(HIDDEN, HIDDEN)

    def forward(self, token: Tensor, h: RaggedRows) -> dict[str, Tensor]:
        """``[nodes]``, and the states that each node reads, ``[nodes, any, hidden]``."""
        reader = torch.repeat_interleave(h.offsets.diff(), output_size=h.values.shape[0])
        messages = torch.relu(self.message(h.values))
        heard = torch.zeros(token.shape[0], HIDDEN).index_add(0, reader, messages)
        return {"h": self.update(heard, torch.tanh(self.table(token)))}


def unfolder_of(**options: Any) -> cellrt.Unfolder:
    """Return the model in cellrt."""
    gate = cellrt.cell(seeded(Gate), {"token": cellrt.token, "h": cellrt.ragged(HIDDEN)}, name="gate")

    @cellrt.unfold("settle", example=draw_circuits(1, seed=0)[0], **options)
    def unfolder(graph: cellrt.Graph, circuit: Circuit) -> dict[str, object]:
        return {"h": graph.dag(gate, circuit.offsets, circuit.sources, {"token": circuit.tokens}).h[-1]}

    return unfolder


def settle() -> cellrt.Unfolder:
    """Return the model; see ``unfolder_of``."""
    return unfolder_of()


def settle_known() -> cellrt.Unfolder:
    """Return the same, whose graphs are known by their key when they come again."""
    return unfolder_of(key=lambda circuit: (circuit.offsets.tobytes(), circuit.sources.tobytes()))


def levels(compiled: bool, threads: int) -> Runner:
    """Return a runner that batches all nodes of one level of a batch of graphs at once."""
    gate: Any = seeded(Gate)
    if not compiled:
        return by_levels(gate)
    step = compiled_step(lambda token, values, offsets: gate(token, RaggedRows(values, offsets)))
    return warmed(by_levels(lambda token, h: step(token, h.values, h.offsets)), draw_circuits(64, seed=1))


def by_levels(gate: Callable[[Tensor, RaggedRows], dict[str, Tensor]]) -> Runner:
    """Run batches with this cell."""

    def run(circuits: Sequence[Circuit]) -> Iterable[tuple[int, Tensor]]:
        read: list[list[int]] = []
        nodes_of: list[list[int]] = []
        level: list[int] = []
        ends: list[int] = []
        for circuit in circuits:
            first, offsets, sources = len(read), circuit.offsets.tolist(), circuit.sources.tolist()
            for begin, end in pairwise(offsets):
                its = [first + source for source in sources[begin:end]]
                level.append(1 + max([level[source] for source in its], default=-1))
                if level[-1] == len(nodes_of):
                    nodes_of.append([])
                nodes_of[level[-1]].append(len(read))
                read.append(its)
            ends.append(len(read) - 1)
        tokens, h = torch.from_numpy(np.concatenate([one.tokens for one in circuits])), torch.zeros(len(read), HIDDEN)
        for nodes in nodes_of:
            at = torch.tensor(nodes)
            below = torch.tensor([source for node in nodes for source in read[node]], dtype=torch.int64)
            offsets_of = torch.from_numpy(np.cumsum([0] + [len(read[node]) for node in nodes]))
            h[at] = gate(tokens[at], RaggedRows(h[below], offsets_of))["h"]
        return enumerate(h[ends].unbind())

    return run


def draw_circuits(count: int, seed: int) -> list[Circuit]:
    """Return random graphs of 5 to 29 nodes."""
    random, made = np.random.default_rng(seed), []
    for _ in range(count):
        size = int(random.integers(5, 30))
        read = [
            random.integers(max(0, node - REACH), node, random.integers(1, MOST_SOURCES + 1)) for node in range(1, size)
        ]
        sources = [np.unique(each) for each in read]
        offsets = np.cumsum([0, 0] + [len(each) for each in sources]).astype(np.int32)
        made.append(Circuit(offsets, np.concatenate(sources).astype(np.int32), random.integers(0, TOKENS, size)))
    return made
