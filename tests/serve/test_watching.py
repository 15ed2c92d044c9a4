"""What is counted and shown: metrics by Prometheus' own parsers, timelines, the story of a request."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cellrt.definition.aot.store import CACHE_VARIABLE
from tests.serve.helpers import ROOT, Server
from tests.steps import HOLD_LONG, RAISE
from tests.waiting import until

parser = pytest.importorskip("prometheus_client.parser")
openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
DASHBOARD = ROOT / "cellrt" / "serve" / "grafana.json"


def samples(server: Server) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parser.text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_both_formats_are_what_their_parsers_take(server: Server) -> None:
    plain = samples(server)
    text = server.http.get("/metrics", headers={"accept": "application/openmetrics-text"}).text
    names = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert plain["cellrt_up"][()] == 1
    assert {"cellrt_requests", "cellrt_task_rows", "cellrt_http_requests"} <= names


def test_every_request_is_counted_once_by_its_outcome(server: Server) -> None:
    def count(outcome: str) -> float:
        return samples(server)["cellrt_requests_total"].get((("model", "chain"), ("outcome", outcome)), 0.0)

    before = count("done"), count("CellError"), count("DeadlineError")
    for rows, status in (([[1, 2]], 200), ([[1, 2]], 200), ([[RAISE, 0]], 500)):
        assert server.post("/v1/models/chain/infer", {"request": rows}).status_code == status
    assert server.post("/v1/models/chain/infer", {"request": [[1, 2]], "deadline_s": 1e-9}).status_code == 504
    after = count("done"), count("CellError"), count("DeadlineError")
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 1, 1]
    found = samples(server)
    done = sum(value for labels, value in found["cellrt_requests_total"].items() if ("outcome", "done") in labels)
    assert sum(found["cellrt_request_queueing_seconds_count"].values()) == done
    assert sum(found["cellrt_task_rows_count"].values()) == sum(found["cellrt_tasks_total"].values())


@pytest.mark.slow
@pytest.mark.timeout(300)  # for the compiler
def test_a_cell_of_plain_torch_is_compiled_while_it_is_served(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import cellrt, torch\n"
        "step = cellrt.cell(lambda x, h: {'h': torch.tanh(x + h)}, {'x': (2,), 'h': (2,)}, name='mine')\n"
        "@cellrt.unfold('steps', example=torch.zeros(3, 2))\n"
        "def steps(graph, x): return {'h': graph.chain(step, x=x).last.h}\n"
    )
    environment = {"CELLRT_SERVE_COMPILE": "background", CACHE_VARIABLE: str(tmp_path)}
    with Server([f"{path}:steps", "--port", "0"], environment) as server:

        def answer() -> dict[str, list[float]]:
            return server.post("/v1/models/steps/infer", {"request": [[1, 2], [3, 4]]}).json()["results"]

        is_compiled, eager = (("cell", "mine"),), answer()
        assert samples(server)["cellrt_cell_compiled"] == {is_compiled: 0}
        until(lambda: samples(server)["cellrt_cell_compiled"][is_compiled] == 1, "it is compiled", 200)
        assert answer()["h"] == pytest.approx(eager["h"], abs=1e-6)


def test_counts_of_answers_are_by_handler_and_status(server: Server) -> None:
    labels = (("code", "400"), ("handler", "native_infer"))
    before = samples(server)["cellrt_http_requests_total"].get(labels, 0.0)
    assert server.post("/v1/models/chain/infer", {"request": 1}).status_code == 400
    assert samples(server)["cellrt_http_requests_total"][labels] == before + 1


def test_a_request_tells_its_way(server: Server) -> None:
    answer = server.post("/v1/models/chain/infer", {"request": [[1, 2]] * 3})
    path = f"/debug/requests/{answer.headers['x-cellrt-request']}"
    story = server.http.get(path).json()
    assert story["model"] == "chain" and sum(task["steps"] for task in story["tasks"]) == 3
    assert all(task["waited_s"] >= 0 and task["cell"] == "step" for task in story["tasks"])
    last = story["tasks"][-1]
    assert last["start_s"] + last["took_s"] <= story["took_s"]
    trace = server.http.get(path, params={"format": "trace"}).json()
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "b", "e"}


def test_a_request_tells_what_it_waited_for(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, "/v1/models/chain/infer", {"request": [[HOLD_LONG, 0]] * 4})
        until(lambda: server.unfinished() == 1, "the worker is busy")
        answer = server.post("/v1/models/letters/infer", {"request": "a"})
        assert slow.result().status_code == 200
    (task,) = server.http.get(f"/debug/requests/{answer.headers['x-cellrt-request']}").json()["tasks"]
    waited = task["waited_for"]
    assert waited["worker_s"] > 0.05 and "step" in {ran["cell"] for ran in waited["worker_ran"]}
    assert sum(value for name, value in waited.items() if name.endswith("_s")) == pytest.approx(task["waited_s"])
    assert task["waited_s"] == pytest.approx(task["start_s"], abs=1e-5) and waited["unknown_s"] == 0


@pytest.mark.parametrize("id", ["1-999999999", "nonsense", "7-1", "-", "1-" + "9" * 5000, "9" * 5000 + "-1"])
def test_a_request_that_nobody_knows_is_a_404(server: Server, id: str) -> None:
    assert server.http.get(f"/debug/requests/{id}").status_code == 404


@pytest.mark.parametrize("count", ["0", "-1", "a", "9" * 5000], ids=["none", "negative", "text", "many digits"])
def test_a_count_of_the_timeline_that_is_none_is_a_400(server: Server, count: str) -> None:
    answer = server.http.get("/debug/timeline", params={"count": count})
    assert answer.status_code == 400 and "count: expected" in answer.text


def test_a_client_that_goes_before_its_body_is_there_is_no_error_of_the_server(server: Server) -> None:
    def gone() -> float:
        labels = (("code", "499"), ("handler", "native_infer"))
        return samples(server)["cellrt_http_requests_total"].get(labels, 0.0)

    said, before = len(server.lines), gone()
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/models/chain/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{")
    until(lambda: gone() == before + 1, "it is counted as gone")
    assert not any("Traceback" in line for line in server.lines[said:])


def test_the_timeline_is_bounded_and_has_the_last_requests(server: Server) -> None:
    for _ in range(5):
        server.post("/v1/models/chain/infer", {"request": [[1, 2]]})
    events = server.http.get("/debug/timeline", params={"count": 3}).json()["traceEvents"]
    assert len([event for event in events if event["ph"] == "b" and event["name"] == "chain"]) == 3
    assert server.http.get("/debug/timeline", params={"count": 0}).status_code == 400


def test_the_dashboard_asks_for_what_there_is(server: Server) -> None:
    """Every metric that the dashboard's expressions name is one that the server has."""
    families = parser.text_string_to_metric_families(server.http.get("/metrics").text)
    names = {family.name + end for family in families for end in ("", "_total", "_bucket", "_sum", "_count")}
    text = Path(DASHBOARD).read_text()
    json.loads(text)
    asked = set(re.findall(r"cellrt_\w+", text))
    assert asked and asked <= names, asked - names


def test_what_is_not_there_is_a_404_and_a_wrong_method_a_405(server: Server) -> None:
    answers: list[httpx.Response] = [server.http.get("/nowhere"), server.http.get("/v1/models/chain/infer")]
    assert [answer.status_code for answer in answers] == [404, 405]
    assert all(answer.json()["error"] for answer in answers)
