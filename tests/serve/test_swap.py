"""New weights while requests come: none is refused, and those that come later are answered by the new."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from cellrt.process.source import module_of_file
from cellrt.serve.backend import Backend
from cellrt.serve.server_settings import Settings
from tests.serve.helpers import WAIT_S, Server
from tests.waiting import until

PATH = "/v1/models/scaled/infer"
PATH_OF_SUMS = "/v1/models/summed/infer"


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


def test_a_session_that_is_begun_anew_has_the_new_weights(server: Server, weight_file: Path) -> None:
    def send(**how: object) -> list[list[float]]:
        sent = {"request": [[1]], "session": "swapped", **how}
        answer = server.post(PATH_OF_SUMS, sent)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]["h"]

    def load(weight: int) -> None:
        weight_file.write_text(str(weight))
        assert server.post("/v2/repository/models/summed/load", {}).status_code == 200

    load(2)
    assert send(start=True) == [[2]]
    load(100)
    assert send() == [[4]], "what is under way ends with the old"
    assert [send(start=True), send(), send(start=True, end=True)] == [[[100]], [[200]], [[100]]]
    assert server.statistics()["sessions"]["open"] == 0


def test_a_session_that_goes_on_with_old_weights_is_answered_with_their_version(server: Server) -> None:
    def told(is_start: bool = False) -> list[str]:
        """The versions that the doors name, after another."""
        in_sequence = {"parameters": {"sequence_id": "old", "sequence_start": is_start}}
        x = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
        streamed = server.post("/v2/models/summed/generate_stream", {"x": [[1]], **in_sequence}).text
        return [
            server.post("/v2/models/summed/infer", {"inputs": [x], **in_sequence}).json()["model_version"],
            server.post("/v2/models/summed/generate", {"x": [[1]], **in_sequence}).json()["model_version"],
            server.post(PATH_OF_SUMS, {"request": [[1]], "session": "old", "start": is_start}).json()["version"],
            json.loads(streamed.removeprefix("data: "))["model_version"],
        ]

    assert server.post("/v2/repository/models/summed/load", {}).status_code == 200
    old = server.http.get("/v2/models/summed").json()["versions"][0]
    assert told(is_start=True) == [old] * 4
    assert server.post("/v2/repository/models/summed/load", {}).status_code == 200
    assert told() == [old] * 4
    assert told(is_start=True) == [str(int(old) + 1)] * 4
    assert server.post(PATH_OF_SUMS, {"request": [[1]], "session": "old", "end": True}).status_code == 200


async def test_loads_keep_nobody_else_waiting() -> None:
    backend, is_over = Backend(Settings()), threading.Event()
    client: Any = SimpleNamespace(is_lost=False, load=lambda name: is_over.wait(WAIT_S), models=list)
    backend._client = client
    loads = [asyncio.ensure_future(backend.call("load", "slow")) for _ in range(64)]
    try:
        assert await asyncio.wait_for(backend.call("models"), 5.0) == []
    finally:
        is_over.set()
        await asyncio.gather(*loads)


def test_a_module_whose_file_has_changed_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "changing.py"
    path.write_text("class Large: ...\n")
    first = module_of_file(str(path))
    assert module_of_file(str(path)) is first
    large, name = weakref.ref(first.Large), first.__name__
    path.write_text("class Large: ...\nNUMBER = 2\n")
    assert module_of_file(str(path)).NUMBER == 2 and name not in sys.modules
    del first
    gc.collect()
    assert large() is None
