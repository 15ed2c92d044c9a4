"""The end of a server whose clients ask for more than it waits for."""

from __future__ import annotations

import json
import signal
import threading

import httpx
import pytest

from tests.serve.helpers import WAIT_S, start
from tests.waiting import until


@pytest.mark.slow
def test_what_is_cut_off_at_the_end_is_told_so() -> None:
    answers: list[httpx.Response] = []
    events: list[str] = []

    with start("count", options=["--drain-s", "1"]) as server:

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/models/count/infer", json={"request": 4}, timeout=WAIT_S))

        def read() -> None:
            sent = {"request": 4, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/models/count/infer", json=sent, timeout=WAIT_S) as answer:
                events.extend(line for line in answer.iter_lines() if line)

        threads = [threading.Thread(target=target) for target in (ask, read)]
        for thread in threads:
            thread.start()
        until(lambda: server.unfinished() == 2 and events, "both are under way")
        assert server.close(signal.SIGTERM) == 0
        for thread in threads:
            thread.join(WAIT_S)
    assert answers[0].status_code == 503 and answers[0].json()["type"] == "EngineClosedError"
    assert int(answers[0].headers["retry-after"]) >= 1
    assert json.loads(events[-1].removeprefix("data: "))["type"] == "EngineClosedError"
    assert not [line for line in server.lines if "Traceback" in line]
