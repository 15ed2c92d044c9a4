"""What is queued is limited by rows too: long requests are refused early, and a model leaves room for the others."""

from __future__ import annotations

import threading

import httpx
import pytest

from tests.serve.helpers import WAIT_S, start
from tests.serve.test_watching import samples
from tests.steps import HOLD
from tests.waiting import until


@pytest.mark.slow
def test_rows_are_refused_by_the_engine_s_limit_and_the_model_s() -> None:
    pytest.importorskip("prometheus_client")
    options = ["--max-queued-rows", "100", "--max-queued-rows-per-model", "60"]
    with start("chain", "letters", options=options) as server:
        path = "/v1/models/chain/infer"
        too_large = server.post(path, {"request": [[1, 2]] * 61})
        assert (too_large.status_code, too_large.json()["type"]) == (413, "RequestTooLargeError")

        seen: list[httpx.Response] = []
        body = {"request": [[HOLD, 0]] * 50}
        holding = threading.Thread(target=lambda: seen.append(httpx.post(server.url + path, json=body, timeout=WAIT_S)))
        holding.start()
        until(lambda: samples(server)["cellrt_unfinished_rows"][()] == 50, "its rows are counted")
        refused = server.post(path, {"request": [[1, 2]] * 11})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "50 rows are unfinished, model 'chain' takes 60; 11 more came" in refused.json()["error"]
        assert server.post("/v1/models/letters/infer", {"request": "a" * 51}).status_code == 429
        assert server.post("/v1/models/letters/infer", {"request": "a" * 50}).status_code == 200
        holding.join(WAIT_S)
        assert seen[0].status_code == 200
        until(lambda: samples(server)["cellrt_unfinished_rows"][()] == 0, "they are given back")
        assert server.post(path, {"request": [[1, 2]] * 60}).status_code == 200
