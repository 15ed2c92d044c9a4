"""What a newcomer gets wrong is told in our words: which model, cell and input, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.helpers import Server
from tests.waiting import until

tritonclient = pytest.importorskip("tritonclient.http")
connect = pytest.importorskip("websockets.sync.client").connect
MODELS = ("words", "rows", "doubled", "said", "stepped", "terms", "many", "unseeded", "slashed")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    paths = [f"tests.serve.newcomer_models:{name}" for name in MODELS]
    with Server(["--port", "0", "--device", "cpu:1", *paths], is_whole=False) as made:
        yield made


def infer(server: Server, model: str, request: Any, **more: Any) -> httpx.Response:
    return server.post(f"/v1/models/{model}/infer", {"request": request, **more})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("token", [10, 99, -1, 2**40])
@pytest.mark.parametrize(("model", "cell"), [("words", "read"), ("rows", "look_up")])
def test_a_token_outside_the_vocabulary_is_the_client_s_mistake(
    server: Server, model: str, cell: str, token: int
) -> None:
    answer = infer(server, model, [1, token])
    expected = f"model {model!r}: cell {cell!r}, input 'token': expected tokens from 0 to 9, got {token}"
    assert (answer.status_code, answer.json()) == (400, {"error": expected, "type": "RequestError"})
    assert infer(server, model, [1, 9]).status_code == 200


def test_it_is_so_at_every_door(server: Server) -> None:
    body = {"inputs": [{"name": "request", "shape": [2], "datatype": "INT64", "data": [1, 99]}]}
    assert "got 99" in server.post("/v2/models/words/infer", body).json()["error"]
    events = infer(server, "words", [1, 99], stream=True)
    assert events.status_code == 400 and "got 99" in events.json()["error"]
    with connect(server.url.replace("http", "ws") + "/v1/models/words/session") as socket:
        socket.send('{"request": [1, 99]}')
        told = json.loads(socket.recv(30))
        assert told["type"] == "RequestError" and "got 99" in told["error"]


def test_an_index_that_no_request_gives_is_told_with_the_cell_that_has_it(server: Server) -> None:
    answer = infer(server, "doubled", [9])
    assert (answer.status_code, answer.json()["type"]) == (500, "CellError")
    told = "model 'doubled': an index is outside of what the cell looks it up in: cell 'look_up' raised IndexError"
    assert answer.json()["error"].startswith(told)


@pytest.mark.parametrize(
    ("model", "request_", "num_steps"),
    [
        ("said", {"first": 1}, 3),
        ("said", {"first": 1, "max_steps": 5}, 5),
        ("stepped", {"first": 1}, 2),
        ("stepped", {"first": 1, "steps": 4}, 4),
    ],
)
def test_what_a_model_does_without_may_be_left_out(
    server: Server, model: str, request_: dict[str, int], num_steps: int
) -> None:
    expected = list(range(2, 2 + num_steps))
    assert infer(server, model, request_).json()["results"]["n"] == expected
    assert server.post(f"/v2/models/{model}/generate", request_).json()["n"] == expected


def test_a_description_says_what_may_be_left_out(server: Server) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["said.Request"]["properties"]["request"]["required"] == ["first"]
    config = server.http.get("/v2/models/said/config").json()
    assert [(each["name"], each.get("optional", False)) for each in config["input"]] == [
        ("first", False),
        ("max_steps", True),
    ]
    given = tritonclient.InferInput("first", [1], "INT64")
    given.set_data_from_numpy(np.array([1]))
    with tritonclient.InferenceServerClient(server.address) as client:
        assert client.infer("said", [given]).as_numpy("n").tolist() == [2, 3, 4]


@pytest.mark.parametrize("request_", [{}, {"max_steps": 1}, {"first": 1, "more": 1}])
def test_what_a_model_needs_may_not_be_left_out(server: Server, request_: dict[str, int]) -> None:
    assert infer(server, "said", request_).status_code == 400


def test_lists_that_mix_words_and_numbers_come_through(server: Server) -> None:
    nodes = [["leaf", 3], ["join", 0, 0], ["leaf", 5], ["join", 1, 2], ["join", 3, 1]]
    answer = infer(server, "terms", {"nodes": nodes})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    three, five = results["all"][0], results["all"][2]
    assert results["last"] == results["all"][-1] == pytest.approx([4 * x + y for x, y in zip(three, five)])


@pytest.mark.parametrize(("model", "name", "shape"), [("terms", "all", [-1, 3]), ("many", "n", [-1])])
def test_results_whose_number_the_request_decides_say_so(
    server: Server, model: str, name: str, shape: list[int]
) -> None:
    outputs = {each["name"]: each["shape"] for each in server.http.get(f"/v2/models/{model}").json()["outputs"]}
    assert outputs[name] == shape


def test_a_model_that_no_address_can_name_is_not_served(server: Server) -> None:
    entry = next(each for each in server.post("/v2/repository/index").json() if each["name"] == "a/b")
    assert entry["state"] == "UNAVAILABLE" and "'a/b' cannot be served" in entry["reason"]


def test_a_model_without_a_seed_says_what_it_needs_and_the_others_are_served(server: Server) -> None:
    answer = infer(server, "unseeded", [[1, 2]])
    assert (answer.status_code, answer.json()["type"]) == (500, "DefinitionError")
    assert "weights must come from files or a seed" in answer.json()["error"]
    until(lambda: any("weights must come from files or a seed" in line for line in server.lines), "the log says so too")
    assert infer(server, "words", [1]).status_code == 200
    ready = [server.http.get(f"/v2/{path}/ready").status_code for path in ("health", "models/unseeded", "models/words")]
    assert ready == [503, 503, 200]
