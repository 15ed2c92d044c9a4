"""A client may be interrupted anywhere: an exception out of a signal's handler costs its own call alone.

See ``tests.engine.test_interrupts``. Here the exceptions are kept, with all that their frames hold.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest

from cellrt.engine.future import RequestFuture
from cellrt.engine.futures import Futures
from cellrt.errors import CellrtError, OverloadError
from cellrt.graph.reference import run_one_by_one
from cellrt.process.client import Client, connect
from tests.engine.helpers import WAIT_S, assert_same
from tests.process import models
from tests.process.helpers import start, steps
from tests.process.test_killed_clients import Bystander
from tests.waiting import until

MOST_PLACES = 5_000
EVERY = 16
"""So many places the client is looked at after."""


class InterruptError(BaseException):
    """What the handler raises."""


def interrupts(call: Callable[[], object], looks: Callable[[], object]) -> int:
    """Makes a call again and again, interrupted at one place after the other; returns how many there are."""
    kept: list[BaseException] = []
    for place in range(1, MOST_PLACES):
        seen = 0

        def look(frame: FrameType, event: str, _: object, place: int = place) -> None:
            nonlocal seen
            if event in ("call", "c_return"):
                seen += 1
                if seen == place:
                    raise InterruptError

        try:
            sys.setprofile(look)
            call()
        except InterruptError as error:
            kept.append(error)
        finally:
            sys.setprofile(None)
        if seen < place:
            return place
        if place % EVERY == 0:
            looks()
            kept.clear()
    raise AssertionError("it has no end")


def submit_and_cancel(client: Client) -> object:
    return client.submit("chain", steps(2)).cancel()


CALLS: dict[str, Callable[[Client], object]] = {
    "submit": lambda client: client.submit("chain", steps(2)),
    "submit many": lambda client: client.submit_many("chain", [steps(2)] * 3, deadline=WAIT_S),
    "wait for places": lambda client: client.submit_many("chain", [steps(2)] * 3, wait=True),
    "cancel": submit_and_cancel,
    "a session": lambda client: client.session("kept", "a").submit(steps(2)),
    "reset": lambda client: client.session("kept", "a").reset(),
    "drain": lambda client: client.submit("chain", steps(2)) and client.drain(WAIT_S),
    "statistics": lambda client: client.statistics(),
}


@pytest.fixture(scope="module")
def engine():
    with start(max_queue=512) as made:
        for model in (models.chain, models.kept):
            made.register(model, warm_up=False)
        yield made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt of a finalizer
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_place_leaves_a_client_and_its_engine_whole(engine, name):
    with connect(engine.address) as client:

        def look() -> None:
            assert not client._link._lock.locked(), "the lock is held"
            assert client.drain(WAIT_S), "a request has no end"
            used = [binding for binding in client._bindings.all().values() if binding.users and binding.name == "chain"]
            assert not used, "a binding is kept"

        CALLS[name](client)
        assert interrupts(lambda: CALLS[name](client), look) > 20
        assert_same(client.submit("chain", steps(2)).result(WAIT_S), run_one_by_one(models.chain, steps(2)))
        assert client.drain(WAIT_S)
        assert not client.is_lost
        with connect(engine.address) as other:
            assert other.submit("chain", steps(1)).result(WAIT_S)
            assert engine.drain(WAIT_S)
            assert other.statistics()["unfinished"] == 0
            other.check()


STORM_S = 3.0
STRIKES_S = 2e-5, 2e-3
"""From strike to strike: some come while the one before is still on its way out."""


def live_in_a_storm(address: str) -> None:
    """A client's process: signals strike its calls; then it tells how all went."""
    client, futures, dice = connect(address), [], random.Random(0)
    client.submit("chain", steps(2)).result(WAIT_S)

    def deed() -> None:
        made = CALLS[dice.choice(list(CALLS))](client)
        futures.extend(made if isinstance(made, Futures) else [made] if isinstance(made, RequestFuture) else ())
        client.submit("chain", steps(2)).result(WAIT_S)

    def strike(_: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(*STRIKES_S))
        while frame is not None:
            if frame.f_code is deed.__code__:
                raise InterruptError
            frame = frame.f_back

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, STRIKES_S[0])
    num_struck, end_s = 0, time.monotonic() + STORM_S
    while time.monotonic() < end_s:
        try:
            deed()
        except InterruptError:
            num_struck += 1
        except OverloadError:  # on a slow machine: what strikes have left behind is yet to run
            assert client.drain(WAIT_S), "a request has no end"
        except CellrtError:
            if client.is_lost:
                break
            raise
        del futures[:-1000]
    signal.setitimer(signal.ITIMER_REAL, 0)
    ended = [future.exception(WAIT_S) for future in futures]
    told = {"struck": num_struck, "errors": [str(error) for error in ended if error is not None]}
    told |= {"drained": client.drain(WAIT_S), "lost": str(client._link.lost or "")}
    told |= {"last": client.submit("chain", steps(2)).result(WAIT_S)["last"].tolist()}
    print(json.dumps(told))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow  # what is hit is chance; the test above goes through every place
def test_a_client_lives_through_a_storm_of_signals_and_nobody_else_notices(engine):
    bystander = Bystander(engine.address)
    command = f"from tests.process.test_interrupts import live_in_a_storm; live_in_a_storm({engine.address!r})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("struck") > 20
    expected = run_one_by_one(models.chain, steps(2))["last"].tolist()
    assert told == {"errors": [], "drained": True, "lost": "", "last": expected}
    bystander.end()
    until(lambda: engine.statistics()["unfinished"] == 0, "nothing is unfinished")
    engine.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_session_is_closed_whose_opening_was_interrupted(engine):
    class TimeError(Exception):
        pass

    def late(*_: object) -> None:
        raise TimeError

    drawn, interrupted = random.Random(3), 0
    before = signal.signal(signal.SIGALRM, late)
    try:
        with connect(engine.address) as client:
            client.session("kept").close()
            for _ in range(100):
                try:
                    signal.setitimer(signal.ITIMER_REAL, drawn.uniform(2e-5, 3e-4))
                    session = client.session("kept")
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except TimeError:
                    interrupted += 1
                else:
                    session.close()
            few = max(3, interrupted // 4)  # one that comes just when the session is there finds nobody who has it
            until(lambda: client.statistics()["sessions"]["open"] <= few, f"of {interrupted} few are open")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
