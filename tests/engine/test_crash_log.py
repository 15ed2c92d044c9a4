"""A process that crashes in compiled code says what its engines did last, and ends as it would have."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from cellrt.engine import crash_log

pytestmark = pytest.mark.skipif(crash_log._crash_log is None, reason="built where a C compiler is")

CRASHES = """
import ctypes, os, signal, sys
import torch
import cellrt

add = cellrt.cell(lambda x, h: {"h": x + h}, inputs={"x": (2,), "h": (2,)}, name="add")
model = cellrt.unfold("sums", example=torch.zeros(2, 2))(lambda graph, x: {"h": graph.chain(add, x=x).last.h})
engines = [cellrt.Engine(workers=1, debug=debug, compile="off") for debug in (DEBUG, False)]
for engine in engines:
    engine.register(model, warm_up=False)
for _ in range(NUM_REQUESTS):
    engines[0].submit("sums", torch.ones(3, 2)).result()
engines.pop().close()
CRASH
"""


def crash(how: str, *, debug: bool = True, num_requests: int = 3, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    """Have a process crash; return its exit status, and what it wrote to standard error."""
    code = CRASHES.replace("DEBUG", str(debug)).replace("NUM_REQUESTS", str(num_requests)).replace("CRASH", how)
    ended = subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stderr


def test_the_last_events_are_written_and_the_signal_ends_the_process():
    status, said = crash("os.abort()")
    assert status == -signal.SIGABRT and f"cellrt: signal {int(signal.SIGABRT)} ends the process" in said
    assert re.search(r"us: request 3 admitted", said) and re.search(r"us: request 3 ended", said)
    assert said.index("request 1 admitted") < said.index("request 3 ended")


def test_of_many_events_the_newest_are_written_and_pythons_own_handler_has_its_say():
    status, said = crash("ctypes.string_at(0)", num_requests=30, arguments=("-X", "faulthandler"))
    lines = [line for line in said.splitlines() if " us: request " in line]
    assert len(lines) == 40 and "request 30 ended" in lines[-1]
    assert status == -signal.SIGSEGV and "Fatal Python error" in said


def test_nothing_is_installed_unless_asked_for():
    status, said = crash("ctypes.string_at(0)", debug=False)
    assert status == -signal.SIGSEGV and "cellrt: signal" not in said
