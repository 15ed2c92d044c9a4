"""The Open Inference Protocol over gRPC, by a client that we did not write."""

from __future__ import annotations

import socket
import time
from queue import Queue
from typing import Any

import numpy as np
import pytest

from tests.serve.helpers import Server, start
from tests.serve.test_oip import X, expected
from tests.steps import HOLD, RAISE, WIDTH
from tests.waiting import until

tritongrpc = pytest.importorskip("tritonclient.grpc")
WAIT_S = 30.0


@pytest.fixture(scope="module")
def client(server: Server):
    with tritongrpc.InferenceServerClient(server.grpc_address) as made:
        yield made


def tensor(name: str, array: np.ndarray, datatype: str = "FP32"):
    made = tritongrpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def code_of(error: Any) -> str:
    return str(error.value.status()).removeprefix("StatusCode.")


def test_server_and_models_are_live_and_ready_and_describe_themselves(client) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("chain")
    assert not client.is_model_ready("nobody")
    metadata = client.get_model_metadata("chain", as_json=True)
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", str(WIDTH)]}]
    assert client.get_model_config("kept").config.HasField("sequence_batching")
    names = {entry.name for entry in client.get_model_repository_index().models}
    assert {"chain", "kept", "letters"} <= names
    client.infer("chain", [tensor("x", X)])
    (counts,) = client.get_inference_statistics("chain").model_stats
    assert counts.name == "chain" and 0 <= 1e3 * time.time() - counts.last_inference < 60_000


@pytest.mark.slow
@pytest.mark.skipif(not socket.has_ipv6, reason="it needs IPv6")
def test_an_address_of_ipv6_is_one_too() -> None:
    with start("chain", options=["--host", "::1", "--grpc-port", "0"]) as server:
        assert server.url.startswith("http://[::1]:")
        client = tritongrpc.InferenceServerClient(server.grpc_address)
        assert client.infer("chain", [tensor("x", X)]).as_numpy("every").shape == (3, WIDTH)
        client.close()


def test_tensors_and_texts(client) -> None:
    result = client.infer("chain", [tensor("x", X)], request_id="3")
    np.testing.assert_allclose(result.as_numpy("every"), expected(X))
    assert result.get_response().id == "3"
    texts = tensor("text", np.array([b"ab"], object), "BYTES")
    assert client.infer("letters", [texts]).as_numpy("codes").tolist() == [98, 99]


def test_a_sequence_keeps_its_state(client) -> None:
    results = [
        client.infer("kept", [tensor("x", X[k : k + 1])], sequence_id=77, sequence_start=k == 0, sequence_end=k == 2)
        for k in range(3)
    ]
    np.testing.assert_allclose(np.concatenate([result.as_numpy("h") for result in results]), expected(X))


@pytest.mark.parametrize(
    ("model", "rows", "options", "code"),
    [
        ("nobody", X, {}, "NOT_FOUND"),
        ("chain", X[:, :1], {}, "INVALID_ARGUMENT"),
        ("chain", np.full((1, WIDTH), RAISE, np.float32), {}, "INTERNAL"),
        ("chain", np.full((30, WIDTH), HOLD, np.float32), {"timeout": 50_000}, "DEADLINE_EXCEEDED"),
        ("kept", X, {"sequence_id": 991}, "FAILED_PRECONDITION"),
    ],
)
def test_errors_are_statuses(client, model: str, rows: np.ndarray, options: dict[str, Any], code: str) -> None:
    with pytest.raises(tritongrpc.InferenceServerException) as caught:
        client.infer(model, [tensor("x", rows)], **options)
    assert code_of(caught) == code


def test_two_inputs_of_one_name_are_refused(client) -> None:
    with pytest.raises(tritongrpc.InferenceServerException, match="two inputs of one name") as caught:
        client.infer("chain", [tensor("x", X), tensor("x", X)])
    assert code_of(caught) == "INVALID_ARGUMENT"


def test_what_the_server_does_not_do_is_said_and_logged_by_nobody(client, server: Server) -> None:
    with pytest.raises(tritongrpc.InferenceServerException, match="does not do that") as caught:
        client.get_system_shared_memory_status()
    assert code_of(caught) == "UNIMPLEMENTED"
    assert not any("NotImplementedError" in line for line in server.lines)


def test_a_stream_answers_in_order_and_survives_errors(server: Server) -> None:
    answers: Queue[Any] = Queue()
    with tritongrpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for k in range(3):
            options = {"sequence_id": 5, "sequence_start": k == 0, "sequence_end": k == 2}
            client.async_stream_infer("kept", [tensor("x", X[k : k + 1])], **options)
        client.async_stream_infer("kept", [tensor("x", X[:1])], sequence_id=5)
        got = [answers.get(timeout=WAIT_S) for _ in range(4)]
        client.stop_stream()
    np.testing.assert_allclose(np.concatenate([result.as_numpy("h") for result, _ in got[:3]]), expected(X))
    assert "is not open" in str(got[3][1])


def test_a_request_may_be_answered_step_by_step(server: Server) -> None:
    answers: Queue[Any] = Queue()
    with tritongrpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        texts = tensor("text", np.array([b"abc"], object), "BYTES")
        client.async_stream_infer("letters", [texts], parameters={"stream": True})
        got = [answers.get(timeout=WAIT_S)[0] for _ in range(4)]
        client.stop_stream()
    assert [int(result.as_numpy("codes")) for result in got[:3]] == [98, 99, 100]
    assert got[3].get_response().parameters["triton_final_response"].bool_param


def test_a_stream_that_is_left_frees_its_request(server: Server) -> None:
    answers: Queue[Any] = Queue()
    with tritongrpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        first = tensor("first", np.array([4]), "INT64")
        client.async_stream_infer("count", [first], parameters={"stream": True})
        assert answers.get(timeout=WAIT_S)[1] is None
        client.stop_stream(cancel_requests=True)
    until(lambda: server.unfinished() == 0, "the stream is given up", 10.0)
