"""The driver's access to the tables: pages, which it copies for the core, and sessions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cellrt.core.state import page_list, tables
from cellrt.core.state.page_list import page_list_at
from cellrt.core.state.tables import LOCATION_SHIFT, Tables


class SessionPages(NamedTuple):
    """A growing state between requests: kind of its pages, rows, and the handles of its pages."""

    kind: int
    length: int
    handles: list[int]


def take_copies(t: Tables) -> list[list[int]]:
    """Take the pages to copy before the next task is launched, in order: (kind, handle from, handle to) of each."""
    count = int(t.settings["num_copies"][0])
    if not count:
        return []
    t.settings["num_copies"] = 0
    copies: list[list[int]] = t.copies[: 3 * count].reshape(-1, 3).tolist()
    return copies


def note_copies(t: Tables, count: int, elapsed_ns: int) -> None:
    """Note the time of copies. A time near the least of the latest ones is kept, as for steps."""
    known, measured = float(t.settings["page_ns"][0]), elapsed_ns / count
    t.settings["page_ns"] = min(measured, known * 1.01) if known else measured


def session_pages(t: Tables, session: int, first: int, count: int) -> list[SessionPages]:
    """Return the pages of each of ``count`` growing states of a session without a live request.

    The states are those from slot ``first`` on.
    """
    at = session * tables.MAX_STATES + first
    return [
        SessionPages(int(slot["kind"]), int(slot["length"]), t.places[slot["place"] :][: int(slot["pages"])].tolist())
        for slot in t.slots[at : at + count]
    ]


def bring_pages(t: Tables, session: int, slot: int, length: int) -> None:
    """Note that this many rows of a growing state come with the session's next request (``Processor.drop_states``)."""
    t.slots["length"][session * tables.MAX_STATES + slot] = length


def request_pages(t: Tables, request: int) -> dict[int, list[int]]:
    """Return the handles of the pages that a live request has of its session's growing states, by their slots."""
    row, found = t.requests[request], dict[int, list[int]]()
    for k in range(int(row["num_page_lists"])):
        listed = page_list_at(t.links, int(row["page_lists"]) + page_list.WORDS * k)
        found[int(listed.slot)] = t.places[listed.place :][: listed.held].tolist()
    return found


def sessions_at(t: Tables, worker: int) -> list[int]:
    """Return the sessions without a live request that have state at a worker."""
    found = set((np.flatnonzero(t.slots["row"] >> LOCATION_SHIFT == worker) // tables.MAX_STATES).tolist())
    for at in np.flatnonzero(t.slots["pages"]).tolist():
        first, count = t.slots["place"][at], t.slots["pages"][at]
        if (t.places[first : first + count] >> LOCATION_SHIFT == worker).any():
            found.add(at // tables.MAX_STATES)
    return sorted(found)
