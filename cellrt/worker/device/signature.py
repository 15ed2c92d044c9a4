"""What a task does on a device, apart from which rows it does it to: tasks of equal signatures share captured work."""

from __future__ import annotations

from typing import NamedTuple

NOWHERE = -1
STOPS, HAD_STOPPED = 1, 2
"""What a row of a task that is no loop's says: stop, or that it did in a task before; else 0."""
NOT_FINITE, OUTSIDE = 1, 2
"""What is bad of a position (of a loop: a row), or both: an output is not finite, an input is outside its limits."""


class Source(NamedTuple):
    """Rows of an input that lie at one location."""

    location: int
    num_rows: int
    rows_at: int
    """First word of their row numbers there; at the host, in the upload ring."""
    positions_at: int
    """First word of which of the input's rows they are, or NOWHERE: all, in order."""


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
    """One output: which of its rows go to the arena, and which to the host (to rows of the download ring).

    Of a fused cell, ``stores`` are all its positions, and ``result_positions_at`` has rows of the arena.
    """

    kind: int
    stores: int
    rows_at: int
    positions_at: int
    """NOWHERE: all, in order."""
    results: int
    result_rows_at: int
    result_positions_at: int
    every_step: bool


class Signature(NamedTuple):
    """What a task does, apart from which rows it does it to."""

    type_id: int
    fused: bool
    """Whether the cell reads and writes arena rows itself."""
    sizes: tuple[int, ...]
    """Rows of each step, the padding included; of a loop, all rows at every step; where the device counts them, the
    most there may be."""
    positions: int
    """Rows of all steps, the padding included; of a loop, those of a step."""
    is_loop: bool
    stop: int
    """Output that says stop, of a loop or at the first step of rows that are of some; or NOWHERE."""
    inputs: tuple[InputSignature, ...]
    outputs: tuple[OutputSignature, ...]
    lengths_at: int
    answers: int
    """Integers that come back: of a loop, steps done and what is bad, for each row; of other tasks if ``tells_rows``
    for each row of the first step whether it says stop, and if ``tells_bad`` what is bad of each position."""
    answers_at: int
    tells_bad: bool
    """Whether, of what is no loop, there is an answer for each position: ``NOT_FINITE``, ``OUTSIDE``, or 0."""
    sizes_at: int
    """First word of the sizes of a fused run that may go in one call, else NOWHERE."""
    spans_at: int
    """First word of the spans that a fused cell reads (``SpannedRows``): that of the first state, then of each step; or
    NOWHERE."""
    flags_at: int
    """Of tasks with rows of loops that go ahead: first word of the flags that rows read, behind which those are that
    they write; else NOWHERE."""
    num_words: int
    tells_rows: bool = False
    """Whether there is an answer for each row: of loops, where an output says stop, and where results are shown of rows
    that may have stopped in a task before."""
    num_nodes: int = 0
    """Of a cell that is told which rows are of one node: how many there are, the padding included."""
    nodes_at: int = NOWHERE
    """First word of what it is told (``node_reading.py``), else NOWHERE."""
    plan_at: int = NOWHERE
    """Of a fused loop: first word of where its steps' rows lie (``loop_reading.py``), else NOWHERE."""
    scratch: tuple[int, ...] = ()
    """Of a fused loop: the first scratch row of each output, then of each input, or NOWHERE."""
