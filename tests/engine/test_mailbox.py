"""What loops are told by other threads: all of it, in order, whatever one of the calls does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cellrt.engine.future import RequestFuture
from cellrt.engine.mailbox import WakingAtTheEnd, mailbox_of


async def test_all_that_many_threads_put_is_called() -> None:
    loop, called, done = asyncio.get_running_loop(), [], asyncio.Event()
    mailbox = mailbox_of(loop)

    def note(number: int) -> None:
        called.append(number)
        if len(called) == 400:
            done.set()

    def put(first: int) -> None:
        for number in range(first, first + 100):
            mailbox.put(lambda number=number: note(number))

    threads = [threading.Thread(target=put, args=(first,)) for first in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(done.wait(), 10)
    for thread in threads:
        thread.join()
    assert sorted(called) == list(range(400))
    assert all([n for n in called if first <= n < first + 100] == list(range(first, first + 100)) for first in (0, 300))


async def test_one_that_raises_keeps_nobody_else_waiting() -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    mailbox = mailbox_of(loop)
    wrong = ValueError("in a call")

    def fail() -> None:
        raise wrong

    for call in (fail, fail, done.set):
        mailbox.put(call)
    await asyncio.wait_for(done.wait(), 10)
    assert raised == [wrong, wrong]


def test_a_closed_loop_is_told_of() -> None:
    loop = asyncio.new_event_loop()
    mailbox = mailbox_of(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            mailbox.put(lambda: None)


async def test_a_loop_wakes_once_for_what_is_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, done, called, wakes = asyncio.get_running_loop(), asyncio.Event(), list[int](), list[int]()
    mailbox, wake = mailbox_of(loop), loop.call_soon_threadsafe

    def note_wake(*given: object) -> object:
        wakes.append(len(mailbox._calls))
        return wake(*given)  # type: ignore[arg-type]

    def tell() -> None:
        with pytest.raises(ZeroDivisionError), WakingAtTheEnd():
            for number in range(5):
                mailbox.put(lambda number=number: called.append(number))
            mailbox.put(done.set)
            raise ZeroDivisionError  # whoever was told wakes all the same

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_soon_threadsafe", note_wake)
        thread = threading.Thread(target=tell)
        thread.start()
        await asyncio.wait_for(done.wait(), 10)
    thread.join()
    assert called == list(range(5)) and wakes == [6]


def test_a_loop_that_is_closed_while_all_are_told_keeps_nobody_from_waking() -> None:
    closed, open_ = asyncio.new_event_loop(), asyncio.new_event_loop()
    done = asyncio.Event()
    with WakingAtTheEnd():
        mailbox_of(closed).put(lambda: None)
        mailbox_of(open_).put(done.set)
        closed.close()
        with pytest.raises(RuntimeError, match="closed"):
            mailbox_of(closed).put(lambda: None)
    open_.run_until_complete(asyncio.wait_for(done.wait(), 10))
    open_.close()


async def test_who_was_told_before_a_clients_callback_wakes_before_it() -> None:
    mailbox, future, woken = mailbox_of(asyncio.get_running_loop()), RequestFuture(None), threading.Event()
    seen: list[bool] = []
    future.add_done_callback(lambda _: seen.append(woken.wait(10)))

    def tell() -> None:
        with WakingAtTheEnd():
            mailbox.put(woken.set)
            future.finish({})

    thread = threading.Thread(target=tell)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.001)
    assert seen == [True]
