"""What a request waits for is told in words that name the part, the step and the worker."""

from __future__ import annotations

from cellrt.core.processor import Processor
from cellrt.core.waiting_reasons import explain
from tests.core.graphs import add_step, add_tree, admit, chain, make_processor, run, tree, two_chains

NAMES = {0: "lstm", 1: "decoder", 2: "leaf", 3: "inner"}


def told(processor: Processor, request: int) -> list[str]:
    return explain(processor, request, NAMES.__getitem__)


def test_a_chain_that_is_ready_says_for_whom_and_who_is_before_it():
    processor = make_processor()
    add_step(processor, 1)
    first, second = admit(processor, chain(0, 3)), admit(processor, chain(0, 5))
    assert told(processor, second) == [
        "chain of lstm, 0 of 5 steps done: 1 row ready for any worker, 1 before it in the queue, "
        "0 tasks of the cell running"
    ]
    run(processor)
    assert told(processor, first) == [
        "chain of lstm, 0 of 3 steps done: in task 0 at worker 1, 1 row ready for worker 1, 0 before it in the queue, "
        "1 task of the cell running"
    ]
    assert "0 before it" not in told(processor, second)[0]


def test_a_part_that_needs_another_says_so():
    processor = make_processor()
    add_step(processor, 4)
    add_step(processor, 4)
    request = admit(processor, two_chains(0, 1, 4))
    encoder, decoder = told(processor, request)
    assert encoder.startswith("chain of lstm, 0 of 4 steps done: 1 row ready")
    assert decoder == "chain of decoder, 0 of 4 steps done: waits for 1 result of other parts"


def test_what_is_done_is_not_told():
    processor = make_processor()
    for _ in range(2):
        add_step(processor, 4)
    for _ in range(2):
        add_tree(processor, 4)
    request = admit(processor, tree(2, 3, 4))
    assert [line.partition(":")[0] for line in told(processor, request)] == [
        "4 nodes of leaf not submitted",
        "3 nodes of inner not submitted",
    ]
    run(processor)
    (task,) = processor.tables.tasks["in_use"].nonzero()[0].tolist()
    processor.complete(task, 1000)
    assert told(processor, request) == [
        "3 nodes of inner not submitted: 2 rows ready for any worker, 0 before it in the queue, "
        "0 tasks of the cell running"
    ]
