"""The page list of a growing state, in ``links``: where its pages are, and how many rows they hold.

A *page* is a row of an arena that holds ``page_size`` rows of a state that grows by one row a step, as the keys and
values of a decoder do (Pensieve section 3.4.1 calls them chunks). Row r of the state is row ``r % page_size`` of page
``r // page_size`` of the list. So a step appends to a place that follows from its position, and may write it twice.
"""

from __future__ import annotations

from cellrt.core.state.tables import Request, Tables
from cellrt.native.jit import compiled
from cellrt.native.row_types import Row, i4, num_words, row_view


class PageList(Row):
    """The pages and rows of a growing state of a request."""

    place: i4  # the first of the places that hold the pages' handles: a block of its own
    capacity: i4  # pages, at most
    before: i4  # rows that came with the session
    held: i4  # pages, from the first place on
    rows: i4  # rows that are there: those that came, and those of steps that are done
    kind: i4
    page_size: i4  # rows of a page
    slot: i4  # which of its session's states it is, or -1
    is_broken: i4  # 1 once a step of the request has failed: what comes after it does not count
    again: i4  # of a request's first list: the first place of the rows that a loop reads again after a drop of pages
    num_again: i4  # the number of these; 0: none


page_list_at = row_view(PageList)
WORDS = num_words(PageList)


@compiled
def page_list_of(t: Tables, request: Request, k: int) -> PageList:
    """Return page list number ``k`` of a request."""
    return page_list_at(t.links, request.page_lists + WORDS * k)
