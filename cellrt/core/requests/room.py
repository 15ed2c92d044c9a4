"""Checks whether a request has room: in an empty engine, and now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cellrt.core.state import page_list
from cellrt.core.state.buddy_allocator import PLACES, num_free_rows
from cellrt.core.state.settings import Limits
from cellrt.core.state.tables import BRING, HOST, MAX_KINDS, MAX_STATES, Tables
from cellrt.core.templates.sized_template import SizedTemplate


def why_too_large(
    template: SizedTemplate,
    limits: Limits,
    kind_rows: Sequence[tuple[int, int]],
    most_refs: int,
    kinds: Sequence[object],
) -> str | None:
    """Return the reason why a template would not fit even in an empty engine; None if it fits.

    Args:
        template: the request's template.
        limits: the limits of the tables.
        kind_rows: rows of each kind at a worker and at the host.
        most_refs: most inputs of a node.
        kinds: the names of the kinds.
    """
    if template.fits:
        return None
    # Compare with the tables, then with the arenas, then with a task's buffer.
    arrays = template.arrays
    links = arrays.links.size + arrays.lists.size + arrays.states.size + arrays.needs.size
    links += page_list.WORDS * len(arrays.pages)
    for what, wanted, limit in (
        ("nodes", arrays.nodes.size, limits.max_nodes),
        ("values", arrays.values.size, limits.max_values),
        ("links", links, limits.max_links),
        ("subgraphs", arrays.subgraphs.size, limits.max_subgraphs),
        (
            "rows of results and sequences, and pages",
            template.num_places + template.num_pages(),
            limits.max_places,
        ),
    ):
        if wanted > limit:
            return f"{wanted} {what}, the tables hold {limit}"
    for kind, ((worker, host), (worker_rows, host_rows)) in enumerate(zip(arrays.needs.tolist(), kind_rows)):
        if worker > worker_rows or host > host_rows:
            return (
                f"{worker} rows of {kinds[kind]} at a worker and {host} at the host, the arenas hold {worker_rows} "
                f"and {host_rows} (see Engine(arena_bytes=...))"
            )
        if (pages := template.num_pages(kind)) > worker_rows:
            return f"{pages} {kinds[kind]}, a worker has {worker_rows} (see Engine(page_bytes=...))"
    if template.most_refs > most_refs:
        return (
            f"a node with {template.most_refs} inputs, at most {most_refs} are possible "
            "(a cell with a larger max_batch makes room for more)"
        )
    return None


def has_rows(t: Tables, template: SizedTemplate, session: int) -> bool:
    """Return whether the arenas, and the tables' lists of rows, have room for a request of a session (-1: none) now."""
    arrays = template.arrays
    kinds = t.kinds[: arrays.needs.shape[0]]
    reserved = np.stack([kinds["reserved_worker"], kinds["reserved_host"]], 1)
    rows = np.stack([kinds["worker_rows"], kinds["host_rows"]], 1)
    has_rows = (reserved + arrays.needs <= rows) | (kinds["is_paged"] != 0)[:, None]
    lists = [(kind, *_pages_of(t, each, session)) for kind, *each in arrays.pages.tolist()]
    has_pages = all(
        kinds["reserved_worker"][kind] + sum(wanted - here for its, wanted, here, _ in lists if its == kind)
        <= kinds["worker_rows"][kind] + kinds["host_rows"][kind]
        and sum(saved for its, _, _, saved in lists if its == kind) <= t.arenas[HOST * MAX_KINDS + kind]["num_free"]
        for kind in {kind for kind, *_ in lists}
    )
    places = template.num_places + sum(wanted for _, wanted, *_ in lists)
    return has_pages and bool(has_rows.all()) and places <= num_free_rows(t.blocks, PLACES, places)


def _pages_of(t: Tables, pages: Sequence[int], session: int) -> tuple[int, int, int]:
    """Return three counts of pages of a list.

    They are the most that it may need with those that its session keeps, those that the session has in the arenas, and
    those that come with the request.
    """
    page_size, rows, slot_number = pages
    if session < 0 or slot_number < 0:
        return -(-rows // page_size), 0, 0
    slot = t.slots[session * MAX_STATES + slot_number]
    kept = int(slot["length"])
    saved = -(-kept // page_size) if slot["row"] == BRING else 0
    return -(-(kept + rows) // page_size), int(slot["pages"]), saved
