"""The messages of recorded requests: the common parts of requests of equal programs, once, and the tensors of each.

Requests of one graph cross together: the number of their template, their number, and each of their tensors for all of
them; the template says where each begins.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.graph.known import Alike
from cellrt.graph.results import Recorded, ResultLayout, StateLayout
from cellrt.process.model_binding import RowFormat
from cellrt.process.shared_memory import Part, padded

LENGTH = struct.Struct("<Q")
PLAN = struct.Struct("<3Q")
"""The name of what runs for a template: the generation of templates, the template's number, the plan's."""
PADDING = bytes(8)
SMALL_BYTES = 1 << 14
MAX_HEADS = 128

Externals = tuple[tuple[int, int], ...]
"""The kind and rows of each of a request's tensors."""


class Template(NamedTuple):
    """The common parts of requests of equal programs; a dict key.

    Attributes:
        binding: number of the model's.
        program, results, states: see ``Recorded``.
        externals: kind and rows of each of the request's tensors, which the program has too.
    """

    binding: int
    program: bytes
    results: tuple[ResultLayout, ...]
    states: tuple[StateLayout, ...]
    externals: Externals

    @property
    def num_bytes(self) -> int:
        """The approximate bytes that keeping it takes."""
        return len(self.program) + 512


def template_of(binding: int, alike: Alike) -> Template:
    """Return the template of recorded requests."""
    recorded, count = alike.recorded, len(alike.indices)
    externals = tuple([(kind, len(rows) // count) for kind, rows in recorded.externals])
    return Template(binding, recorded.program, recorded.results, recorded.states, externals)


def template_parts(template: Template) -> list[Part]:
    """Return a template as the parts of a message."""
    text = _head_of(template.binding, template.externals, template.results, template.states)
    return [LENGTH.pack(len(text)), text, template.program]


def read_template(body: memoryview) -> Template:
    """Return a copy of the template in a message."""
    (size,) = LENGTH.unpack_from(body)
    binding, externals, results, states = _read_head(bytes(body[LENGTH.size : LENGTH.size + size]))
    return Template(binding, bytes(body[LENGTH.size + size :]), results, states, externals)


@functools.lru_cache(MAX_HEADS)
def _head_of(
    binding: int,
    externals: Externals,
    results: tuple[ResultLayout, ...],
    states: tuple[StateLayout, ...],
) -> bytes:
    """Return a template without its program, as JSON. Most trees have programs of their own, and this in common."""
    head = {
        "binding": binding,
        "externals": externals,
        "results": [layout._replace(positions=_plain(layout.positions)) for layout in results],
        "states": states,
    }
    return json.dumps(head).encode()


@functools.lru_cache(MAX_HEADS)
def _read_head(text: bytes) -> tuple[int, Externals, tuple[ResultLayout, ...], tuple[StateLayout, ...]]:
    head = json.loads(text)
    results = tuple(
        ResultLayout(name, kind, range(*at["range"]) if isinstance(at, dict) else tuple(at), is_loop, is_single)
        for name, kind, at, is_loop, is_single in head["results"]
    )
    externals = tuple((int(kind), int(rows)) for kind, rows in head["externals"])
    return int(head["binding"]), externals, results, tuple(StateLayout(*state) for state in head["states"])


def _plain(positions: Sequence[int]) -> Any:
    return {"range": (positions.start, positions.stop)} if isinstance(positions, range) else list(positions)


def tensor_parts(groups: Sequence[Alike]) -> list[Part]:
    """Return the tensors of requests, each for all requests of a graph, aligned to words."""
    parts: list[Part] = []
    for recorded, _ in groups:
        for _, rows in recorded.externals:
            if rows.nbytes <= SMALL_BYTES:
                _add(parts, rows.tobytes(), rows.nbytes)
            else:
                add_bytes(parts, np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return parts


def add_bytes(parts: list[Part], memory: memoryview) -> int:
    """Add bytes, padded to a whole number of words; return their number."""
    size = len(memory)
    # A copy takes a fraction of a view's time.
    return _add(parts, bytes(memory) if size <= SMALL_BYTES else memory, size)


def _add(parts: list[Part], part: Part, size: int) -> int:
    parts.append(part)
    if rest := size & 7:
        parts.append(PADDING[rest:])
        size += 8 - rest
    return size


def read_requests(groups: Sequence[tuple[Template, int]], formats: Sequence[RowFormat], tensors: bytes) -> list[Alike]:
    """Return requests of these templates, this many of each; their tensors share the memory of ``tensors``.

    Raise ValueError if that holds less or more than they need.
    """
    at, index, found = 0, 0, []
    for template, num_requests in groups:
        externals: list[tuple[int, NDArray[Any]]] = []
        for kind, each in template.externals:
            format, count = formats[kind], each * num_requests
            size = count * format.num_bytes
            rows = np.frombuffer(tensors, format.bits, size // format.bits.itemsize, at)
            externals.append((kind, rows.reshape(count, *format.spec.shape) if format.spec.shape else rows))
            at += padded(size)
        recorded = Recorded(template.program, externals, template.results, template.states)
        found.append(Alike(recorded, range(index, index + num_requests)))
        index += num_requests
    if at != len(tensors):
        raise ValueError(f"the requests have tensors of {at} bytes, {len(tensors)} came")
    return found
