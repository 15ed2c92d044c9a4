"""The real Ray Serve on this machine: replicas come, die and go under load, and every client is told the truth."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from tests.serve.helpers import ROOT
from tests.serve.models import DIE
from tests.steps import HOLD
from tests.waiting import until

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
from ray.serve.schema import ServeDeploySchema  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580), pytest.mark.filterwarnings("ignore")]
MODELS = [f"tests.serve.models:{name}" for name in ("chain", "kept", "letters", "deadly")]
SESSIONS, PLAIN = 24, 4
START_S = 300.0
WAIT_S = 60.0


def deploy(num: int | None, **arguments: Any) -> None:
    """Has so many replicas, as an operator does with ``serve deploy``: those that are there stay."""
    arguments = {"models": MODELS, "resources": {"num_cpus": 0.2}, "timeline": 0, "drain_s": 5.0, **arguments}
    scaled = [{"name": "Engine", "num_replicas": num}] if num else []
    one = {"name": "default", "import_path": "cellrt.ray:build", "args": arguments, "deployments": scaled}
    client = serve.context._get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [one]}))
    until(lambda: serve.status().applications["default"].status == "RUNNING", "it is deployed", START_S)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two replicas behind a front."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy(2)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


class Load:
    """Clients that ask as long as they are let: some without sessions, some each in one; ``seen``: what they met."""

    def __init__(self, url: str) -> None:
        self.seen: Counter[str] = Counter()
        self._lock, self._is_over, self._url = threading.Lock(), threading.Event(), url
        self.wrong: list[str] = []
        self.told: list[str] = []
        targets = [(self._ask_plainly, k) for k in range(PLAIN)] + [(self._continue, k) for k in range(SESSIONS)]
        self._threads = [threading.Thread(target=self._run, args=pair) for pair in targets]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def count(self, what: str) -> int:
        with self._lock:
            return self.seen[what]

    def go_on(self, seconds: float = 3.0) -> None:
        """Lets every client ask some more."""
        time.sleep(seconds)
        assert not self.wrong, self.wrong[:5]

    def _note(self, what: str) -> None:
        with self._lock:
            self.seen[what] += 1

    def _run(self, target: Any, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=WAIT_S, trust_env=False) as http:
            try:
                target(http, number)
            except Exception as error:
                self.wrong.append(f"{target.__name__} {number}: {error!r}")

    def _ask_plainly(self, http: httpx.Client, _: int) -> None:
        while not self._is_over.wait(0.01):
            answer = http.post("/v1/models/chain/infer", json={"request": [[1, 2], [3, 4]]})
            assert (answer.status_code, answer.json()["results"]["last"]) == (200, [3.5, 5.0]), answer.text
            self._note("plain")

    def _continue(self, http: httpx.Client, number: int) -> None:
        h, is_start = torch.zeros(2), True
        while not self._is_over.wait(0.15):
            x = torch.randn(2)
            body = {"request": [x.tolist()], "session": f"caller {number}", "start": is_start}
            answer = http.post("/v1/models/kept/infer", json=body)
            if answer.status_code == 410 and answer.json()["type"] == "SessionError" and not is_start:
                h, is_start = torch.zeros(2), True
                self._note("lost")
                self.told.append(f"{number}: {answer.json()['error']}")
                continue
            h, is_start = x + 0.5 * h, False
            assert answer.status_code == 200, answer.text
            assert torch.equal(torch.tensor(answer.json()["results"]["h"][0]), h), "the state is another"
            self._note("continued")


def overview(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/debug/replicas", timeout=WAIT_S, trust_env=False).json()


def kill(replica: str) -> None:
    ray.kill(ray.get_actor(f"SERVE_REPLICA::default#Engine#{replica}", namespace="serve"))


def test_replicas_come_die_and_go_under_load(url: str) -> None:
    with Load(url) as load:
        until(lambda: load.count("continued") >= 3 * SESSIONS, "every session is under way", START_S)
        assert overview(url)["moves"] == 0 and sum(overview(url)["sessions"].values()) == SESSIONS

        deploy(3)
        until(lambda: len(overview(url)["sessions"]) == 3, "a third replica is there", START_S)
        until(lambda: overview(url)["moves"] > 0, "sessions move to it")
        load.go_on()
        assert load.count("lost") == 0 and min(overview(url)["sessions"].values()) > 0

        before = overview(url)
        victim, held = max(before["sessions"].items(), key=lambda pair: pair[1])
        kill(victim)
        until(lambda: load.count("lost") >= held, "their clients hear of it")
        until(lambda: len(overview(url)["sessions"].keys() - {victim}) == 3, "it has a successor", START_S)
        load.go_on()
        assert load.count("lost") == held == overview(url)["lost"], "\n".join(load.told)

        moved = overview(url)["moves"]
        deploy(1)
        until(lambda: len(overview(url)["sessions"]) == 1, "one replica is left", START_S)
        load.go_on()
        assert overview(url)["moves"] > moved
        assert load.count("lost") == held == overview(url)["lost"], "\n".join(load.told)
        assert sum(overview(url)["sessions"].values()) == SESSIONS
    assert not load.wrong, load.wrong[:5]
    assert load.count("plain") > 100


def test_the_surface_is_that_of_the_server(url: str) -> None:
    with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as http:
        assert http.get("/v2/health/ready").json() == {"ready": True}
        assert http.get("/v2/models/kept").json()["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
        answer = http.post("/v1/models/letters/infer", json={"request": "ab", "stream": True})
        assert answer.text.splitlines()[::2][:2] == ['data: {"step":{"codes":98}}', 'data: {"step":{"codes":99}}']
        wrong = http.post("/v1/models/chain/infer", json={"request": [[1]]})
        assert (wrong.status_code, wrong.json()["type"]) == (400, "RequestError")
        assert http.post("/v2/repository/models/chain/load").status_code == 400
        assert http.get("/openapi.json").json()["openapi"].startswith("3.1")
        body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
        told = {"sequence_id": 5, "sequence_start": True}
        for expected in ([1.0, 2.0], [1.5, 3.0]):
            answer = http.post("/v2/models/kept/infer", json={**body, "parameters": told})
            assert answer.json()["outputs"][0]["data"] == expected
            told = {"sequence_id": 5}


def test_a_websocket_is_a_session_of_its_own(url: str) -> None:
    from websockets.sync.client import connect

    with connect(url.replace("http", "ws") + "/v1/models/kept/session") as socket:
        for number, expected in enumerate(([[1.0, 2.0]], [[1.5, 3.0]])):
            socket.send('{"request": [[1, 2]]}')
            assert f'"number":{number},"results":{{"h":{expected}}}'.replace(" ", "") in str(socket.recv(WAIT_S))


def test_a_websocket_of_a_page_of_another_origin_is_refused_as_a_request_is(url: str) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    address = url.replace("http", "ws") + "/v1/models/kept/session"
    with pytest.raises(InvalidStatus) as refused, connect(address, origin="http://evil.example"):
        pass
    answer = refused.value.response
    assert answer.status_code == 403 and b"Origin: pages of" in answer.body


def test_a_plain_get_where_a_websocket_is_says_so(url: str) -> None:
    answer = httpx.get(f"{url}/v1/models/kept/session", timeout=WAIT_S, trust_env=False)
    assert answer.status_code == 426 and answer.headers["upgrade"] == "websocket"


def test_a_replica_whose_engine_dies_is_replaced(url: str) -> None:
    before = overview(url)["sessions"].keys()
    answer = httpx.post(f"{url}/v1/models/deadly/infer", json={"request": [[DIE, 0]]}, timeout=WAIT_S, trust_env=False)
    assert answer.status_code == 503 and answer.json()["type"] in ("DeviceError", "EngineClosedError"), answer.text
    answer = httpx.post(f"{url}/v1/models/chain/infer", json={"request": [[1, 2]]}, timeout=WAIT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    until(lambda: not before <= overview(url)["sessions"].keys(), "the old one is gone")


def test_replicas_are_added_while_requests_wait(url: str) -> None:
    deploy(None, replicas={"min_replicas": 1, "max_replicas": 2, "queueing_s": 0.1, "up_after_s": 1.0})
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            httpx.post(
                f"{url}/v1/models/chain/infer", json={"request": [[HOLD, 0]] * 5}, timeout=WAIT_S, trust_env=False
            )

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(overview(url)["sessions"]) == 2, "there is another replica", START_S)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
