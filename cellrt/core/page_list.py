"""How the page list of a growing state lies in ``links``: where its pages are, and how many rows they hold.

A *page* is a row of an arena that holds ``PAGE_SIZE`` rows of a state that grows by one row a step, as the keys and
values of a decoder do (Pensieve section 3.4.1 calls them chunks). Row r of the state is row ``r % PAGE_SIZE`` of page
``r // PAGE_SIZE`` of the list, so that what a step appends has its place by its position, and may be written twice.
"""

from __future__ import annotations

PLACE = 0  # the first of the places that hold the pages' handles: a block of its own
CAPACITY = 1  # pages, at most
BASE = 2  # rows that came with the session
HELD = 3  # pages, from the first place on
ROWS = 4  # rows that are there: those that came, and those of steps that are done
KIND = 5
PAGE_SIZE = 6
SLOT = 7  # which of its session's states it is, or -1
IS_BROKEN = 8  # 1 once a step of the request has failed: what comes after it does not count
AGAIN = 9  # the first of the places of what a loop reads once more whose pages were dropped; of a request's first list
NUM_AGAIN = 10  # how many; 0: none
WORDS = 11
