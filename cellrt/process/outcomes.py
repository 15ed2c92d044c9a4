"""What crosses of results: steps and results of many requests in one message, their tensors one behind the other."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from cellrt.definition.bits import as_bits
from cellrt.engine.future import Result
from cellrt.process.binding import RowFormat
from cellrt.process.memory import Part, padded
from cellrt.process.recorded import Template, add_padded

HEAD = struct.Struct("<QQ")
"""Numbers of entries and of tensors."""
ENTRY = struct.Struct("<QQii")
"""Request, bytes of its tensors, whether it is its end, number of tensors."""
TENSOR = struct.Struct("<ii")
"""Which of the template's results, and rows; -1: one row without a row dimension."""


class Outcome(NamedTuple):
    """A request's results, or what a stream gets of them before its end."""

    id: int
    is_end: bool
    template: Template
    results: Result


def outcome_parts(outcomes: Sequence[Outcome]) -> list[Part]:
    """Outcomes as a message has them."""
    entries, tensors = bytearray(), bytearray()
    data: list[Part] = []
    for id, is_end, template, results in outcomes:
        size = 0
        for index, layout in enumerate(template.results):
            value = results.get(layout.name)
            if value is None:
                continue
            tensors += TENSOR.pack(index, -1 if layout.is_single or not is_end else len(value))
            size += add_padded(data, as_bits(value))
        entries += ENTRY.pack(id, size, is_end, len(results))
    return [HEAD.pack(len(outcomes), len(tensors) // TENSOR.size), entries, tensors, *data]


def read_outcomes(
    body: memoryview, known: Callable[[int], tuple[Template, Sequence[RowFormat]] | None]
) -> Iterator[tuple[int, bool, Result]]:
    """Id, whether it is the end, and results of each outcome of a message, in memory of their own.

    ``known``: what is known of a request by its id; outcomes of those that nobody waits for any more are left out.
    """
    num_entries, num_tensors = HEAD.unpack_from(body)
    first = HEAD.size + num_entries * ENTRY.size
    at = first + num_tensors * TENSOR.size
    tensors = TENSOR.iter_unpack(body[first:at])
    for id, size, is_end, count in ENTRY.iter_unpack(body[HEAD.size : first]):
        places = list(islice(tensors, count))
        if (found := known(id)) is not None:
            template, formats = found
            yield id, bool(is_end), _results(bytearray(body[at : at + size]), places, template, formats)
        at += size


def _results(
    memory: bytearray, places: Sequence[tuple[int, int]], template: Template, formats: Sequence[RowFormat]
) -> Result:
    """Tensors by name that share one memory; ``places``: which of the template's results each is, and its rows."""
    at, results = 0, {}
    for index, rows in places:
        layout = template.results[index]
        format = formats[layout.kind]
        results[layout.name] = _tensor(memory, format, rows, at)
        at += padded(abs(rows) * format.num_bytes)
    return results


def _tensor(memory: bytearray, format: RowFormat, rows: int, begin: int) -> torch.Tensor:
    """Rows of a kind that begin there, ``[rows, *shape]``, or for -1 ``[*shape]``."""
    spec = format.spec
    shape = spec.shape if rows < 0 else (rows, *spec.shape)
    count = abs(rows) * format.num_bytes // spec.dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=spec.dtype)
    return torch.frombuffer(memory, dtype=spec.dtype, offset=begin, count=count).view(shape)
