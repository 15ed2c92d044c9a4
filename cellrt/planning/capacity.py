"""Measures the memory that a request takes in an engine, and how many such requests fit, by admitting them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cellrt.core.processor import SizedTemplate
from cellrt.engine.engine import Engine
from cellrt.engine.needs import Need, needs_of


@dataclass(frozen=True)
class Taken:
    """The rows of one kind, or the pages of a growing state, that a request takes."""

    kind: str
    rows_at_worker: int
    rows_at_host: int
    pages: int
    """The most that it may come to; at a worker, and at the host while it is suspended."""
    bytes_at_worker: int
    bytes_at_host: int


@dataclass(frozen=True)
class Room:
    """The memory that a request takes, and how many such requests fit.

    Attributes:
        kinds: what it takes of each kind.
        fit: how many such requests an engine of one worker admits at a time.
        fit_at_worker: how many such requests the worker has all pages for; ``fit`` if there are no growing states.
        first_full: what is full then, and the option that makes more.
    """

    kinds: list[Taken]
    fit: int
    fit_at_worker: int
    first_full: str

    @property
    def bytes_at_worker(self) -> int:
        """The bytes that a request takes at the worker, over all kinds."""
        return sum(kind.bytes_at_worker for kind in self.kinds)

    @property
    def bytes_at_host(self) -> int:
        """The bytes that a request takes at the host, over all kinds."""
        return sum(kind.bytes_at_host for kind in self.kinds)


def room_for(engine: Engine, template: SizedTemplate) -> Room:
    """Try how many requests of a template an engine takes at a time that has nothing to do."""
    needs = needs_of(template, engine._processor, engine._registry.kinds)
    fit = engine._manager.turns.call(lambda: _num_admitted(engine, template))
    paged = [need.there // need.worker for need in needs if need.spec.page_size and need.worker]
    return Room([_taken(need) for need in needs], fit, min([fit, *paged]), _first_full(engine, needs, fit))


def _num_admitted(engine: Engine, template: SizedTemplate) -> int:
    """Admit requests in a turn until nothing more fits, release them again, and return their number."""
    processor = engine._processor
    ids, _ = processor.admit_many(template, np.arange(processor.limits.max_requests))
    for request in ids:
        processor.cancel(request)
    return len(ids)


def _taken(need: Need) -> Taken:
    rows, pages = (0, need.worker) if need.spec.page_size else (need.worker, 0)
    return Taken(str(need.spec), rows, need.host, pages, need.bytes_at_worker, need.bytes_at_host)


def _first_full(engine: Engine, needs: list[Need], fit: int) -> str:
    if fit >= engine._processor.limits.max_requests:
        return "cellrt.Limits(max_requests=...)"
    for need in needs:
        places = [(need.worker, need.there + (need.there_host if need.spec.page_size else 0))]
        if not need.spec.page_size:
            places.append((need.host, need.there_host))
        if any((fit + 1) * wanted > there for wanted, there in places):
            return f"{need.spec}: Engine({'page_bytes' if need.spec.page_size else 'arena_bytes'}=...)"
    return "the scheduler's tables: Engine(limits=cellrt.Limits(...))"
