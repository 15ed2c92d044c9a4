"""Where engines listen: a file goes with its own engine, and clients that come together are all taken in."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellrt.errors import DeviceError
from cellrt.process import address as addresses
from cellrt.process.client import connect
from tests.engine.helpers import WAIT_S


def test_an_engine_that_ends_leaves_its_successors_file(tmp_path):
    path = str(tmp_path / "engine.sock")
    first = addresses.listen(path)
    os.unlink(path)
    second = addresses.listen(path)
    first.close()
    addresses.connect(path, WAIT_S).close()
    second.close()
    assert not os.path.exists(path)


def test_who_finds_the_backlog_full_waits_for_a_place(monkeypatch):
    monkeypatch.setattr(addresses, "BACKLOG", 0)
    address = addresses.new_address()
    with addresses.listen(address) as listener, addresses.connect(address, WAIT_S), ThreadPoolExecutor() as threads:
        with pytest.raises(DeviceError, match="no engine's process takes clients"):
            addresses.connect(address, 0.05)
        waiting = threads.submit(addresses.connect, address, WAIT_S)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        listener.accept()[0].close()
        waiting.result(WAIT_S).close()


@pytest.mark.parametrize("answer", [b"hello", b"\xff", b"[]", b'{"version": 3}'])
def test_what_is_no_engine_is_called_so(answer):
    address = addresses.new_address()

    def answer_one():
        with listener.accept()[0] as sock:
            sock.send(answer)

    with addresses.listen(address) as listener, ThreadPoolExecutor() as threads:
        listener.setblocking(True)
        threads.submit(answer_one)
        with pytest.raises(DeviceError, match="no engine's process of this version"):
            connect(address, timeout=WAIT_S)
