"""A program that ends with requests in flight, in each way that it is given by name; prints as JSON how each ended.

Each way is taken by a process forked off before there is any thread, which saves importing torch and making cells.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch

from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.graph.unfolder import Unfolder
from cellrt.worker import service_thread
from cellrt.worker.cpu.warm_up import warm_up

STEPS, REQUESTS, LONG = 300, 200, 100.0
ADD = cell(lambda x, h: {"h": h + x}, {"x": (), "h": ()}, name="add")
SUM = Unfolder("sum", lambda graph, x: {"h": graph.chain(ADD, x=x).last.h}, torch.zeros(3))


def busy_engine(workers: int | list[str] = 2, steps: int = STEPS, requests: int = REQUESTS) -> Engine:
    """An engine with much more to do than there is time for."""
    engine = Engine(workers)
    engine.register(SUM, warm_up=False)
    engine.submit_many("sum", [torch.ones(steps)] * requests)
    return engine


def end() -> object:
    return busy_engine()


def raise_an_error() -> object:
    engine = busy_engine()
    raise RuntimeError(f"{engine} was not closed")


def exit_with_3() -> object:
    engine = busy_engine()
    sys.exit(3 if engine else 0)


def be_interrupted() -> object:
    engine = busy_engine()
    os.kill(os.getpid(), signal.SIGINT)
    return engine


def end_with_two_engines() -> object:
    return [busy_engine(1), busy_engine(1)]


def drop_the_engine() -> object:
    busy_engine()
    return None


def end_with_a_device() -> object:
    return busy_engine(["dry"], 20, 3000)  # each task short: what is checked of a stub's every operation takes long


def end_during_a_long_step() -> object:
    """A step that takes longer than the exit waits, and comes back from torch now and then."""
    service_thread.EXIT_WAIT_S = 0.1
    entered, leave = os.pipe()

    def multiply(x):
        if x.device.type != "meta" and bool((x == LONG).any()):
            os.write(leave, b"x")
            many = torch.ones(600, 600)
            for _ in range(100_000):
                many = many @ many
        return x

    long = cell(multiply, {"x": ()})
    engine = Engine(1)
    engine.register(Unfolder("long", lambda graph, x: {"y": long(x=x).output}, torch.zeros(())), warm_up=False)
    engine.submit("long", torch.tensor(LONG))
    os.read(entered, 1)
    return engine


WAYS: dict[str, Callable[[], object]] = {
    way.__name__: way
    for way in (
        *(end, raise_an_error, exit_with_3, be_interrupted, end_with_two_engines, drop_the_engine),
        *(end_with_a_device, end_during_a_long_step),
    )
}


def fork_all(names: Sequence[str]) -> Callable[[], object] | None:
    """Forks off a process for each way: there, returns the way to take; here, None once all have ended."""
    endings = {}
    for name in names:
        way = WAYS[name]
        with tempfile.TemporaryFile() as said:
            process = os.fork()
            if not process:
                os.dup2(said.fileno(), sys.stderr.fileno())
                return way
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            said.seek(0)
            endings[name] = [status, said.read().decode().splitlines()]
    print(json.dumps(endings))
    return None


if __name__ == "__main__":
    warm_up()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = fork_all(sys.argv[1:])
    kept = None if chosen is None else chosen()
