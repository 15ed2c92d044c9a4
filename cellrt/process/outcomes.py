"""The messages of results: steps and results of many requests in one message, with their
tensors one after the other.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from cellrt.definition.bits import as_bits, tensor_of
from cellrt.engine.future import Result
from cellrt.process.model_binding import RowFormat
from cellrt.process.recorded import Template, add_bytes
from cellrt.process.shared_memory import Part, padded

HEAD = struct.Struct("<QQ")
"""The head of a message: numbers of entries and of tensors."""
ENTRY = struct.Struct("<QQii")
"""An entry: request, bytes of its tensors, whether it is its end, number of tensors."""
TENSOR = struct.Struct("<ii")
"""A tensor: its index among the template's results, and its rows; -1: one row without a row dimension."""


class Outcome(NamedTuple):
    """A request's results, or those of a stream's steps before its end.

    ``parts``: the index of each among the template's results, its rows (-1: one without a row dimension) and its bytes.
    """

    id: int
    is_end: bool
    parts: Sequence[tuple[int, int, memoryview]]


def parts_of(template: Template, results: Result, is_end: bool) -> list[tuple[int, int, memoryview]]:
    """Return the parts of an outcome for these results."""
    parts: list[tuple[int, int, memoryview]] = []
    for index, layout in enumerate(template.results):
        value = results.get(layout.name)
        if value is not None:
            bits = np.ascontiguousarray(as_bits(value)).reshape(-1).view(np.uint8).data
            parts.append((index, -1 if layout.is_single or not is_end else len(value), bits))
    return parts


def outcome_parts(outcomes: Sequence[Outcome]) -> list[Part]:
    """Return outcomes as the parts of a message."""
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
    """The results of requests that came in one message, each by a number; tensors are made when they are asked for."""

    def __init__(self) -> None:
        self._each: dict[int, Packed] = {}
        self._count = 0

    def add(self, outcome: Packed) -> int:
        """Add the results of a request; return their number."""
        number, self._count = self._count, self._count + 1
        self._each[number] = outcome
        return number

    def of(self, number: int) -> Result:
        """Return a request's results. Call it once, as they are not kept."""
        return unpacked(self._each.pop(number))

    def packed(self, number: int) -> Packed:
        """Return a request's results in bytes, instead of ``of``."""
        return self._each.pop(number)

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Return the results of some requests."""
        return [self.of(number) for number in numbers]

    def stacked(self, count: int) -> None:
        """Return None: the results of each request lie by themselves."""


Packed = tuple[bytearray, Sequence[tuple[int, int]], Template, Sequence[RowFormat]]
"""Results in bytes: their memory, the index of each in the template with its rows, the template and the formats."""


def read_outcomes(
    body: memoryview, wanted: Container[int]
) -> Iterator[tuple[int, bool, bytearray, Sequence[tuple[int, int]]]]:
    """Yield each outcome of a message: id, whether it is the end, its results in own memory, and their indices and
    rows.

    ``wanted``: the ids of requests; outcomes of other requests are left out.
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
    """A result in the bytes of a request: its name, dtype and shape, and where its bytes begin and end."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def outputs_of(outcome: Packed) -> list[Output]:
    """Return where each of the results lies in the memory in which they came."""
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
    """Return tensors by name, each in memory of its own."""
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
    """Return rows of a kind, ``[rows, *shape]``, or for -1 ``[*shape]``."""
    spec = format.spec
    shape = spec.shape if rows < 0 else (rows, *spec.shape)
    return tensor_of(memory, spec.dtype, shape)
