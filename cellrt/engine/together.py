"""Results of requests that ended together: all are copied out of the arena at once, tensors are made on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.definition.bits import tensor_of
from cellrt.definition.spec import RowSpec
from cellrt.engine.future import Result
from cellrt.graph.results import ResultLayout
from cellrt.worker.arenas import Arenas

SMALL_BYTES = 1 << 14
"""The most bytes of a request's result that shares memory with others; a client that keeps one keeps all of these."""

STEP_BYTES = 64
"""The same limit for a step of a stream, which may wait for its client while other clients read on."""
NOTHING = memoryview(b"")
NO_OWN: list[memoryview] = []
UNBIND: Any = torch.unbind_copy
SPLIT: Any = torch.split_with_sizes_copy
"""Torch's types say that these return nothing."""


class Own(Protocol):
    """The result of each request in memory of its own, until it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> memoryview: ...

    def __setitem__(self, number: int, values: memoryview, /) -> None: ...


class Part(NamedTuple):
    """One named result of all requests.

    Attributes:
        name: the result's name.
        memory, begins: the bytes of all requests, one after the other; where those of each begin, and the last end.
        own: large results, each in memory of its own; empty if they are small.
        dtype, shape: those of a request's tensor; -1 stands for the number of its rows.
        row_bytes: the bytes of one row.
    """

    name: str
    memory: memoryview
    own: Own
    begins: Sequence[int]
    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: int


class Together:
    """The results of requests that ended together, each by its number among them. Any thread may ask."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def of(self, number: int, *, is_copy: bool = False) -> Result:
        """Return a request's results, in memory of their own.

        It is called once for each request; ``is_copy`` leaves them for another call.
        """
        made: Result = {}
        for name, memory, own, begins, dtype, shape, row_bytes in self._parts:
            its: bytearray | memoryview
            if own:
                its = bytearray(own[number]) if is_copy else _taken(own, number)
            else:
                its = bytearray(memory[begins[number] : begins[number + 1]])
            made[name] = tensor_of(its, dtype, _shape_of(shape, row_bytes, len(its)))
        return made

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Return the results of some requests, each in memory of its own; called once for each request."""
        first, count = numbers[0], len(numbers)
        if count == 1 or numbers[-1] != first + count - 1 or list(numbers) != list(range(first, first + count)):
            return [self.of(number) for number in numbers]
        made: list[Result] = [{} for _ in range(count)]
        for part in self._parts:
            name = part.name
            for result, tensor in zip(made, _tensors(part, first, count)):
                result[name] = tensor
        return made

    def stacked(self, count: int) -> Result | None:
        """Return the results of the first ``count`` requests as one tensor a name, as ``Results.stacked`` does."""
        made: Result = {}
        for name, memory, own, begins, dtype, shape, row_bytes in self._parts:
            if own or not (isinstance(begins, range) or shape[:1] != (-1,)):
                return None
            its = bytearray(memory[begins[0] : begins[count]])
            made[name] = tensor_of(its, dtype, (count, *_shape_of(shape, row_bytes, len(its) // count)))
        return made

    def bytes_of(self, number: int) -> list[tuple[int, int, memoryview]]:
        """Return the index, the number of rows (-1: no row dimension) and the bytes of each result of a request."""
        found: list[tuple[int, int, memoryview]] = []
        for index, (_, memory, own, begins, _, shape, row_bytes) in enumerate(self._parts):
            its = _taken(own, number) if own else memory[begins[number] : begins[number + 1]]
            found.append((index, len(its) // row_bytes if shape[:1] == (-1,) else -1, its))
        return found


def _taken(own: Own, number: int) -> memoryview:
    """Take out a request's result that lies in memory of its own; it cannot be asked for again."""
    values, own[number] = own[number], NOTHING
    return values


def _shape_of(shape: tuple[int, ...], row_bytes: int, num_bytes: int) -> tuple[int, ...]:
    """Return the shape of a result of this many bytes."""
    return (num_bytes // row_bytes, *shape[1:]) if shape and shape[0] < 0 else shape


def _tensors(part: Part, first: int, count: int) -> Sequence[torch.Tensor]:
    """Return the tensors of consecutive requests for one result; they are made in one call, in memory of their own."""
    _, memory, own, begins, dtype, shape, row_bytes = part
    if own:
        its = [_taken(own, number) for number in range(first, first + count)]
        return [tensor_of(one, dtype, _shape_of(shape, row_bytes, len(one))) for one in its]
    whole = bytearray(memory[begins[first] : begins[first + count]])
    if isinstance(begins, range) or shape[:1] != (-1,):
        each = _shape_of(shape, row_bytes, len(whole) // count)
        made: Sequence[torch.Tensor] = UNBIND(tensor_of(whole, dtype, (count, *each)))
        return made
    sizes = [(begins[first + k + 1] - begins[first + k]) // row_bytes for k in range(count)]
    made = SPLIT(tensor_of(whole, dtype, _shape_of(shape, row_bytes, len(whole))), sizes)
    return made


class Reader:
    """Reads one named result of complete requests."""

    def __init__(self, layout: ResultLayout, spec: RowSpec) -> None:
        self._layout = layout
        self.positions = layout.positions
        """The places of a request that hold the result's rows."""
        self.places = np.array(layout.positions, np.int32)
        """The same places as an array."""
        self.dtype, self._row_shape, self.row_bytes = spec.dtype, spec.shape, spec.num_bytes
        self.name, self.kind, self.is_loop, self.is_single = layout.name, layout.kind, layout.is_loop, layout.is_single

    def part_of(self, own: Own) -> Part:
        """Return one result of requests, each in memory of its own."""
        return Part(self._layout.name, NOTHING, own, (), self.dtype, self._shape, self.row_bytes)

    def part_in(self, memory: memoryview, begins: Sequence[int]) -> Part:
        """Return one result of requests, which lie one after the other in ``memory``."""
        return Part(self._layout.name, memory, NO_OWN, begins, self.dtype, self._shape, self.row_bytes)

    def shape_of(self, count: int) -> tuple[int, ...]:
        """Return the shape of a result of this many rows."""
        return self._row_shape if self.is_single else (count, *self._row_shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._row_shape if self.is_single else (-1, *self._row_shape)

    def read_rows(self, host: Arenas, rows: NDArray[np.int32]) -> Part:
        """Copy single steps out of the host's arena, given their rows."""
        name, kind = self._layout.name, self._layout.kind
        if self.row_bytes > STEP_BYTES:
            own = [host.get_bytes(kind, rows[k : k + 1]) for k in range(rows.size)]
            return Part(name, NOTHING, own, (), self.dtype, self._row_shape, self.row_bytes)
        memory = host.get_bytes(kind, rows)
        begins = range(0, len(memory) + 1, self.row_bytes)
        return Part(name, memory, NO_OWN, begins, self.dtype, self._row_shape, self.row_bytes)

    def read(
        self, processor: Processor, host: Arenas, requests: NDArray[np.int32], each: Sequence[Reader] | None = None
    ) -> Part:
        """Copy the result of requests out of the host's arena, given their ids in the processor.

        ``each`` has the reader of each request, if their results do not lie at the same places.
        """
        kind, is_loop, is_single = self.kind, self.is_loop, self.is_single
        share = self.places.size
        if each is None and not is_loop and share * self.row_bytes <= SMALL_BYTES:  # the usual, in one call
            values = host.empty_bits(kind, share * len(requests))
            processor.copy_results(requests, self.places, host.bytes_of(kind), values)
            begins: Sequence[int] = range(0, values.size + 1, share * self.row_bytes)
            return self.part_in(values.reshape(-1).data, begins)
        ends: NDArray[np.int64] | None = None
        if each is None:
            rows = processor.result_rows(requests, self.places).reshape(-1)
            if is_loop:
                ends = np.arange(1, len(requests) + 1) * len(self.places)
        else:
            positions = [reader.places for reader in each]
            counts = np.array([one.size for one in positions])
            firsts = processor.tables.requests["first_place"][requests]
            rows = processor.tables.places[np.repeat(firsts, counts) + np.concatenate(positions)]
            ends = np.cumsum(counts)
        if ends is not None and is_loop:
            is_taken: NDArray[np.bool_] = rows >= 0
            rows, ends = rows[is_taken], np.cumsum(is_taken, dtype=np.int64)[ends - 1]
            if is_single:
                rows, ends = rows[ends - 1], None
        share = rows.size // len(requests)
        if share * self.row_bytes > SMALL_BYTES:
            split = np.split(rows, range(share, rows.size, share) if ends is None else ends[:-1])
            own = [host.get_bytes(kind, one) for one in split]
            return self.part_of(own)
        memory = host.get_bytes(kind, rows)
        if ends is None:
            begins = range(0, len(memory) + 1, share * self.row_bytes)
        else:
            begins = [0, *(ends * self.row_bytes).tolist()]
        return self.part_in(memory, begins)
