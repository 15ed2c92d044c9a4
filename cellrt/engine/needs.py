"""A request's need of an engine's memory, and the option that makes room for it if there is none.

Rows are reserved at admission at every worker and at the host. Pages are reserved as many as the request may need, out
of those that a worker has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cellrt.core.processor import Processor, SizedTemplate
from cellrt.core.state import page_list
from cellrt.core.state.tables import MAX_STATES
from cellrt.definition.spec import RowSpec
from cellrt.engine.arena_sizes import HOST_TIMES, MAX_ARENA_PAGES, MAX_ARENA_ROWS


class Need(NamedTuple):
    """A request's need of one kind, and how much of that kind there is.

    Attributes:
        spec: the spec of the rows, or of the pages.
        worker, host: rows at each worker and at the host; for pages, those that it may need, and 0.
        there: rows, or pages, at each worker.
        there_host: the same at the host.
    """

    spec: RowSpec
    worker: int
    host: int
    there: int
    there_host: int

    @property
    def bytes_at_worker(self) -> int:
        """The bytes at each worker that has work of the request."""
        return self.worker * self.spec.num_bytes

    @property
    def bytes_at_host(self) -> int:
        """The bytes at the host."""
        return self.host * self.spec.num_bytes

    @property
    def is_met(self) -> bool:
        """True if an empty engine has this many."""
        return self.worker <= self.there and self.host <= self.there_host

    def lacking(self) -> str:
        """Return a text that says what is missing, and which option to raise to what."""
        if self.spec.page_size:
            what = f"{self.worker:,} {self.spec}, a worker has {self.there:,}"
            option, most, wanted = "page_bytes", MAX_ARENA_PAGES, self.worker
        else:
            what = (
                f"{self.worker:,} rows of {self.spec} at a worker and {self.host:,} at the host, which have "
                f"{self.there:,} and {self.there_host:,}"
            )
            option, most, wanted = "arena_bytes", MAX_ARENA_ROWS, max(self.worker, -(-self.host // HOST_TIMES))
        if wanted > most:
            return f"{what}; an engine has at most {most:,}: make the request smaller"
        return f"{what}; that takes Engine({option}={wanted * self.spec.num_bytes}) or more"


def needs_of(template: SizedTemplate, processor: Processor, kinds: Sequence[RowSpec], session: int = -1) -> list[Need]:
    """Return a request's needs, one for each kind of which it needs any.

    ``session``: the session whose state it goes on with, or -1.
    """
    arrays, table, found = template.arrays, processor.tables.kinds, []
    for kind, (worker, host) in enumerate(arrays.needs.tolist()):
        if kinds[kind].page_size:
            worker, host = _pages_wanted(template, processor, kind, session), 0
        if worker or host:
            there = int(table["worker_rows"][kind]), int(table["host_rows"][kind])
            found.append(Need(kinds[kind], worker, host, *there))
    return found


def _pages_wanted(template: SizedTemplate, processor: Processor, kind: int, session: int) -> int:
    """Return the pages that a request may need, with those that its session has kept."""
    pages = 0
    for its, page_size, rows, slot in template.arrays.pages.tolist():
        if its == kind:
            kept = 0
            if session >= 0 and slot >= 0:
                kept = int(processor.tables.slots["length"][session * MAX_STATES + slot])
            pages += -(-(kept + rows) // page_size)
    return pages


def why_never(template: SizedTemplate, processor: Processor, kinds: Sequence[RowSpec], session: int = -1) -> str | None:
    """Return what part of a request an empty engine has no room for, with the option that makes it; None if it fits."""
    if template.fits and session < 0:
        return None
    lacking = [
        *_tables_lacking(template, processor),
        *(need.lacking() for need in needs_of(template, processor, kinds, session) if not need.is_met),
    ]
    return "; and ".join(lacking) or processor.why_too_large(template, kinds)


def _tables_lacking(template: SizedTemplate, processor: Processor) -> Iterator[str]:
    arrays = template.arrays
    links = arrays.links.size + arrays.lists.size + arrays.states.size + arrays.needs.size
    for what, wanted, option in (
        ("nodes", arrays.nodes.size, "max_nodes"),
        ("values", arrays.values.size, "max_values"),
        ("links", links + page_list.WORDS * len(arrays.pages), "max_links"),
        ("subgraphs", arrays.subgraphs.size, "max_subgraphs"),
        (
            "rows of results and sequences, and pages",
            template.num_places + template.num_pages(),
            "max_places",
        ),
    ):
        there = getattr(processor.limits, option)
        if wanted > there:
            yield f"{wanted:,} {what}, the tables hold {there:,}; that takes Limits({option}={wanted}) or more"
