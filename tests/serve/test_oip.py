"""The Open Inference Protocol over HTTP, by a client that we did not write and by hand."""

from __future__ import annotations

import json
import struct
import time

import numpy as np
import pytest

from tests.serve.helpers import Server
from tests.steps import HOLD, RAISE, WIDTH

tritonhttp = pytest.importorskip("tritonclient.http")


@pytest.fixture(scope="module")
def client(server: Server):
    made = tritonhttp.InferenceServerClient(server.address)
    yield made
    made.close()


def tensor(name: str, array: np.ndarray, datatype: str = "FP32", *, binary: bool = True):
    made = tritonhttp.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def expected(x: np.ndarray, h: np.ndarray | None = None) -> np.ndarray:
    h = np.zeros(WIDTH, np.float32) if h is None else h
    rows = []
    for row in x:
        h = row + 0.5 * h
        rows.append(h)
    return np.array(rows)


X = np.arange(6, dtype=np.float32).reshape(3, WIDTH)


def test_server_and_models_are_live_and_ready_and_describe_themselves(client) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("chain") and client.is_model_ready("chain", "1")
    assert not client.is_model_ready("nobody")
    assert not client.is_model_ready("chain", "7")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("chain")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, WIDTH]}]
    assert metadata["outputs"] == [
        {"name": "every", "datatype": "FP32", "shape": [-1, WIDTH]},
        {"name": "last", "datatype": "FP32", "shape": [WIDTH]},
    ]
    assert client.get_model_config("kept")["sequence_batching"] == {}


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tensors_come_and_go_as_json_and_as_bytes(client, binary_in: bool, binary_out: bool) -> None:
    outputs = [tritonhttp.InferRequestedOutput(name, binary_data=binary_out) for name in ("last", "every")]
    result = client.infer("chain", [tensor("x", X, binary=binary_in)], outputs=outputs, request_id="17")
    np.testing.assert_allclose(result.as_numpy("every"), expected(X))
    np.testing.assert_allclose(result.as_numpy("last"), expected(X)[-1])
    assert result.get_response()["id"] == "17"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_a_body_may_come_compressed(client, encoding: str, binary: bool) -> None:
    for answer_encoding in (None, encoding):
        result = client.infer(
            "chain",
            [tensor("x", X, binary=binary)],
            request_compression_algorithm=encoding,
            response_compression_algorithm=answer_encoding,
        )
        np.testing.assert_allclose(result.as_numpy("every"), expected(X))


@pytest.mark.parametrize("path", ["/v2/models/letters/generate_stream", "/v1/models/letters/infer"])
def test_a_stream_says_what_its_request_is_known_by(server: Server, path: str) -> None:
    sent = {"request": "abc", "stream": True} if path.startswith("/v1") else {"text": "abc"}
    with server.http.stream("POST", path, json=sent) as answer:
        list(answer.iter_lines())
    story = server.http.get(f"/debug/requests/{answer.headers['x-cellrt-request']}").json()
    assert story["model"] == "letters"


@pytest.mark.parametrize("way", ["generate", "generate_stream"])
def test_an_error_of_a_request_says_what_it_is_known_by(server: Server, way: str) -> None:
    sent = {"x": [[HOLD, 0]] * 30, "parameters": {"timeout": 5000}}
    answer = server.post(f"/v2/models/chain/{way}", sent)
    assert answer.status_code == 504
    assert server.http.get(f"/debug/requests/{answer.headers['x-cellrt-request']}").json()["model"] == "chain"


def test_an_error_of_a_request_in_a_sequence_says_what_it_is_known_by(server: Server) -> None:
    sequence = {"sequence_id": "late", "sequence_start": True, "sequence_end": True, "timeout": 5000}
    answer = server.post("/v2/models/kept/generate", {"x": [[HOLD, 0]] * 30, "parameters": sequence})
    assert answer.status_code == 504
    assert server.http.get(f"/debug/requests/{answer.headers['x-cellrt-request']}").json()["model"] == "kept"


@pytest.mark.parametrize("binary", [True, False])
def test_texts_are_bytes(client, binary: bool) -> None:
    result = client.infer("letters", [tensor("text", np.array(["a\u00e9"], object), "BYTES", binary=binary)])
    assert result.as_numpy("codes").tolist() == [ord("a") + 1, 0xE9 + 1]


def test_what_shapes_cannot_say_is_json_in_a_text(client) -> None:
    given = tensor("request", np.array([json.dumps([[1, 2], [3, [4, 5]]])], object), "BYTES")
    assert client.infer("tree", [given]).as_numpy("sum").item() == 15


def test_bfloat16_goes_as_bytes(server: Server) -> None:
    raw = struct.pack("<3H", 0x3F80, 0x4000, 0x4040)  # 1, 2, 3
    head = {
        "inputs": [{"name": "x", "shape": [3], "datatype": "BF16", "parameters": {"binary_data_size": 6}}],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    answer = server.http.post(
        "/v2/models/half/infer", content=text + raw, headers={"Inference-Header-Content-Length": str(len(text))}
    )
    size = int(answer.headers["inference-header-content-length"])
    assert answer.content[size:] == struct.pack("<3H", 0x4000, 0x4040, 0x4080)


def test_a_sequence_keeps_its_state_from_start_to_end(client) -> None:
    state = None
    for number, row in enumerate(X):
        result = client.infer(
            "kept",
            [tensor("x", row[None])],
            sequence_id=5,
            sequence_start=number == 0,
            sequence_end=number == len(X) - 1,
        )
        rows = expected(row[None], state)
        state = rows[-1]
        np.testing.assert_allclose(result.as_numpy("h"), rows)
    with pytest.raises(tritonhttp.InferenceServerException, match="is not open"):
        client.infer("kept", [tensor("x", X[:1])], sequence_id=5)


def test_a_sequence_that_is_started_again_is_new(client) -> None:
    for _ in range(2):
        result = client.infer("kept", [tensor("x", X)], sequence_id="again", sequence_start=True)
        np.testing.assert_allclose(result.as_numpy("h"), expected(X))
    client.infer("kept", [tensor("x", X)], sequence_id="again", sequence_end=True)


def test_a_timeout_is_a_deadline(client) -> None:
    slow = np.full((30, WIDTH), HOLD, np.float32)
    with pytest.raises(tritonhttp.InferenceServerException) as caught:
        client.infer("chain", [tensor("x", slow)], timeout=50_000)
    assert caught.value.status() == "504"


@pytest.mark.parametrize("more", [{}, {"sequence_id": "late", "sequence_start": True, "sequence_end": True}])
def test_what_must_begin_by_a_time_ends_if_it_has_not(server: Server, more: dict[str, object]) -> None:
    model, parameters = "kept" if more else "chain", {"schedule_by": 1, **more}
    answer = server.post(f"/v2/models/{model}/generate", {"x": [[1, 2]], "parameters": parameters})
    assert answer.status_code == 504 and "not begun within 1e-06 s" in answer.text
    parameters = {"schedule_by": 60_000_000, **more}
    answer = server.post(f"/v2/models/{model}/generate", {"x": [[1, 2]], "parameters": parameters})
    assert answer.status_code == 200


def test_a_cell_that_raises_is_a_500_with_its_words(client) -> None:
    with pytest.raises(tritonhttp.InferenceServerException, match="a row this cell cannot take") as caught:
        client.infer("chain", [tensor("x", np.full((1, WIDTH), RAISE, np.float32))])
    assert caught.value.status() == "500"


def body(**changes: object) -> dict[str, object]:
    one = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    return {"inputs": [{**one, **changes.pop("input", {})}], **changes}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({}, "inputs"),
        (body(input={"name": "y"}), "expected inputs ['x']"),
        (body(input={"datatype": "FP64"}), "expected FP32"),
        (body(input={"shape": [1, 3], "data": [1, 2, 3]}), "expected shape [-1, 2]"),
        (body(input={"data": [1]}), "expected 2 numbers"),
        (body(input={"data": ["a", "b"]}), "got texts"),
        (body(input={"data": [[1, 2], [3]]}), "equal lengths"),
        (body(input={"shape": [-1, 2]}), "no tensor has the shape"),
        (body(input={"data": None}), "expected data"),
        (body(outputs=[{"name": "nobody"}]), "expected outputs among"),
        (body(parameters={"priority": -1}), "priority"),
        (body(parameters={"timeout": "soon"}), "timeout"),
        (body(parameters={"schedule_by": -1}), "schedule_by: expected microseconds, at most 1e+15"),
        (body(parameters={"timeout": 10**400}), "timeout: expected microseconds, at most 1e+15"),
        (body(parameters={"sequence_start": True}), "need a sequence_id"),
        (body(parameters={"sequence_id": 9, "sequence_start": True}), "keeps no state"),
        (body(parameters={"sequence_id": 9, "sequence_start": "false"}), "sequence_start: expected true or false"),
        (body(parameters={"sequence_id": "a" * 257}), "sequence_id: expected at most 256 characters, got 257"),
        (body(input={"shape": [0, 2**70], "data": []}), "no tensor has the shape"),
        (body(input={"shape": [2**70, 0], "data": []}), "no tensor has the shape"),
        (body(input={"data": [1e39, 1]}), "expected FP32, got a number that is too large"),
        (body(input={"data": json.loads("[" * 70 + "1" + "]" * 70)}), "nested more than 64 deep"),
        (body(input={"parameters": {"binary_data_size": 8}, "data": None}), "expected 8 bytes|are 8 bytes"),
        (
            body(input={"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}, "data": None}),
            "input 'x': parameter 'shared_memory_region' is not supported ('r')",
        ),
        (body(outputs=[{"name": "last", "parameters": {"classification": 2}}]), "output 'last': parameter 'classif"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_request_is_a_400_that_says_what_was_expected(server: Server, sent: object, words: str) -> None:
    answer = server.post("/v2/models/chain/infer", sent)
    assert answer.status_code == 400
    assert any(each in answer.json()["error"] for each in words.split("|")), answer.text


def test_a_request_of_more_numbers_than_the_limit_is_too_large_by_either_protocol(server: Server) -> None:
    rows = [[0, 0]] * 600_000
    flat = body(input={"shape": [len(rows), 2], "data": [0] * (2 * len(rows))})
    for path, sent in (("/v1/models/chain/infer", {"request": rows}), ("/v2/models/chain/infer", flat)):
        answer = server.post(path, sent)
        assert (answer.status_code, answer.json()["type"]) == (413, "RequestTooLargeError")
        assert "expected at most 1000000 items (max_items)" in answer.json()["error"]


def test_shared_memory_is_refused_by_its_name(client) -> None:
    with pytest.raises(tritonhttp.InferenceServerException, match="no shared memory here.*system.*/r/register") as told:
        client.register_system_shared_memory("r", "/r", 8)
    assert told.value.status() == "404"
    given = tritonhttp.InferInput("x", [1, 2], "FP32")
    given.set_shared_memory("r", 8)
    with pytest.raises(tritonhttp.InferenceServerException, match=r"'shared_memory_region' is not supported \('r'\)"):
        client.infer("chain", [given])


def test_texts_are_not_lost_among_lists(server: Server) -> None:
    one = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [["a"], "b"]}
    answer = server.post("/v2/models/letters/infer", {"inputs": [one]})
    assert answer.status_code == 400 and "equal lengths" in answer.json()["error"]


def test_bytes_behind_the_json_are_counted_without_it(server: Server) -> None:
    sent = json.dumps(body(input={"parameters": {"binary_data_size": 8}, "data": None})).encode()
    headers = {"inference-header-content-length": str(len(sent))}
    answer = server.post("/v2/models/chain/infer", content=sent + b"x" * 11, headers=headers)
    assert answer.status_code == 400 and "11 bytes behind its JSON, its inputs name 8" in answer.text
    headers = {"inference-header-content-length": "9" * 5000}
    answer = server.post("/v2/models/chain/infer", content=sent, headers=headers)
    assert answer.status_code == 400 and "Inference-Header-Content-Length" in answer.text


def test_unknown_models_and_versions_are_404(server: Server) -> None:
    for path in ("/v2/models/nobody/infer", "/v2/models/chain/versions/9/infer"):
        assert server.post(path, body()).status_code == 404
    assert server.post("/v2/models/chain/versions/1/infer", body()).status_code == 200


def test_generate_takes_and_gives_values_by_name(server: Server) -> None:
    answer = server.post("/v2/models/letters/generate", {"text": "ab", "id": "x", "parameters": {"priority": 1}})
    assert answer.json() == {"model_name": "letters", "model_version": "1", "id": "x", "codes": [98, 99]}


@pytest.mark.parametrize("text", ["a", "ab"])
def test_what_generate_gives_is_a_list_however_many_there_are(server: Server, text: str) -> None:
    codes = [ord(letter) + 1 for letter in text]
    assert server.post("/v2/models/letters/generate", {"text": text}).json()["codes"] == codes


@pytest.mark.parametrize("name", ["max_steps", "max_tokens", "max_new_tokens"])
def test_generate_takes_the_most_steps_by_any_name_that_clients_have_for_it(server: Server, name: str) -> None:
    answer = server.post("/v2/models/limited/generate", {"first": 4, "parameters": {name: 1}})
    assert answer.json()["n"] == [5], answer.text
    twice = server.post("/v2/models/limited/generate", {"first": 4, "max_steps": 2, "parameters": {name: 1}})
    assert twice.status_code == 400 and f"parameter {name!r}: the input 'max_steps'" in twice.json()["error"]


@pytest.mark.parametrize("way", ["generate", "generate_stream", "infer"])
def test_a_parameter_that_nobody_knows_is_refused_by_name(server: Server, way: str) -> None:
    parameters = {"temperature": 0.5, "priority": 1}
    sent = body(parameters=parameters) if way == "infer" else {"x": [[1, 2]], "parameters": parameters}
    answer = server.post(f"/v2/models/chain/{way}", sent)
    assert answer.status_code == 400 and "got ['temperature']" in answer.json()["error"]


def test_generate_stream_sends_an_event_a_step(server: Server) -> None:
    with server.http.stream("POST", "/v2/models/letters/generate_stream", json={"text": "abc"}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert [event["codes"] for event in events] == [98, 99, 100]


def test_an_error_before_the_first_step_is_the_answer_of_a_stream(server: Server) -> None:
    answer = server.post("/v2/models/letters/generate_stream", {"text": ""})
    assert answer.status_code == 400 and answer.json()["type"] == "RequestError"


def test_statistics_count_requests(client) -> None:
    def count() -> int:
        return int(client.get_inference_statistics("two")["model_stats"][0]["inference_count"])

    before = count()
    two = [tensor("x", X), tensor("y", X), tensor("scale", np.array([2]), "INT64")]
    np.testing.assert_allclose(client.infer("two", two).as_numpy("h"), expected(4 * X))
    assert count() == before + 1
    (of_two,) = client.get_inference_statistics("two")["model_stats"]
    assert 0 <= 1e3 * time.time() - of_two["last_inference"] < 60_000
    every = {each["name"]: each for each in client.get_inference_statistics()["model_stats"]}
    assert {"chain", "two"} <= every.keys() and every["two"] == of_two


def test_models_are_listed_unloaded_and_loaded_anew(client) -> None:
    def states() -> dict[str, str]:
        return {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}

    assert set(states().values()) == {"READY"}
    client.unload_model("half")
    assert states()["half"] == "UNAVAILABLE" and not client.is_model_ready("half")
    client.load_model("half")
    assert client.is_model_ready("half", "2") and not client.is_model_ready("half", "1")
    with pytest.raises(tritonhttp.InferenceServerException, match="never registered"):
        client.load_model("os:system")
    with pytest.raises(tritonhttp.InferenceServerException, match="no config"):
        client.load_model("half", config="{}")
