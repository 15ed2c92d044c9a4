"""A model that cannot be described is alone in not being served; what a request's own class refuses is a 400."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from tests.serve.helpers import Server
from tests.serve.test_under_fire import children
from tests.waiting import until

tritongrpc = pytest.importorskip("tritonclient.grpc")
INDESCRIBABLE = {"unsigned": "uint16", "complex": "complex64", "texts": "<U2", "unlike": "a and b must be as long"}
SERVED = {
    "both": ({"a": [1, 2, 3], "b": [10, 20, 30]}, {"sum": [11, 22, 33]}),
    "counted": ({"words": [1, 2, 3]}, {"sum": [4, 5, 6]}),
    "number": (2, {"y": 4}),
    "net": ({"offsets": [0, 0, 0, 2, 4], "sources": [0, 1, 2, 2], "x": [1, 2, 4, 8]}, {"h": [1, 2, 7, 22]}),
    "leaving": ({"id": [1, 2], "parameters": [10, 20]}, {"sum": [11, 22]}),
}
WRONG = {"a": [1], "b": [1, 2]}
RELOADED = """
import torch, cellrt
ADD = cellrt.cell(lambda a: {{"b": a + 1}}, {{"a": cellrt.token}}, name="more")
reloaded = cellrt.unfold("reloaded", example=torch.zeros(2, dtype=torch.{}))(lambda graph, x: {{"b": ADD(a=1).b}})
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "reloaded.py"
    path.write_text(RELOADED.format("int64"))
    return path


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Server]:
    names = [*SERVED, "nested_net", "picture", "two_words", "unsigned", "complex_", "texts", "unlike"]
    paths = [*(f"tests.serve.odd_models:{name}" for name in names), f"{file}:reloaded"]
    with Server(["--port", "0", "--device", "cpu:1", "--grpc-port", "0", *paths], is_whole=False) as made:
        until(lambda: infer(made, "number", 1)[0] == 200, "it serves")
        yield made


def infer(server: Server, model: str, request: Any) -> tuple[int, Any]:
    answer = server.post(f"/v1/models/{model}/infer", {"request": request})
    return answer.status_code, answer.json().get("results") or answer.json()["error"]


def unserved(server: Server) -> dict[str, str]:
    """The reasons, by model."""
    index = server.post("/v2/repository/index").json()
    return {entry["name"]: entry["reason"] for entry in index if entry["state"] == "UNAVAILABLE"}


@pytest.mark.parametrize("model", SERVED)
def test_a_class_that_checks_or_makes_its_fields_is_served(server: Server, model: str) -> None:
    request, results = SERVED[model]
    assert infer(server, model, request) == (200, results)


def shapes_of(server: Server, model: str) -> list[list[int]]:
    metadata = server.http.get(f"/v2/models/{quote(model)}").json()
    return [one["shape"] for one in (*metadata["inputs"], *metadata["outputs"])]


def test_arrays_of_a_graph_that_say_something_of_each_other_are_of_any_size_if_they_fit(server: Server) -> None:
    assert shapes_of(server, "net") == [[-1]] * 4
    assert infer(server, "net", {"offsets": [0, 0], "sources": [], "x": [3]}) == (200, {"h": [3]})
    status, error = infer(server, "net", {"offsets": [0, 0, 2], "sources": [0], "x": [1, 2]})
    assert status == 400 and "offsets" in error
    inside = {"edges": {"offsets": [0, 0, 1], "sources": [0]}, "x": [3, 4]}
    assert infer(server, quote("nested net"), inside) == (200, {"h": [3, 7]})


def test_arrays_come_as_tensors_to_a_model_of_numpy_s(server: Server) -> None:
    given = {"offsets": ("INT64", [0, 0, 1]), "sources": ("INT64", [0]), "x": ("FP32", [1, 2])}
    inputs = [
        {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}
        for name, (datatype, data) in given.items()
    ]
    answer = server.post("/v2/models/net/infer", {"inputs": inputs})
    assert (answer.status_code, answer.json()["outputs"][0]["data"]) == (200, [1, 3])


def test_what_no_graph_reads_row_by_row_has_the_size_of_the_example(server: Server) -> None:
    assert shapes_of(server, "picture")[:3] == [[90_000], [2], [-1]]
    status, error = infer(server, "picture", {"picture": [0.0] * 90_000, "scale": [1], "a": [1]})
    assert (status, error) == (400, "request.scale: expected shape [2], got [1]")


def test_what_cannot_be_described_is_unavailable_and_says_why(server: Server) -> None:
    reasons = unserved(server)
    assert reasons.keys() == INDESCRIBABLE.keys()
    for name, why in INDESCRIBABLE.items():
        assert f"model {name!r} cannot be served" in reasons[name] and why in reasons[name]
        assert infer(server, name, [1, 2]) == (500, reasons[name])


def test_what_a_class_refuses_is_the_client_s_mistake(server: Server) -> None:
    status, said = infer(server, "both", {"a": [1], "b": [1, 2]})
    assert (status, said) == (400, "request: ValueError: a and b must be as long")
    given = [{"name": name, "shape": [len(data)], "datatype": "INT64", "data": data} for name, data in WRONG.items()]
    answer = server.post("/v2/models/both/infer", {"inputs": given})
    assert answer.status_code == 400 and "must be as long" in answer.json()["error"]
    assert server.post("/v2/models/both/generate", WRONG).status_code == 400


def test_a_class_that_would_end_the_process_is_refused_as_any(server: Server) -> None:
    assert infer(server, "leaving", {"id": [1], "parameters": []}) == (400, "request: SystemExit: goodbye")
    assert not any("Traceback" in line for line in server.lines)


def test_a_model_s_own_inputs_go_before_the_protocol_s_names(server: Server) -> None:
    answer = server.post("/v2/models/leaving/generate", {"id": [1, 2], "parameters": [10, 20]})
    assert answer.status_code == 200 and answer.json()["sum"] == [11, 22], answer.text
    schemas = server.http.get("/openapi.json").json()["paths"]["/v2/models/leaving/generate"]["post"]
    body = schemas["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"] == {"id": {}, "parameters": {}}


def test_a_name_with_blanks_and_braces_is_described_by_its_address(server: Server) -> None:
    description = server.http.get("/openapi.json").json()
    path = f"/v1/models/{quote('two {words}')}/infer"
    body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schemas = description["components"]["schemas"]
    assert schemas[body["$ref"].rpartition("/")[2]]["properties"]["request"] == {"type": "number"}
    assert all(re.fullmatch("[A-Za-z0-9._-]+", key) for key in schemas)
    assert server.post(path, {"request": 2}).json()["results"] == {"y": 4}


def test_a_file_that_makes_a_model_of_another_name_is_loaded_as_none(server: Server, file: Path) -> None:
    before = server.post("/v2/repository/index").json()
    file.write_text(RELOADED.format("int64").replace("reloaded", "renamed").replace("renamed =", "reloaded ="))
    try:
        answer = server.post("/v2/repository/models/reloaded/load")
    finally:
        file.write_text(RELOADED.format("int64"))
    assert answer.status_code == 500
    assert "'reloaded' cannot be loaded anew" in answer.text and "a model named 'renamed' now" in answer.text
    assert server.post("/v2/repository/index").json() == before
    assert infer(server, "reloaded", [0, 0]) == (200, {"b": 2})


def test_a_message_that_is_refused_does_not_end_its_stream(server: Server) -> None:
    answers: Queue[Any] = Queue()
    with tritongrpc.InferenceServerClient(server.grpc_address) as client:
        with pytest.raises(tritongrpc.InferenceServerException, match="must be as long") as caught:
            client.infer("both", _tensors(a=[1], b=[1, 2]))
        assert str(caught.value.status()) == "StatusCode.INVALID_ARGUMENT"
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer("both", _tensors(a=[1], b=[1, 2]))
        client.async_stream_infer("both", _tensors(a=[1], b=[2]))
        (_, refused), (done, _) = (answers.get(timeout=30) for _ in range(2))
        client.stop_stream()
    assert "must be as long" in str(refused) and done.as_numpy("sum").tolist() == [3]


def _tensors(**given: list[int]) -> list[Any]:
    made = [tritongrpc.InferInput(name, [len(values)], "INT64") for name, values in given.items()]
    for each, values in zip(made, given.values()):
        each.set_data_from_numpy(np.array(values))
    return made


@pytest.mark.parametrize("number", [1e39, -1e39, 10**400, 3.4028236e38])
def test_a_number_that_is_too_large_is_refused_as_in_a_tensor(server: Server, number: float) -> None:
    assert infer(server, "number", number) == (400, "request: expected FP32, got a number that is too large for it")


@pytest.mark.slow
def test_a_model_that_a_load_makes_indescribable_is_unavailable_at_once(server: Server, file: Path) -> None:
    file.write_text(RELOADED.format("uint16"))
    assert server.post("/v2/repository/models/reloaded/load").status_code == 500
    assert "uint16" in unserved(server)["reloaded"] and infer(server, "number", 1) == (200, {"y": 2})

    (pid,) = children(server, "process.host")
    os.kill(pid, signal.SIGKILL)
    until(lambda: children(server, "process.host") not in ([pid], []), "there is a successor")
    until(lambda: infer(server, "number", 1)[0] == 200, "the others are served again")
    until(lambda: unserved(server).keys() == {*INDESCRIBABLE, "reloaded"}, "it has the same fault")

    file.write_text(RELOADED.format("int64"))
    assert server.post("/v2/repository/models/reloaded/load").status_code == 200
    until(lambda: unserved(server).keys() == INDESCRIBABLE.keys(), "it is served again")


@pytest.mark.slow
def test_a_server_none_of_whose_models_can_be_served_says_what_to_do_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    path.write_text(RELOADED.format("uint16"))
    with Server(["--port", "0", "--device", "cpu:1", f"{path}:reloaded"], is_whole=False) as server:
        told = "the server is not ready, and stays so: 1 of 1 models cannot be served (reloaded). Mend and load"
        until(lambda: any(told in line for line in server.lines), "it says so")
        assert not server.is_ready() and server.http.get("/v2/health/live").status_code == 200
        path.write_text(RELOADED.format("int64"))
        assert server.post("/v2/repository/models/reloaded/load").status_code == 200
        assert server.is_ready() and infer(server, "reloaded", [0, 0]) == (200, {"b": 2})
