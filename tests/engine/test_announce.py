"""Work that may take long says so: in the log, and on a terminal by a bar."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from cellrt import cell, unfold
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.engine import cell_compiler, registration
from cellrt.engine.announce import Announcement, announced
from tests.engine.helpers import close_and_check, small_engine
from tests.waiting import WAIT_S, until

SAID = "cells are compiled"


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_in(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """The standard error as a terminal; in the test itself, as pytest sets it anew after fixtures."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "cellrt")
    return caplog


def test_a_bar_on_a_terminal_says_how_far_steps_are(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    terminal = terminal_in(monkeypatch)
    with announced(SAID, num_steps=3, quiet_s=0) as advance:
        advance()
        until(lambda: SAID in terminal.getvalue() and "1/3" in terminal.getvalue(), "the bar is there")
        advance()
        until(lambda: "2/3" in terminal.getvalue(), "it goes on")
    assert not log.messages


def test_on_a_terminal_work_of_an_unknown_number_of_steps_has_a_bar_too(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    terminal = terminal_in(monkeypatch)
    with announced(SAID, quiet_s=0):
        until(lambda: SAID in terminal.getvalue(), "the bar is there")
    assert not log.messages


@pytest.mark.parametrize(("num_steps", "line"), [(0, SAID), (3, f"{SAID} (0 of 3 done)")])
def test_elsewhere_the_log_tells(num_steps: int, line: str, log: pytest.LogCaptureFixture) -> None:
    with announced(SAID, num_steps, quiet_s=0):
        until(lambda: log.messages == [line], "the log has it")


def test_the_log_tells_again_how_far_it_is_and_how_long_the_rest_takes(log: pytest.LogCaptureFixture) -> None:
    with announced(SAID, 4, quiet_s=0, every_s=0.01) as advance:
        advance()
        line = re.compile(rf"{SAID} \(1 of 4 done, about \d+ s left\)")
        until(lambda: len([said for said in log.messages if line.fullmatch(said)]) > 1, "the log has it twice")


def test_nothing_is_said_of_what_is_over_soon(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    terminal = terminal_in(monkeypatch)
    with announced(SAID, num_steps=1) as advance:
        advance()
    assert not terminal.getvalue() and not log.messages


@contextmanager
def registered(monkeypatch: pytest.MonkeyPatch, compile_slowly: Callable[..., Iterator[Exception]]) -> Iterator[None]:
    """A thread registers a model of two cells, which are compiled so, and says at once what it waits for."""
    monkeypatch.setattr(cell_compiler, "compile_cells", compile_slowly)
    monkeypatch.setattr(registration, "Announcement", partial(Announcement, quiet_s=0))
    cells = [cell(lambda x, k=k: x + k, {"x": 2}, name=f"add {k}") for k in range(2)]
    model = unfold("sums", example=torch.zeros(2))(lambda graph, x: cells[1](x=cells[0](x=x).output))
    engine = small_engine(compile="wait")
    registering = threading.Thread(target=engine.register, args=(model,), kwargs={"warm_up": False})
    registering.start()
    try:
        yield
    finally:
        registering.join(WAIT_S)
    close_and_check(engine)


def test_who_waits_for_compilers_sees_how_many_cells_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, goes_on = terminal_in(monkeypatch), threading.Event()

    def compile_slowly(cells: Sequence[Any], _: object, note_compiling: Callable[[], None]) -> Iterator[Exception]:
        for place, _ in enumerate(cells):
            note_compiling()
            assert place == 0 or goes_on.wait(WAIT_S)
            yield NotCompiledError(Reason.NO_COMPILER)

    with registered(monkeypatch, compile_slowly):
        try:
            until(lambda: "cells of 'sums'" in terminal.getvalue() and "1/2" in terminal.getvalue(), "the bar is there")
        finally:
            goes_on.set()


def test_who_waits_for_forms_that_are_only_loaded_is_told_of_no_compiler(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    terminal, before, began = terminal_in(monkeypatch), set(threading.enumerate()), list[str]()

    def load_slowly(cells: Sequence[Any], _: object, note_compiling: Callable[[], None]) -> Iterator[Exception]:
        for _ in cells:
            began.extend(each.name for each in set(threading.enumerate()) - before)
            yield NotCompiledError(Reason.MEMORY)

    with registered(monkeypatch, load_slowly):
        pass
    assert began and "cellrt-announcement" not in began, "nobody is about to say so"
    assert not terminal.getvalue()


def test_the_estimate_leaves_out_what_was_done_before_the_first_was_compiled(log: pytest.LogCaptureFixture) -> None:
    announcement = Announcement(SAID, 4, quiet_s=0, every_s=0.01)
    for _ in range(2):
        announcement.advance()
    announcement.begin()
    until(lambda: f"{SAID} (2 of 4 done)" in log.messages, "it cannot say how long the others take")
    announcement.advance()
    until(lambda: "(3 of 4 done, about" in log.messages[-1], "it can")
    announcement.end()
