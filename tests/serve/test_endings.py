"""The end of a server: what was begun is answered as long as it waits, and told so if it takes longer."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.helpers import WAIT_S, Server, start
from tests.steps import HOLD
from tests.waiting import until

websocket = pytest.importorskip("websockets.sync.client")
tritongrpc = pytest.importorskip("tritonclient.grpc")
ROWS = 40
LONG = [[HOLD, 0]] * ROWS
"""Takes most of a second."""
DRAIN_S = 20.0
CUT_OFF = "took longer than it waits"


def in_threads(*targets: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def connect(server: Server, model: str) -> Any:
    return websocket.connect(f"ws://{server.address}/v1/models/{model}/session", proxy=None)


def tensor(name: str, array: np.ndarray, datatype: str) -> Any:
    made = tritongrpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def end(server: Server, threads: list[threading.Thread]) -> float:
    """Has a server end in good order; returns how long it took."""
    begin_s = time.monotonic()
    assert server.close(signal.SIGTERM) == 0
    took_s = time.monotonic() - begin_s
    for thread in threads:
        thread.join(WAIT_S)
    assert not [line for line in server.lines if "Traceback" in line], server.lines
    return took_s


@pytest.mark.slow
def test_what_grpc_was_asked_is_answered_before_the_end_and_an_idle_stream_does_not_delay_it() -> None:
    answers: list[Any] = []
    steps: Queue[Any] = Queue()
    idle: Queue[Any] = Queue()
    rows = tensor("x", np.array(LONG, np.float32), "FP32")
    with start("chain", options=["--drain-s", str(DRAIN_S), "--grpc-port", "0", "--front-ends", "2"]) as server:
        address = server.grpc_address
        unary, streaming, waiting = (tritongrpc.InferenceServerClient(address) for _ in range(3))
        for client, queue in ((streaming, steps), (waiting, idle)):
            client.start_stream(callback=lambda result, error, queue=queue: queue.put((result, error)))
        threads = in_threads(lambda: answers.append(unary.infer("chain", [rows])))
        streaming.async_stream_infer("chain", [rows], parameters={"stream": True})
        until(lambda: server.unfinished() == 2, "both are under way")
        assert end(server, threads) < DRAIN_S / 2
        got = [steps.get(timeout=WAIT_S) for _ in range(ROWS + 2)]
        assert "about to end" in str(idle.get(timeout=WAIT_S)[1])
        for client in (unary, streaming, waiting):
            client.close()
    assert answers[0].as_numpy("every").shape == (ROWS, 2)
    assert not any(error for _, error in got)
    assert got[-1][0].get_response().parameters["triton_final_response"].bool_param


@pytest.mark.slow
def test_what_a_websocket_was_asked_is_answered_before_the_end_and_what_it_asks_then_is_refused() -> None:
    ask = json.dumps({"request": LONG})
    with ExitStack() as stack, start("kept", "chain", options=["--drain-s", str(DRAIN_S)]) as server:
        sockets = [stack.enter_context(connect(server, model)) for model in ("kept", "chain", "chain")]
        for socket in sockets[:2]:
            socket.send(ask)
            socket.send(ask)
        until(lambda: server.unfinished() == 4, "they are under way")
        begin_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(Exception, match="1012"):  # the one that was asked nothing
            sockets[2].recv(WAIT_S)
        for socket in sockets[:2]:
            socket.send(ask)
        for socket in sockets[:2]:
            answers = [json.loads(socket.recv(WAIT_S)) for _ in range(3)]
            assert [answer["number"] for answer in answers] == [0, 1, 2]
            assert [answer.get("type") for answer in answers] == [None, None, "EngineClosedError"]
            with pytest.raises(Exception, match="1012"):
                socket.recv(WAIT_S)
        assert server.process.wait(WAIT_S) == 0 and time.monotonic() < begin_s + DRAIN_S / 2


@pytest.mark.slow
def test_what_is_cut_off_at_the_end_is_told_so() -> None:
    answers: list[httpx.Response] = []
    events: list[str] = []
    calls: Queue[Any] = Queue()
    first = tensor("first", np.array([4]), "INT64")

    with ExitStack() as stack, start("count", options=["--drain-s", "1", "--grpc-port", "0"]) as server:

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/models/count/infer", json={"request": 4}, timeout=WAIT_S))

        def read() -> None:
            sent = {"request": 4, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/models/count/infer", json=sent, timeout=WAIT_S) as answer:
                events.extend(line for line in answer.iter_lines() if line)

        socket = stack.enter_context(connect(server, "count"))
        socket.send('{"request": 4}')
        clients = [tritongrpc.InferenceServerClient(server.grpc_address) for _ in range(2)]
        clients[0].async_infer("count", [first], callback=lambda result, error: calls.put(error))
        clients[1].start_stream(callback=lambda result, error: calls.put(error))
        clients[1].async_stream_infer("count", [first])
        threads = in_threads(ask, read)
        until(lambda: server.unfinished() == 5, "all are under way")
        end(server, threads)
        errors = [str(calls.get(timeout=WAIT_S)) for _ in range(2)]
        for client in clients:
            client.close()
        told = json.loads(socket.recv(WAIT_S))
        with pytest.raises(Exception, match="1012"):
            socket.recv(WAIT_S)
    assert answers[0].status_code == 503 and answers[0].json()["type"] == "EngineClosedError"
    assert int(answers[0].headers["retry-after"]) >= 1
    assert json.loads(events[-1].removeprefix("data: "))["type"] == "EngineClosedError"
    assert told["number"] == 0 and CUT_OFF in told["error"]
    assert all(CUT_OFF in error for error in errors), errors
