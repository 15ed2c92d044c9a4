"""A server of the HTTP benchmark is ended with all that it started, and what does not answer is said with its log."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import http_server
from benchmarks.http_server import Command, Server, post, serving
from tests.waiting import until

FORKS = """
import http.server, os, sys, time
child = os.fork()
if not child:
    time.sleep(600)
open(sys.argv[2], "w").write(str(child))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"7")

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server_of(program: str, *words: str) -> Server:
    @contextmanager
    def prepared(port: int) -> Iterator[Command]:
        yield [sys.executable, "-c", program, str(port), *words], os.environ

    return Server("/", prepared, lambda: None, list, int)


def is_running(pid: int) -> bool:
    """An ended process whose new parent has not waited for it yet counts as ended."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("dies_itself", [False, True])
def test_what_a_server_started_ends_with_it(dies_itself: bool, tmp_path: Path) -> None:
    server = server_of(FORKS, str(tmp_path / "child"))
    with serving(server) as address:
        assert post(server, address, [1]) == 7
        child = int((tmp_path / "child").read_text())
        assert is_running(child)
        if dies_itself:
            parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(parent, signal.SIGKILL)
    until(lambda: not is_running(child), "what it started has ended", 10)


def test_a_server_that_ends_at_once_is_said_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "START_S", 60.0)
    with pytest.raises(RuntimeError, match="no weights"), serving(server_of("raise SystemExit('no weights')")):
        pass
