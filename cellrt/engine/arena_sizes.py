"""The number of rows, or pages, of each kind that an engine has at each worker and at the host.

It is chosen by ``arena_bytes`` and ``page_bytes``, or by the free memory: then the pages of all models together take
less than what is free when the engine is made. On a CPU an arena takes memory as its rows are first written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.worker.arenas import rows_for
from cellrt.worker.free_memory import free_bytes

MAX_ARENA_ROWS = 1 << 18
MAX_ARENA_PAGES = 1 << 16
HOST_TIMES = 4
"""The rows of the host, which holds inputs and results, as a multiple of those of a worker."""
USUAL_ROWS, USUAL_PAGES = 64 << 20, 256 << 20
"""The bytes of one kind at each worker if the system does not say how much memory is free.

For rows this is the most by default, unless full batches need more.
"""
LEAST_BYTES = 16 << 20
ROWS_PART, BATCHES_PART, PAGES_PART = 32, 8, 3
"""The divisors of the free memory that limit rows and pages.

The first gives the most that one kind of rows takes, the host's included, the second the same if full batches need
more. The third gives the most of all kinds of pages of one registration, from the memory that is left.
"""
DEVICE_ROWS_PART, DEVICE_BATCHES_PART, DEVICE_PAGES_PART = 64, 16, 4
"""The same for a device's own memory, which is taken at once."""
BATCHES = 4
"""The full batches that the rows of a kind are to hold, if there is memory for it."""


class ArenaBytes(NamedTuple):
    """The values of ``arena_bytes`` and ``page_bytes`` of ``Engine``; None: as the free memory allows."""

    rows: int | None = None
    pages: int | None = None


AS_MEMORY_ALLOWS = ArenaBytes()


class NumRows(NamedTuple):
    """The rows, or pages, of a kind at the host and at each worker."""

    host: int
    worker: int


class ArenaSizes:
    """The sizes of one engine's arenas; one thread at a time may use it.

    Args:
        given: the engine's options.
        num_workers: the number of the engine's workers.
        free_at_worker: returns the bytes that are free for the arenas of a worker in memory of its own; None: its
            arenas are in the host's memory.
    """

    def __init__(self, given: ArenaBytes, num_workers: int, free_at_worker: Callable[[], int] | None = None) -> None:
        self._given, self._num_workers, self._free_at_worker = given, num_workers, free_at_worker
        self._free = free_bytes()
        self._left = self._free or 0
        """The bytes for pages that are still to come."""

    def choose(self, specs: Sequence[RowSpec], cells: Iterable[Cell]) -> dict[RowSpec, NumRows]:
        """Return the number of rows of each of these new kinds; ``cells`` are those of the model that brings them."""
        batches = _largest_batches(cells)
        at_worker = None if self._free_at_worker is None else self._free_at_worker()
        paged = sum(_bytes_of_state(spec) for spec in specs)
        shared, chosen = self._left // PAGES_PART, {}
        for spec in specs:
            if spec.page_size:
                host_share = shared * _bytes_of_state(spec) // paged
                own = None if at_worker is None else at_worker // DEVICE_PAGES_PART * _bytes_of_state(spec) // paged
                worker, host = self._page_bytes(host_share, own)
                if self._given.pages is None:
                    self._left -= host_share
                most = MAX_ARENA_PAGES
            else:
                worker, host = self._row_bytes(BATCHES * batches.get(spec, 0) * spec.num_bytes, at_worker)
                most = MAX_ARENA_ROWS
            chosen[spec] = NumRows(rows_for(spec, host, HOST_TIMES * most), rows_for(spec, worker, most))
        return chosen

    def _page_bytes(self, share: int, at_worker: int | None) -> tuple[int, int]:
        """Return the bytes of a kind of pages at a worker and at the host.

        ``at_worker`` is its share of a worker's own memory.
        """
        given = self._given.pages or (USUAL_PAGES if self._free is None else None)
        if given is not None:
            return given, HOST_TIMES * given
        if at_worker is None:
            worker = max(LEAST_BYTES, share // (self._num_workers + HOST_TIMES))
            return worker, HOST_TIMES * worker
        worker = max(LEAST_BYTES, at_worker)
        return worker, max(LEAST_BYTES, min(HOST_TIMES * worker, share))

    def _row_bytes(self, batches: int, at_worker: int | None) -> tuple[int, int]:
        """Return the bytes of a kind of rows at a worker and at the host; ``batches``: the bytes of full batches."""
        given = self._given.rows or (USUAL_ROWS if self._free is None else None)
        if given is not None:
            return given, HOST_TIMES * given
        free = self._free or 0
        if at_worker is None:
            places = self._num_workers + HOST_TIMES
            worker = _between(free // ROWS_PART // places, batches, free // BATCHES_PART // places)
            return worker, HOST_TIMES * worker
        worker = _between(at_worker // DEVICE_ROWS_PART, batches, at_worker // DEVICE_BATCHES_PART)
        return worker, max(LEAST_BYTES, min(HOST_TIMES * worker, free // BATCHES_PART))


def _bytes_of_state(spec: RowSpec) -> int:
    """Return the bytes that a state grows by at a step, from the spec of its pages: memory is shared out by it."""
    return spec.num_bytes // spec.page_size if spec.page_size else 0


def _between(usual: int, wanted: int, most: int) -> int:
    """Return the bytes of rows: the usual ones, or as many as are wanted up to the most."""
    return max(LEAST_BYTES, min(USUAL_ROWS, usual), min(wanted, most))


def _largest_batches(cells: Iterable[Cell]) -> Mapping[RowSpec, int]:
    """Return the most rows of a task, by kind of rows."""
    found: dict[RowSpec, int] = {}
    for cell in cells:
        for spec in (*cell.inputs.values(), *cell.outputs.values()):
            found[spec.stored] = max(found.get(spec.stored, 0), cell.max_batch_rows or cell.max_batch)
    return found
