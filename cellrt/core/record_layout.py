"""How a chain or loop lies in ``links``: one record, as long for five steps as for five thousand.

A record is ``HEADER`` words, then one ``INPUT`` and one ``OUTPUT`` for each port of its cell. *Position* is the number
of steps that were sent to a worker; step p is the one at position p. What an input reads at step p follows from its
mode::

    WHOLE  value AT: the same row at every step
    MANY   a ragged input, the same at every step: the ``START`` links from AT on are values
    ALL    a ragged input, the same at every step: the rows of places AT, AT + STRIDE, ..., ``START`` of them
    EACH   link AT + p is a value
    STEP   the row of place AT + p * STRIDE. It is there once the chain ``SOURCE`` (a subgraph, or -1: it came with the
           request) has sent (on the same worker) or done its step START + p * DIRECTION
    CARRY  value AT before the first step; then output ``SOURCE`` of the step before
    PAGED  the growing state whose page list is at link AT (``page_list.py``). Of a cell that appends to it, step p
           appends row START + p of the request; of one that only reads, so many are there, or for -1 all that are
    NOTHING nobody gives it
    EMITTED a ragged input: the results at places from AT on, as many as the loop ``SOURCE`` (a subgraph) took steps
    SAME   output AT of the member ``SOURCE`` (a subgraph) of the same body, at the same step
    LAST   value AT before the first step; then output ``STRIDE`` of member ``SOURCE`` at the step before
    LEADS  the rows of places AT, AT + STRIDE, ... up to step ``LEAD``; then output ``SOURCE`` of the step before

Where the pages of a loop were dropped (``recomputation.py``), its steps up to ``UNSEEN`` read the rows of the places
from ``AGAIN`` on instead of what is carried.

Of a cell that carries nothing all steps that are fed are ready at once, and each is a row of a task.

The first step of a loop may read several rows, of a cell that is told which rows are of one node. Then those before
the last count as steps here, ``LEAD`` of them, and are ready at once; nobody sees what they make. So it is with the
steps that a loop takes again.

A loop of several cells, its *body*, has a record for each, a *member*. They go in step: nobody begins the next before
all have done this one, or sent it where loops go ahead. So ``LENGTH`` is there the number of steps that are begun, and
what is common to them is a block of links: ``BODY`` says where, ``LIMIT`` to ``MEMBERS`` what. So has a loop whose
steps are of different cell types, one after the other: a body of one member.

State that goes from step to step alternates between two rows of the record's own, ``FIRST_ROW`` and ``SECOND_ROW``, so
that a task may run twice; but where a step's output is also in a sequence or a value, its row there is the state's too.
A loop that goes ahead of its stop has more rows while tasks of it are in flight (``loops_ahead.py``).

Values, links, places and subgraphs count from the request's first ones until it is admitted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import allocating
from cellrt.core.tables import Tables

STOP = 0  # of a loop the output that says stop, or NO_STOP; else IS_CHAIN
KEEPS = 1  # 1 if a session keeps its state after every complete step: no step is sent before the last is complete
NUM_SOURCES = 2  # inputs that follow another chain step by step
VALUES = 3  # of a loop: the value of its first output
TAPS = 3  # of a chain: link of (step, output, value) of each output that is a value, by step
NUM_TAPS = 4
NEXT_TAP = 5  # the first that is not sent
BODY = 5  # of a member the link of what is common to its body, of a loop of one cell NO_BODY
TAP_STEP = 6  # its step; LENGTH if there is none
LEAD = 6  # of a loop of one cell: steps at its begin that only read
EDGES = 7  # link of (steps that must be there, subgraph that waits for them), in order of steps
NUM_EDGES = 8
NEXT_SENT = 9  # the first whose steps are not all sent
NEXT_DONE = 10
NUM_SENT = 9  # of a loop of one cell: tasks, counted from when nothing was in flight; or OVER
MORE_ROWS = 10  # of a loop or member that goes ahead: link of the third and further rows of each output's state
FOLLOWERS = 11  # link of the chains that follow step by step
NUM_FOLLOWERS = 12
# What every step looks at lies beside the inputs: no more cache lines than that are touched.
LENGTH = 13  # steps; of a loop, at most
PLAIN = 14  # of a chain: so many first steps only hand on its state; nobody looks at them or waits for them
POSITION = 15
DONE = 16  # steps that are complete
UNSEEN = 17  # of a loop of one cell: steps that only read: LEAD, or once its pages were dropped all done before that
HEADER = 18

IS_CHAIN = -2
NO_STOP = -1
NO_BODY = -1
OVER = -1

LIMIT = 0  # the most steps
ALL_DONE = 1  # steps that all members have done
LEFT = 2  # members that have not done the one after these
TO_SEND = 3  # members that have not sent the last step that is begun
SENT_AT = 4  # the one worker where it was sent, or must be; 0 if it may be at any, MIXED if it was at several
STOPPED = 5  # the steps with that at which one of them said stop, or 0
STOPPER = 6  # which of them may, by its subgraph, or -1
NUM_TYPES = 7  # 0, or of a loop's one cell the number of types that its steps have, which lie behind the members
MEMBERS = 8  # how many, then their subgraphs, counted from the request's first

WHOLE, MANY, ALL, EACH, STEP, CARRY, PAGED, NOTHING, EMITTED, SAME, LAST, LEADS = range(12)
MODE = 0
AT = 1
STRIDE = 2
START = 3
DIRECTION = 4
AGAIN = 4  # of what a loop carries: 0, or one more than the place of what step 0 reads
SOURCE = 5
INPUT = 6

SEQUENCE = 0  # place of step 0's row at a worker, or -1 if nobody reads all steps
RESULT = 1  # place of step 0's result at the host, or -1
RESULT_STRIDE = 2
IS_STATE = 3  # 1 if a later step, or of a loop anybody, reads it
ROW = 4  # handle of the state after the last step sent
PREVIOUS_ROW = 5  # of the one that the oldest task in flight read: what stays if it fails
FIRST_ROW = 6
SECOND_ROW = 7
LATE_ROW = 8  # one at another worker, until the task that reads it is complete
OUTPUT = 9

TAP = 3
EDGE = 2


def loop_limit(links: NDArray[np.int32], at: int) -> int:
    """The most steps of the loop with the record at ``at``; 0 if it is no loop, or a member that does not say stop."""
    if at < 0 or links[at + STOP] == IS_CHAIN:
        return 0
    if links[at + BODY] == NO_BODY:
        return int(links[at + LENGTH] - links[at + LEAD])
    return int(links[links[at + BODY] + LIMIT]) if links[at + STOP] != NO_STOP else 0


def chain_length(links: NDArray[np.int32], at: int) -> int:
    """The steps of the chain with the record at ``at``; 0 if it is none."""
    return int(links[at + LENGTH]) if at >= 0 and links[at + STOP] == IS_CHAIN else 0


@allocating
def num_words(num_inputs, num_outputs):
    """Words of a record."""
    return HEADER + INPUT * num_inputs + OUTPUT * num_outputs


def loop_limits(t: Tables, request: int) -> dict[int, tuple[int, int]]:
    """For each subgraph of a request that is a loop (of several cells: the one that says stop): its most steps, and
    those that are done."""
    found, row = dict[int, tuple[int, int]](), t.requests[request]
    for k in range(int(row["first_subgraph"]), int(row["first_subgraph"] + row["num_subgraphs"])):
        at = int(t.subgraphs["record"][k])
        if limit := loop_limit(t.links, at):
            done, lead = (int(t.links[at + word]) for word in (DONE, LEAD))
            found[k] = limit, max(0, done - lead)
    return found
