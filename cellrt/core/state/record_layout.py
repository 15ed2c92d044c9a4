"""The layout of a chain or loop in ``links``: one record, as long for five steps as for five thousand.

A record is a ``Record``, then an ``Input`` and an ``Output`` for each port of its cell. *Position* is the number of
steps that were sent to a worker; step p is the one at position p. The mode of an input says what it reads at step p::

    WHOLE  value ``at``: the same row at every step
    MANY   a ragged input, the same at every step: the ``start`` links from ``at`` on are values
    ALL    a ragged input, the same at every step: the rows of places ``at``, ``at + stride``, ..., ``start`` of them
    EACH   link ``at + p`` is a value
    STEP   the row of place ``at + p * stride``. It is there once the chain ``source`` (a subgraph, or -1: it came with
           the request) has sent (on the same worker) or done its step ``start + p * direction``
    CARRY  value ``at`` before the first step; then output ``source`` of the step before
    PAGED  the growing state whose page list is at link ``at`` (``page_list.py``). If the cell appends to it, step p
           appends row ``start + p`` of the request; else it has ``start`` rows then, or for -1 all
    NOTHING no input: the scheduler fills it
    EMITTED a ragged input: the results at places from ``at`` on, as many as the loop ``source`` (a subgraph) took steps
    SAME   output ``at`` of the member ``source`` (a subgraph) of the same body, at the same step
    LAST   value ``at`` before the first step; then output ``stride`` of member ``source`` at the step before
    LEADS  the rows of places ``at``, ``at + stride`` ... up to step ``lead``; then output ``source`` of the step before

Where the pages of a loop were dropped (``recomputation.py``), its steps up to ``unseen`` read the rows of the places
from ``again - 1`` on instead of carried state.

If a cell carries nothing, all steps whose inputs are there are ready at once, and each is a row of a task.

The first step of a loop may read several rows, if the cell takes the rows of each node together. Then those before the
last count as steps here, ``lead`` of them, and are ready at once; their results are not shown. The same holds for the
steps that a loop takes again.

A loop has a record for each of its cells, a *member*, and a ``Body`` for what its members share. They take each step
together: none begins the next before all have done this one, or sent it where loops go ahead. A loop of one cell that
carries its state *runs*: all its steps are begun from the start, and a task may take several.

State that goes from step to step alternates between two rows of the record's own, so that a task may run twice. But if
a step's output is also in a sequence or a value, its row there is the state's row, too. A loop that goes ahead of its
stop has ``ahead`` more rows, which are used in turns (``loops_ahead.py``).

Values, links, places and subgraphs count from the request's first ones until it is admitted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.tables import CHAIN, GRAPH, CellType, Subgraph, Tables
from cellrt.native.jit import compiled
from cellrt.native.row_types import Row, i4, num_words, row_view

NO_STOP = -1
NO_BODY = -1
BROKEN = -1

WHOLE, MANY, ALL, EACH, STEP, CARRY, PAGED, NOTHING, EMITTED, SAME, LAST, LEADS = range(12)


class Record(Row):
    """The kind of a chain or loop, and its progress."""

    first_value: i4  # of a loop: the value of its first output
    taps: i4  # of a chain: link of the ``Tap`` of each output that is a value, by step
    num_taps: i4
    next_tap: i4  # the first that is not sent
    tap_step: i4  # the step of that; the number of steps if there is none
    edges: i4  # link of the ``Edge`` of each that waits for steps of it, in order of steps
    num_edges: i4
    next_sent: i4  # the first whose steps are not all sent
    next_done: i4  # the first whose steps are not all done
    num_sent: i4  # of a loop: tasks that were sent with steps whose results are shown
    followers: i4  # link of the chains that follow step by step
    num_followers: i4
    body: i4  # of a loop the link of its ``Body``; NO_BODY of a chain
    stop: i4  # of a loop the output that says stop, or NO_STOP
    keeps: i4  # 1 if a session keeps its state after every complete step: no step is sent before the last is complete
    num_sources: i4  # inputs that follow another chain step by step
    lead: i4  # of a loop of one cell: steps at its begin that only read
    unseen: i4  # of a loop of one cell: steps that only read: ``lead``, or once its pages were dropped all done before
    # The fields that every step reads lie beside the inputs, so that few cache lines are touched.
    end: i4  # steps that may be sent: of a chain all, of a loop those that its body has begun
    plain: i4  # of a chain: the number of first steps that only pass on its state; nothing reads or waits for them
    position: i4  # steps that are sent
    done: i4  # steps that are complete


class Input(Row):
    """An input of a chain or loop, by its mode (see above)."""

    mode: i4
    at: i4
    stride: i4
    start: i4
    direction: i4
    again: i4  # of what a loop carries: 0, or one more than the place of what step 0 reads
    source: i4


class Output(Row):
    """The rows of an output. The handles of as many rows as its state may go ahead lie after it."""

    sequence: i4  # place of step 0's row at a worker, or -1 if nothing reads all steps
    result: i4  # place of step 0's result at the host, or -1
    result_stride: i4
    is_state: i4  # 1 if a later step reads it, or of a loop any node
    row: i4  # handle of the state after the last step sent
    previous_row: i4  # of the one that the last task sent reads: what stays if it fails and none is before it
    late_row: i4  # one at another worker, until the task that reads it is complete
    first_row: i4
    second_row: i4


class Body(Row):
    """The part that the members of a loop share.

    After it lie the subgraphs of its members, counted from the request's first, and then the types of each step of a
    loop whose steps have several.
    """

    limit: i4  # the most steps
    all_done: i4  # steps that all members have done
    left: i4  # members that have not done the one after these
    to_send: i4  # members that have not sent the last step that is begun
    sent_at: i4  # the one worker where it was sent, or must be; 0 if it may be at any, MIXED if it was at several
    stopped: i4  # the steps with that at which one of them said stop, or 0; BROKEN: a loop's one cell failed
    stopper: i4  # the member whose flags all read, by its subgraph: the one that may say stop, a loop's one cell, or -1
    num_members: i4
    runs: i4  # 1 if a task may take several steps: of one cell, of one type, whose state is carried
    num_types: i4  # 0, or of a loop's one cell the number of types that its steps have


class Tap(Row):
    """An output of a step of a chain that is a value."""

    step: i4
    output: i4
    value: i4


class Edge(Row):
    """A subgraph that waits for steps of a chain or loop."""

    steps: i4  # how many must be there
    subgraph: i4


record_at, input_at, output_at, body_at, tap_at, edge_at = (
    row_view(Record),
    row_view(Input),
    row_view(Output),
    row_view(Body),
    row_view(Tap),
    row_view(Edge),
)
RECORD_WORDS, INPUT_WORDS, OUTPUT_WORDS, BODY_WORDS, TAP_WORDS, EDGE_WORDS = map(
    num_words, (Record, Input, Output, Body, Tap, Edge)
)
ROWS_AT = OUTPUT_WORDS - 2
"""The offset in an output of the rows that hold its state: the first, the second and those for going ahead."""


@compiled
def input_position(at: int, port: int) -> int:
    """Return the link where an input of the record at link ``at`` begins."""
    return at + RECORD_WORDS + INPUT_WORDS * port


@compiled
def output_position(at: int, cell_type: CellType, output: int) -> int:
    """Return the link where an output of the record at link ``at`` begins, which is of a cell type."""
    return at + RECORD_WORDS + INPUT_WORDS * cell_type.num_inputs + (OUTPUT_WORDS + cell_type.ahead) * output


@compiled
def record_of(t: Tables, subgraph: Subgraph) -> Record:
    """Return the record of a chain or loop."""
    return record_at(t.links, subgraph.record)


@compiled
def body_of(t: Tables, subgraph: Subgraph) -> Body:
    """Return the body of a member of a loop."""
    return body_at(t.links, record_at(t.links, subgraph.record).body)


@compiled
def input_of(t: Tables, subgraph: Subgraph, port: int) -> Input:
    """Return an input of a chain or loop."""
    return input_at(t.links, input_position(subgraph.record, port))


@compiled
def output_of(t: Tables, subgraph: Subgraph, output: int) -> Output:
    """Return an output of a chain or loop."""
    return output_at(t.links, output_position(subgraph.record, t.types[subgraph.cell_type], output))


@compiled
def nth_tap(t: Tables, record: Record, k: int) -> Tap:
    """Return tap number ``k`` of a chain."""
    return tap_at(t.links, record.taps + TAP_WORDS * k)


@compiled
def nth_edge(t: Tables, record: Record, k: int) -> Edge:
    """Return edge number ``k`` of a chain or loop."""
    return edge_at(t.links, record.edges + EDGE_WORDS * k)


@compiled
def most_steps(t: Tables, subgraph: Subgraph) -> int:
    """Return the nodes of a subgraph: a chain's steps or a loop's most; each cell of a loop of several counts so."""
    if subgraph.record < 0:
        return subgraph.nodes_left
    record = record_of(t, subgraph)
    return record.end if subgraph.what == CHAIN else body_at(t.links, record.body).limit


@compiled
def record_words(cell_type: CellType) -> int:
    """Return the words of a record of a cell type."""
    return output_position(0, cell_type, cell_type.num_outputs)


def outputs_of(t: Tables, subgraph: Subgraph) -> list[tuple[Output, NDArray[np.int32]]]:
    """Return the outputs of a chain or loop, each with the handles of the rows of its own that its state is in."""
    cell_type, at = t.types[int(subgraph["cell_type"])], int(subgraph["record"])
    words = OUTPUT_WORDS + int(cell_type["ahead"])
    first = at + RECORD_WORDS + INPUT_WORDS * int(cell_type["num_inputs"])
    ends = range(first, first + words * int(cell_type["num_outputs"]), words)
    return [(output_at(t.links, each), t.links[each + ROWS_AT : each + words]) for each in ends]


def inputs_of(t: Tables, subgraph: Subgraph) -> list[Input]:
    """Return the inputs of a chain or loop."""
    count, first = int(t.types["num_inputs"][int(subgraph["cell_type"])]), int(subgraph["record"]) + RECORD_WORDS
    return [input_at(t.links, first + INPUT_WORDS * port) for port in range(count)]


def loop_limit(links: NDArray[np.int32], subgraph: Subgraph) -> int:
    """Return the most steps of a loop; 0 if a subgraph is none, or a member that does not say stop."""
    if int(subgraph["what"]) in (GRAPH, CHAIN):
        return 0
    record = record_at(links, int(subgraph["record"]))
    body = body_at(links, record.body)
    return int(body.limit - record.lead) if record.stop != NO_STOP or body.runs else 0


def chain_length(links: NDArray[np.int32], subgraph: Subgraph) -> int:
    """Return the steps of a chain; 0 if a subgraph is none."""
    return int(record_at(links, int(subgraph["record"])).end) if int(subgraph["what"]) == CHAIN else 0


def loop_limits(t: Tables, request: int) -> dict[int, tuple[int, int]]:
    """Return for each loop of a request its most steps, and those that are done, by subgraph.

    A loop of several cells is the one that says stop.
    """
    found, row = dict[int, tuple[int, int]](), t.requests[request]
    for k in range(int(row["first_subgraph"]), int(row["first_subgraph"] + row["num_subgraphs"])):
        if limit := loop_limit(t.links, t.subgraphs[k]):
            record = record_at(t.links, int(t.subgraphs["record"][k]))
            found[k] = limit, max(0, int(record.done - record.lead))
    return found
