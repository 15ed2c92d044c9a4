"""Results of requests that ended together: copied out of the arena at once; tensors are made when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.engine.future import Result
from cellrt.graph.results import ResultLayout
from cellrt.worker.arenas import Arenas

SMALL_BYTES = 1 << 14
"""Of one request's result: a larger one lies by itself, since who keeps one keeps what lies together with it."""


class Part(NamedTuple):
    """One named result of all requests.

    Attributes:
        name: the result's.
        memory: bytes of all requests, one behind the other; or of each by itself.
        begins: where each request's begin, and where the last ends; None: each lies by itself.
        dtype, shape: of a request's tensor; -1 for a number of rows that differs.
    """

    name: str
    memory: memoryview | Sequence[NDArray[Any]]
    begins: Sequence[int] | None
    dtype: torch.dtype
    shape: tuple[int, ...]


class Together:
    """The results of requests that ended together, each by its number among them. Any thread may ask."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def of(self, number: int) -> Result:
        """A request's results, in memory of their own; to be asked for once."""
        made: Result = {}
        for name, memory, begins, dtype, shape in self._parts:
            if begins is None:
                own = memory[number]
            else:
                own = bytearray(memory[begins[number] : begins[number + 1]])  # type: ignore[arg-type]
            tensor = torch.frombuffer(own, dtype=dtype)
            made[name] = tensor if len(shape) == 1 else tensor.view(shape)
        return made


def read_together(
    processor: Processor, host: Arenas, layouts: Sequence[ResultLayout], requests: NDArray[np.int32]
) -> Together:
    """Copies the results of complete requests of one template, by their ids in the processor, out of the host's arenas.

    To be called before they are released.
    """
    return Together([_part(processor, host, layout, requests) for layout in layouts])


def _part(processor: Processor, host: Arenas, layout: ResultLayout, requests: NDArray[np.int32]) -> Part:
    """One result of all of them."""
    rows = processor.result_rows(requests, np.array(layout.positions, np.int32))
    tensor = host[layout.kind]
    dtype, row_shape = tensor.dtype, tuple(tensor.shape[1:])
    row_bytes, counts = tensor.nbytes // len(tensor), None
    if layout.is_loop:
        is_there = rows >= 0
        counts = is_there.sum(1)
        if layout.is_single:
            rows, counts = rows[np.arange(len(rows)), counts - 1][:, None], None
        else:
            rows = rows[is_there]
    each = rows.size // len(requests)
    shape = row_shape if layout.is_single else (-1 if counts is not None else each, *row_shape)
    ends = None if counts is None else np.cumsum(counts)
    if each * row_bytes > SMALL_BYTES:
        split = np.split(rows.reshape(-1), range(each, rows.size, each) if ends is None else ends[:-1])
        return Part(layout.name, [host.get_bits(layout.kind, one).reshape(-1) for one in split], None, dtype, shape)
    memory = host.get_bits(layout.kind, rows.reshape(-1)).reshape(-1).view(np.uint8).data
    size = each * row_bytes
    begins = range(0, len(memory) + 1, size) if ends is None else [0, *(ends * row_bytes).tolist()]
    return Part(layout.name, memory, begins, dtype, shape)
