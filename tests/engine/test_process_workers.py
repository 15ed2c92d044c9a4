"""CPU workers in processes of their own: the same answers and errors, and nothing left behind whoever dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cellrt
from cellrt.errors import CellError, DefinitionError, DeviceError
from cellrt.graph.reference import run_one_by_one
from cellrt.worker.apart.pool import SharedPool
from cellrt.worker.apart.process_worker import ProcessWorker
from cellrt.worker.apart.task_ring import FAILURE_BYTES, Slot
from cellrt.worker.failed_rows import Failure
from cellrt.worker.python_process import PythonProcess
from tests.engine import apart_models
from tests.engine.apart_models import DEADLY, EXAMPLE, WIDTH, WRONG, chain, model
from tests.engine.helpers import assert_same, error_of
from tests.waiting import is_running, until

WAIT_S = 60.0
APART = ["cpu:process"]


def shared_files() -> int:
    """Descriptors of this process for memory that is shared with workers."""
    gc.collect()
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sum("cellrt-worker" in link for link in links)


def process_of(engine: cellrt.Engine) -> int:
    """The process of the first worker; 0 while it is replaced."""
    worker = engine._manager.workers[0]
    assert isinstance(worker, ProcessWorker)
    return worker.process_id or 0


@pytest.fixture(scope="module")
def engine() -> Iterator[cellrt.Engine]:
    """Two workers with both models."""
    with cellrt.Engine(2 * APART, debug=True) as made:
        made.register(model)
        made.register(chain)
        yield made


def test_answers_are_those_of_requests_run_alone(engine):
    requests = [torch.randn(1 + k % 7, WIDTH) for k in range(60)]
    futures = engine.submit_many("model", requests)
    for request, future in zip(requests, futures):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))


def test_a_row_that_fails_takes_no_other_with_it(engine):
    wrong = EXAMPLE.clone()
    wrong[2, 0] = WRONG
    good, bad = engine.submit_many("chain", [EXAMPLE, wrong])
    error = error_of(bad)
    assert type(error) is CellError
    assert str(error) == "model 'chain': cell 'step' raised ValueError: a wrong row"
    assert_same(good.result(WAIT_S), run_one_by_one(chain, EXAMPLE))


@pytest.mark.slow
def test_a_process_that_dies_in_a_task_is_replaced(engine):
    deadly = torch.full((1, WIDTH), DEADLY)
    error = error_of(engine.submit("chain", deadly))
    assert type(error) is DeviceError
    assert "its process ended by signal 9" in str(error)
    for _ in range(5):
        assert_same(engine.submit("chain", EXAMPLE).result(WAIT_S), run_one_by_one(chain, EXAMPLE))


def test_an_idle_process_that_is_killed_is_replaced_before_the_next_request(engine):
    engine.submit("chain", EXAMPLE).result(WAIT_S)
    dead = process_of(engine)
    os.kill(dead, signal.SIGKILL)
    until(lambda: process_of(engine) not in (0, dead), "another process has come")
    for future in engine.submit_many("chain", [EXAMPLE] * 8):
        future.result(WAIT_S)


@pytest.mark.slow
def test_a_registered_model_is_loaded_by_every_process():
    with cellrt.Engine(2 * APART, debug=True) as engine:
        engine.register(chain)
        for worker in engine._manager.workers:
            assert worker.is_there and worker.has_learned()
            until(lambda worker=worker: worker.num_outstanding == 0, "it has nothing left to do", 10)
            assert worker.poll() == [], "what was loaded is no task"


@pytest.mark.slow
def test_a_successor_is_not_waited_for_beside_a_free_worker(engine, monkeypatch, tmp_path):
    """The first worker dies with a task that it has not begun; its successor is long in coming."""
    first, second = engine._manager.workers
    os.kill(first.process_id, signal.SIGSTOP)
    try:
        held = [engine.submit("chain", EXAMPLE) for _ in range(40)]
        until(lambda: first.num_outstanding, "the first has a task that it has not begun", 10)
        monkeypatch.setattr(PythonProcess, "__init__", comes_with(tmp_path / "come", PythonProcess.__init__))
    finally:
        os.kill(first.process_id, signal.SIGKILL)
    expected = run_one_by_one(chain, EXAMPLE)
    for future in [*held, *engine.submit_many("chain", [EXAMPLE] * 20)]:
        assert_same(future.result(WAIT_S), expected)
    successor = engine._manager.workers[0]
    assert successor is not first and not successor.is_there and second.is_alive()
    (tmp_path / "come").touch()
    until(lambda: successor.num_outstanding == 0, "the successor has come, and loaded its cells")
    for future in engine.submit_many("chain", [EXAMPLE] * 20):
        assert_same(future.result(WAIT_S), expected)


def comes_with(file, begin):
    """Makes processes that begin when a file is there."""
    waits = f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)\n"
    return lambda self, command, *given: begin(self, waits + command, *given)


@pytest.mark.slow
def test_models_come_and_go(engine):
    for taken in (chain, model, chain):
        engine.unregister(taken.name)
        assert engine.drain(WAIT_S)
        engine.register(taken)
        for future in engine.submit_many(taken.name, [EXAMPLE] * 4):
            assert_same(future.result(WAIT_S), run_one_by_one(taken, EXAMPLE))


def test_a_cell_that_no_other_process_finds_is_refused(engine):
    local = cellrt.cell(lambda x: {"y": x}, {"x": (WIDTH,)}, name="local")
    unfolder = cellrt.Unfolder("local", lambda graph, x: {"y": graph.chain(local, x=x).last.y}, EXAMPLE)
    with pytest.raises(DefinitionError, match="cell 'local' cannot be handed to a worker's process"):
        engine.register(unfolder)


def linear(factor: float) -> cellrt.Unfolder:
    """A model of 256 KiB of weights."""
    module = torch.nn.Linear(256, 256)
    torch.nn.init.constant_(module.weight, factor)
    made = cellrt.cell(module, {"input": (256,)}, name="linear")
    return cellrt.Unfolder("linear", lambda graph, x: {"y": made(input=x)}, torch.zeros(256))


@pytest.mark.slow
def test_a_model_that_had_no_task_leaves_no_weights_for_workers_processes():
    with cellrt.Engine(2 * APART) as engine:
        pool = engine._registrar._shared.pool

        def used() -> int:
            return os.fstat(pool.fd).st_blocks * 512

        engine.register(linear(1.0), warm_up=False)
        with_one = used()
        for factor in (2.0, 3.0):
            engine.register(linear(factor), warm_up=False, replace=True)
            until(lambda: used() == with_one, "the weights before are given up")
        engine.unregister("linear")
        until(lambda: with_one - used() >= 1 << 18, "the last weights are given up")


@pytest.mark.slow
def test_a_closed_engine_leaves_no_process_and_no_memory():
    before = shared_files()
    with cellrt.Engine(APART) as engine:
        engine.register(chain)
        engine.submit("chain", EXAMPLE).result(WAIT_S)
        pid = process_of(engine)
        assert shared_files() > before
    assert not is_running(pid)
    del engine
    until(lambda: shared_files() <= before, "no shared memory is left")


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_is_killed():
    code = (
        "import time, cellrt\nfrom tests.engine.apart_models import *\n"
        f"engine = cellrt.Engine({APART})\nengine.register(chain)\nengine.submit('chain', EXAMPLE).result(60)\n"
        "print(engine._manager.workers[0].process_id, flush=True)\ntime.sleep(60)"
    )
    root = Path(apart_models.__file__).parent.parent.parent
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert is_running(pid)
        killed.kill()
    until(lambda: not is_running(pid), "the worker's process has ended")


@pytest.mark.parametrize("texts", [["short"] * 3, ["a" * 1500, "b"], [f"{k} " + "x" * 900 for k in range(500)]])
def test_every_failed_row_has_an_error_though_not_all_texts_fit(texts):
    pool = SharedPool()
    place = pool.allocate(Slot.bytes_for(10))
    slot = Slot(place, pool.map(place))
    failures = [Failure(2 * k, CellError(text)) for k, text in enumerate(texts)]
    found = slot.take_failures(slot.put_failures(failures), [failure.row for failure in failures])
    assert [failure.row for failure in found] == [failure.row for failure in failures]
    said = [str(failure.error) for failure in found]
    if sum(map(len, texts)) < FAILURE_BYTES:
        assert said == texts
    else:
        assert said == [f"{texts[0]} (one of 500 errors)"] * 500


def test_what_is_given_back_to_a_pool_is_gone_and_the_rest_stays():
    pool = SharedPool()
    first, second = pool.allocate(10_000), pool.allocate(1)
    views = [pool.map(place) for place in (first, second)]
    for view in views:
        view[:] = bytes([7]) * len(view)
    pool.free(first)
    assert not any(views[0])
    assert bytes(views[1]) == b"\x07"
    assert bytes(pool.map(second)) == b"\x07"
