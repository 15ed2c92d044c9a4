"""New weights while requests come: none is refused, and those that come later are answered by the new."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from tests.serve.helpers import WAIT_S, Server
from tests.waiting import until

PATH = "/v1/models/scaled/infer"


def test_weights_are_swapped_without_dropping_a_request(server: Server, weight_file: Path) -> None:
    answers: list[tuple[int, str, float]] = []
    is_over = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
            while not is_over.is_set():
                answer = client.post(PATH, json={"request": [[1, 0]]})
                found = answer.json()
                answers.append((answer.status_code, found.get("version"), found["results"]["y"][0][0]))

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    first = int(server.http.get("/v2/models/scaled").json()["versions"][0])
    try:
        until(lambda: answers, "an answer by the first weights")
        for version, weight in enumerate((3, 5, 7), first + 1):
            weight_file.write_text(str(weight))
            assert server.post("/v2/repository/models/scaled/load", {}).status_code == 200
            last = server.post(PATH, {"request": [[1, 0]]}).json()
            assert (last["version"], last["results"]["y"]) == (str(version), [[weight, 0]])
        until(lambda: answers[-1][2] == 7, "an answer by the last weights")
    finally:
        is_over.set()
        for sender in senders:
            sender.join(WAIT_S)
    assert {status for status, _, _ in answers} == {200}
    assert {weight for _, _, weight in answers} <= {2, 3, 5, 7}
    assert len({weight for _, _, weight in answers}) > 1
