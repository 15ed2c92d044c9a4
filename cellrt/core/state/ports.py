"""What a cell type reads and makes, as the core sees it."""

from __future__ import annotations

from typing import NamedTuple


class Port(NamedTuple):
    """One input or output of a cell type: kind of its rows; for an input, the output it is carried from, or -1.

    ``page_size``: rows of a page, of a growing state; ``appends``: whether the cell appends to it. ``is_span``: of an
    input that nobody gives, which says which rows are of one node.
    """

    kind: int
    carry: int = -1
    ragged: bool = False
    page_size: int = 0
    appends: bool = False
    is_span: bool = False
