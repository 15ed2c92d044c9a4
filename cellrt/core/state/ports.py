"""The inputs and outputs of a cell type, as the core sees them."""

from __future__ import annotations

from typing import NamedTuple


class Port(NamedTuple):
    """One input or output of a cell type: kind of its rows; for an input, the output it is carried from, or -1.

    ``page_size``: rows of a page, for a growing state; ``appends``: whether the cell appends to it. ``is_span``: for an
    input that the scheduler fills, which says which rows are of one node.
    """

    kind: int
    carry: int = -1
    ragged: bool = False
    page_size: int = 0
    appends: bool = False
    is_span: bool = False
