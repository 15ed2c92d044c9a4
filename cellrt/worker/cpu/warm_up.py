"""Compilation, or loading from disk, of everything that serving will call, so that no request waits for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cellrt.core.processor import Processor
from cellrt.core.state.copying import (
    get_rows,
    get_rows_nogil,
    get_rows_of,
    get_rows_of_nogil,
    move_rows,
    move_rows_nogil,
    put_columns,
)
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits
from cellrt.core.state.tables import NUM_REGIONS
from cellrt.core.state.task_layout import HEADER, INPUT
from cellrt.core.templates.program import CARRY, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.native.answer_wait import (
    comes_soon,
    have_told,
    is_elsewhere,
    is_there,
    rouse,
    sleep_here,
    sleep_until_there,
    stop_waiting,
)
from cellrt.native.answer_word import say_elsewhere
from cellrt.native.atomics import added, replaced, stored
from cellrt.native.futex import roused, slept, woken
from cellrt.native.region_calls import ended, handed_in
from cellrt.native.row_types import new_table
from cellrt.worker.cpu.run_span_task import run_span_task
from cellrt.worker.cpu.run_task import run_task
from cellrt.worker.cpu.run_tasks import LAUNCHED_TASK, RUNNABLE_CELL, TURNS, run_tasks
from cellrt.worker.span_rows import most_pages, unpack_pages, unpack_spans
from cellrt.worker.turn_words import ENDS, TURN, make_words

LIMITS = Limits(max_requests=4, max_nodes=64, max_values=64, max_links=256, max_subgraphs=16, max_events=8)


def warm_up(half_way: Callable[[], None] = lambda: None) -> None:
    """Run a request to its end, cancel one, lose a worker and copy a row: in minutes the first time, then in 20 ms.

    ``half_way`` is called before the part that ``warm_up_second_half`` does too.
    """
    processor, kind, chain = _processor()
    bytes_, rows = np.zeros((2, 8), np.uint8), np.zeros(1, np.int32)
    # Compile and admit a graph, then cancel it.
    words = [OP_EXTERNAL, kind, 3, OP_EXTERNAL, kind, 1, OP_CHAIN, chain, 3, STEP, 0, 1, CARRY, 3, OP_RESULT, 6, 1, 1]
    shape = processor.compile(np.array(words, np.int32))
    cancelled = [processor.admit_many(each, np.arange(1))[0][0] for each in (shape, [shape])]
    half_way()
    for request in cancelled:
        processor.cancel(request)
    # Run a request to its end, and lose the worker of another.
    for is_lost in (False, True):
        processor.admit_many([shape], np.arange(1))
        tasks = processor.schedule(1)
        if is_lost:
            processor.lose_worker(1)
            continue
        for task in tasks:
            for done, _ in processor.complete(task, 1000):
                ended = np.array([done], np.int32)
                processor.result_rows(ended, np.zeros(1, np.int32))
                processor.copy_results(ended, np.zeros(1, np.int32), np.zeros((256, 8), np.uint8), bytes_)
                processor.finish(ended)
    # Call what growing states, sessions and the door need.
    processor.starvation(1)
    processor.suspend(1)
    for session in (processor.open_session() or 0, processor.copy_session(0, 1) or 0):
        processor.cut_back(session, 0, 0)
        processor.close_session(session)
    processor.join()
    processor.tables.door[NUM_REGIONS] = 1
    if not processor.has_calls:
        processor.take_out(0)
    # Copy rows in every way that clients and workers do.
    for values in (bytes_.reshape(-1), np.frombuffer(bytes(16), np.uint8)):  # one of them cannot be written to
        put_columns(bytes_, rows[None], 0, 1, values)
    _run_tasks(processor)
    for get, get_of, move in (
        (get_rows, get_rows_of, move_rows),
        (get_rows_nogil, get_rows_of_nogil, move_rows_nogil),
    ):
        get(bytes_, rows, np.zeros((1, 8), np.uint8))
        get_of(bytes_, rows, 0, 0, np.zeros((1, 8), np.uint8))
        move(bytes_, rows, bytes_, rows)


def warm_up_second_half() -> None:
    """Compile what takes longest of the second half of ``warm_up``, without the first half: it needs no request."""
    processor, _, _ = _processor()
    processor.schedule(1)
    processor.lose_worker(1)
    _run_tasks(processor)
    processor.suspend(1)
    processor.starvation(1)


def _processor() -> tuple[Processor, int, int]:
    """Return a processor, a row kind and a cell type of it."""
    processor = Processor(1, LIMITS)
    kind = processor.add_kind(64, 64)
    return processor, kind, processor.add_type([Port(kind), Port(kind, carry=0)], [Port(kind)], max_batch=4)


def _run_tasks(processor: Processor) -> None:
    """Ask for scratch, or find nothing launched, so that nothing runs; then ask for a word that no thread changes."""
    buffer, none = np.zeros(HEADER + INPUT, np.int32), np.zeros(0, np.int32)
    unpack_spans(buffer, 0, 0, none, none, none.astype(np.bool_))
    unpack_pages(buffer, 0, np.zeros((0, most_pages(buffer, 0)), np.int32), none, none)
    ports, scratch = np.zeros((0, 8), np.int64), np.zeros(0, np.uint8)
    run_task(np.zeros(HEADER, np.int32), ports, 0, 1, 0, 0, 0, scratch)
    run_span_task(np.zeros(HEADER, np.int32), ports, 0, 1, 0, 0, 0, np.zeros(1, np.int64), 0, scratch)
    words, cells = make_words(1), new_table(1, RUNNABLE_CELL)
    words[ENDS] = 1  # its line is the first, as its row says 0
    rings = new_table(1, TURNS), new_table(1, LAUNCHED_TASK)
    run_tasks(processor.at, words, *rings, cells, scratch, np.zeros(1, np.int32), processor.make_notices())
    if replaced(words, TURN, 0, 1):
        stored(words, TURN, 0)
    word_at = words.ctypes.data
    if not is_there(word_at) and not have_told(word_at):
        stop_waiting(word_at, words, 1)
        comes_soon(word_at)
        sleep_until_there(word_at, words, 1, 0)
        slept(words, 1, 1, 0)
        roused(words, 1, 0)
        woken(words, 1, 1, 0)
        added(words, 1, 0)
    handed_in(words, words, 0, 1, 1, 1, words, 1, 1, 0, 0, 0, 1)
    ended(words, 1, 0, words)
    say_elsewhere(word_at)
    sleep_here(word_at, word_at, 0, 0)
    if not is_elsewhere(word_at):
        rouse(word_at)
