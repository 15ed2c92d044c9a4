"""Signatures: the operations of a task apart from its row numbers. Tasks of equal signatures share captured work."""

from __future__ import annotations

from typing import NamedTuple

NOWHERE = -1
STOPS, HAD_STOPPED = 1, 2
"""The answers of a row of a task that is no loop: it stops, or it stopped in a task before; else 0."""
NOT_FINITE, OUTSIDE = 1, 2
"""Flags of the faults of a position (of a loop: a row): an output is not finite, an input is outside its limits."""


class Source(NamedTuple):
    """Rows of an input that lie at one location."""

    location: int
    num_rows: int
    rows_at: int
    """The first word of their row numbers there; for the host, in the upload ring."""
    positions_at: int
    """The first word of their positions among the input's rows, or NOWHERE: all, in order."""


class InputSignature(NamedTuple):
    """One input: its rows, and for a ragged one ``num_offsets`` offsets.

    One with pages has no sources: ``num_rows`` is the pages of a node, and at ``offsets_at`` are their numbers
    (``node_reading.py``).
    """

    kind: int
    num_rows: int
    sources: tuple[Source, ...]
    offsets_at: int
    num_offsets: int


class OutputSignature(NamedTuple):
    """One output: the rows of it that go to the arena, and those that go to the host (to rows of the download ring).

    Of a fused cell, ``stores`` are all its positions, and ``result_positions_at`` has rows of the arena.
    """

    kind: int
    stores: int
    rows_at: int
    positions_at: int
    """The first word of the stored rows' positions; NOWHERE: all, in order."""
    results: int
    result_rows_at: int
    result_positions_at: int
    every_step: bool


class Signature(NamedTuple):
    """The operations of a task, apart from its row numbers."""

    type_id: int
    fused: bool
    """True if the cell reads and writes arena rows itself."""
    sizes: tuple[int, ...]
    """The rows of each step, with padding.

    For a loop they are all rows at every step; for a form that reads the number of rows on the device, the most there
    may
    be.
    """
    positions: int
    """The rows of all steps, with padding; for a loop, those of one step."""
    is_loop: bool
    stop: int
    """The output with the stop flag, of a loop or at the first step of rows of loops; or NOWHERE."""
    inputs: tuple[InputSignature, ...]
    outputs: tuple[OutputSignature, ...]
    lengths_at: int
    answers: int
    """The number of int32 answers that come back.

    For a loop they are steps done and flags of faults, of each row. For other tasks they are the answer of each row of
    the
    first step if ``tells_rows``, and flags of faults of each position if ``tells_bad``.
    """
    answers_at: int
    tells_bad: bool
    """True if a task that is no loop has an answer for each position: ``NOT_FINITE``, ``OUTSIDE``, or 0."""
    sizes_at: int
    """The first word of the sizes of a fused run that may go in one call, else NOWHERE."""
    spans_at: int
    """The first word of the spans that a fused cell reads (``SpannedRows``), or NOWHERE.

    The span of the first state comes first, then that of each step.
    """
    flags_at: int
    """The first word of the flags of rows of loops that go ahead, else NOWHERE.

    The flags that rows read come first, then those that they write.
    """
    num_words: int
    tells_rows: bool = False
    """True if there is an answer for each row.

    It is so for loops, for tasks with a stop output, and where results are shown of rows that may have stopped in a
    task
    before.
    """
    num_nodes: int = 0
    """The number of nodes with padding, for a cell that gets the rows of each node."""
    nodes_at: int = NOWHERE
    """The first word of the arrays of nodes (``node_reading.py``), else NOWHERE."""
    plan_at: int = NOWHERE
    """The first word of the places of a fused loop's rows (``loop_reading.py``), else NOWHERE."""
    scratch: tuple[int, ...] = ()
    """The first scratch row of each output, then of each input, of a fused loop; or NOWHERE."""
