"""What crosses of results: steps and results of many requests in one message, their tensors one behind the other."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from cellrt.definition.bits import as_bits, tensor_of
from cellrt.engine.future import Result
from cellrt.process.binding import RowFormat
from cellrt.process.memory import Part, padded
from cellrt.process.recorded import Template, add_bytes

HEAD = struct.Struct("<QQ")
"""Numbers of entries and of tensors."""
ENTRY = struct.Struct("<QQii")
"""Request, bytes of its tensors, whether it is its end, number of tensors."""
TENSOR = struct.Struct("<ii")
"""Which of the template's results, and rows; -1: one row without a row dimension."""


class Outcome(NamedTuple):
    """A request's results, or what a stream gets of them before its end.

    ``parts``: which of the template's results each is, its rows (-1: one without a row dimension) and its bytes.
    """

    id: int
    is_end: bool
    parts: Sequence[tuple[int, int, memoryview]]


def parts_of(template: Template, results: Result, is_end: bool) -> list[tuple[int, int, memoryview]]:
    """What an outcome has of these results."""
    parts: list[tuple[int, int, memoryview]] = []
    for index, layout in enumerate(template.results):
        value = results.get(layout.name)
        if value is not None:
            bits = np.ascontiguousarray(as_bits(value)).reshape(-1).view(np.uint8).data
            parts.append((index, -1 if layout.is_single or not is_end else len(value), bits))
    return parts


def outcome_parts(outcomes: Sequence[Outcome]) -> list[Part]:
    """Outcomes as a message has them."""
    entries, tensors = bytearray(), bytearray()
    data: list[Part] = []
    for id, is_end, parts in outcomes:
        size = 0
        for index, rows, memory in parts:
            tensors += TENSOR.pack(index, rows)
            size += add_bytes(data, memory)
        entries += ENTRY.pack(id, size, is_end, len(parts))
    return [HEAD.pack(len(outcomes), len(tensors) // TENSOR.size), entries, tensors, *data]


class Arrived:
    """The results of requests that came in one message, each by its number; tensors are made when somebody asks."""

    def __init__(self) -> None:
        self._each: dict[int, Packed] = {}
        self._count = 0

    def add(self, outcome: Packed) -> int:
        """Adds those of a request; returns their number."""
        number, self._count = self._count, self._count + 1
        self._each[number] = outcome
        return number

    def of(self, number: int) -> Result:
        """A request's results; asked for once, as nobody keeps them for others."""
        return unpacked(self._each.pop(number))

    def packed(self, number: int) -> Packed:
        """A request's results as they came; in the place of ``of``."""
        return self._each.pop(number)

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Some requests' results."""
        return [self.of(number) for number in numbers]


Packed = tuple[bytearray, Sequence[tuple[int, int]], Template, Sequence[RowFormat]]
"""Results as they came: their memory, which of the template's results each is with its rows, and what they mean."""


def read_outcomes(
    body: memoryview, wanted: Container[int]
) -> Iterator[tuple[int, bool, bytearray, Sequence[tuple[int, int]]]]:
    """Of each outcome of a message: id, whether it is the end, its results in memory of their own, and which they are
    with their rows.

    ``wanted``: the ids of requests; outcomes of those that nobody waits for any more are left out.
    """
    num_entries, num_tensors = HEAD.unpack_from(body)
    first = HEAD.size + num_entries * ENTRY.size
    at = first + num_tensors * TENSOR.size
    tensors = list(TENSOR.iter_unpack(body[first:at]))
    begin = 0
    for id, size, is_end, count in ENTRY.iter_unpack(body[HEAD.size : first]):
        if id in wanted:
            yield id, bool(is_end), bytearray(body[at : at + size]), tensors[begin : begin + count]
        begin += count
        at += size


class Output(NamedTuple):
    """One of the results in what came of a request: its name, dtype and shape, and which bytes there are its."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def outputs_of(outcome: Packed) -> list[Output]:
    """Where each of the results lies in the memory in which they came."""
    _, places, template, formats = outcome
    at, found = 0, list[Output]()
    for index, rows in places:
        layout = template.results[index]
        format = formats[layout.kind]
        size = abs(rows) * format.num_bytes
        shape = [*format.spec.shape] if rows < 0 else [rows, *format.spec.shape]
        found.append(Output(layout.name, format.spec.dtype, shape, at, at + size))
        at += padded(size)
    return found


def unpacked(outcome: Packed) -> Result:
    """Tensors by name, each in memory of its own."""
    memory, places, template, formats = outcome
    at, results, is_alone = 0, Result(), len(places) == 1
    for index, rows in places:
        layout = template.results[index]
        format = formats[layout.kind]
        size = abs(rows) * format.num_bytes
        results[layout.name] = _tensor(memory if is_alone else memory[at : at + size], format, rows)
        at += padded(size)
    return results


def _tensor(memory: bytearray, format: RowFormat, rows: int) -> torch.Tensor:
    """Rows of a kind, ``[rows, *shape]``, or for -1 ``[*shape]``."""
    spec = format.spec
    shape = spec.shape if rows < 0 else (rows, *spec.shape)
    return tensor_of(memory, spec.dtype, shape)
