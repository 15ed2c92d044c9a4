"""The Open Inference Protocol over gRPC, by a client that we did not write."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from tests.serve.helpers import Server, start
from tests.serve.test_oip import X, expected
from tests.serve.test_watching import samples
from tests.steps import HOLD, HOLD_LONG, RAISE, WIDTH
from tests.waiting import until

grpc = pytest.importorskip("grpc")
tritongrpc = pytest.importorskip("tritonclient.grpc")
service_pb2, service_pb2_grpc = tritongrpc.service_pb2, tritongrpc.service_pb2_grpc
WAIT_S = 30.0


@pytest.fixture(scope="module")
def client(server: Server):
    with tritongrpc.InferenceServerClient(server.grpc_address) as made:
        yield made


def tensor(name: str, array: np.ndarray, datatype: str = "FP32"):
    made = tritongrpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


@contextmanager
def stream_to(server: Server) -> Iterator[tuple[Any, Queue[Any]]]:
    """A client with a stream, and the responses that come from it, each with its error; it is cancelled at the end."""
    answers: Queue[Any] = Queue()
    with tritongrpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        yield client, answers
        client.stop_stream(cancel_requests=True)


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
        ("chain", X, {"parameters": {"schedule_by": 1}}, "DEADLINE_EXCEEDED"),
        ("kept", X, {"sequence_id": 991}, "FAILED_PRECONDITION"),
        ("chain", np.zeros((65_536, WIDTH), np.float32), {}, "OUT_OF_RANGE"),
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


def test_a_classification_that_nobody_makes_is_refused(client) -> None:
    wanted = [tritongrpc.InferRequestedOutput("last", class_count=2)]
    with pytest.raises(tritongrpc.InferenceServerException, match="'classification' is not supported") as caught:
        client.infer("chain", [tensor("x", X)], outputs=wanted)
    assert code_of(caught) == "INVALID_ARGUMENT"


def test_shared_memory_is_refused_by_its_name(client) -> None:
    given = tritongrpc.InferInput("x", [1, 2], "FP32")
    given.set_shared_memory("r", 8)
    with pytest.raises(tritongrpc.InferenceServerException, match=r"'shared_memory_region' is not supported \('r'\)"):
        client.infer("chain", [given])


def test_what_the_server_does_not_do_is_said_and_logged_by_nobody(client, server: Server) -> None:
    words = "SystemSharedMemoryStatus: this server does not do that"
    with pytest.raises(tritongrpc.InferenceServerException, match=words) as caught:
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


def test_requests_of_a_stream_run_side_by_side(server: Server) -> None:
    with stream_to(server) as (client, answers):
        for _ in range(8):
            client.async_stream_infer("count", [tensor("first", np.array([4]), "INT64")])
        until(lambda: server.unfinished() == 8, "all are under way")
        client.async_stream_infer("chain", [tensor("x", X)], request_id="the last")
        result, error = answers.get(timeout=WAIT_S)
        assert error is None and result.get_response().id == "the last"
    until(lambda: server.unfinished() == 0, "they are given up", 10.0)


def test_sequences_of_one_stream_keep_each_its_order(server: Server) -> None:
    outputs: dict[str, list[Any]] = {"a": [], "b": []}
    with stream_to(server) as (client, answers):
        for k in range(3):
            for id in outputs:
                options = {"sequence_id": id, "sequence_start": k == 0, "sequence_end": k == 2, "request_id": id}
                client.async_stream_infer("kept", [tensor("x", X[k : k + 1])], **options)
        for _ in range(6):
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            outputs[result.get_response().id].append(result.as_numpy("h"))
    for found in outputs.values():
        np.testing.assert_allclose(np.concatenate(found), expected(X))


def test_every_request_is_counted_by_its_status_and_a_stream_s_first_result_is_timed(client, server: Server) -> None:
    def counts() -> list[float]:
        found = samples(server)
        answered = found.get("cellrt_grpc_requests_total", {})
        keys = [("INVALID_ARGUMENT", "ModelInfer"), ("NOT_FOUND", "ModelStreamInfer"), ("OK", "ModelStreamInfer")]
        first = found.get("cellrt_time_to_first_result_seconds_count", {})
        return [
            *(answered.get((("code", code), ("handler", handler)), 0.0) for code, handler in keys),
            first.get((("model", "letters"),), 0.0),
        ]

    before = counts()
    with pytest.raises(tritongrpc.InferenceServerException):
        client.infer("chain", [tensor("x", X[:, :1])])
    with stream_to(server) as (streaming, answers):
        streaming.async_stream_infer("nobody", [tensor("x", X)])
        texts = tensor("text", np.array([b"abc"], object), "BYTES")
        streaming.async_stream_infer("letters", [texts], parameters={"stream": True})
        for _ in range(5):
            answers.get(timeout=WAIT_S)
        until(lambda: [now - then for now, then in zip(counts(), before)] == [1, 1, 1, 1], "all are counted", 10.0)


LIMITS = """
[limits]
max_streams = 1
max_streams_per_connection = 2
"""


@pytest.mark.slow
def test_limits_of_streams_hold_and_are_named_and_single_requests_have_none(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(LIMITS)
    first = tensor("first", np.array([4]), "INT64")
    with start("count", "chain", options=["--config", str(path), "--grpc-port", "0"]) as server:
        with stream_to(server) as (client, _):
            for _ in range(4):
                client.async_stream_infer("count", [first])
            until(lambda: server.unfinished() == 2, "as many as may be are under way")
            with stream_to(server) as (_, refused):
                assert "max_streams" in str(refused.get(timeout=WAIT_S)[1])
            assert client.infer("chain", [tensor("x", X)]).as_numpy("every").shape == X.shape
            assert server.unfinished() == 2
        until(lambda: server.unfinished() == 0, "they are given up")


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


def test_every_response_of_a_stream_says_whether_it_is_the_last_of_its_request(server: Server) -> None:
    texts = tensor("text", np.array([b"ab"], object), "BYTES")
    for is_asked in (True, False):
        for given, lasts in (({"stream": True}, [False, False, True]), ({}, [True])):
            with stream_to(server) as (client, answers):
                asked = {"enable_empty_final_response": is_asked, "request_id": "7"}
                client.async_stream_infer("letters", [texts], parameters=given, **asked)
                got = [answers.get(timeout=WAIT_S)[0].get_response() for _ in lasts]
            assert [each.parameters["triton_final_response"].bool_param for each in got] == lasts
            assert {each.id for each in got} == {"7"}


def test_an_error_in_a_stream_is_its_request_s_last_response(server: Server) -> None:
    given = [service_pb2.ModelInferRequest(model_name="nobody", id="9")]
    with grpc.insecure_channel(server.grpc_address) as channel:
        (told,) = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(given), timeout=WAIT_S)
    about = told.infer_response
    assert "nobody" in told.error_message and (about.id, about.model_name) == ("9", "nobody")
    assert about.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("names", [("last", "every"), ("every", "last"), ("last",)])
def test_outputs_come_in_the_order_in_which_they_were_asked_for(client, names: tuple[str, ...]) -> None:
    wanted = [tritongrpc.InferRequestedOutput(name) for name in names]
    result = client.infer("chain", [tensor("x", X)], outputs=wanted)
    assert tuple(output.name for output in result.get_response().outputs) == names
    np.testing.assert_allclose(result.as_numpy("last"), expected(X)[-1])


def test_a_parameter_that_nobody_knows_is_refused_by_name(client) -> None:
    with pytest.raises(tritongrpc.InferenceServerException, match="got .'max_tokens'.") as caught:
        client.infer("chain", [tensor("x", X)], parameters={"max_tokens": 2})
    assert code_of(caught) == "INVALID_ARGUMENT"


def test_a_client_may_ping_as_often_as_it_likes(server: Server) -> None:
    options = tritongrpc.KeepAliveOptions(
        keepalive_time_ms=1000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
    )
    slow = np.full((25, WIDTH), HOLD_LONG, np.float32)  # by default the server cuts it off after four seconds
    with tritongrpc.InferenceServerClient(server.grpc_address, keepalive_options=options) as client:
        assert client.infer("chain", [tensor("x", slow)]).as_numpy("last") is not None


def test_a_session_that_goes_on_with_old_weights_is_answered_with_their_version(server: Server, client) -> None:
    inputs = [tensor("x", np.ones((1, 1), np.float32))]
    (old,) = client.get_model_metadata("summed").versions
    begun = client.infer("summed", inputs, sequence_id="grpc", sequence_start=True).get_response()
    client.load_model("summed")
    after = client.infer("summed", inputs, sequence_id="grpc").get_response()
    with stream_to(server) as (streaming, answers):
        streaming.async_stream_infer("summed", inputs, sequence_id="grpc", parameters={"stream": True})
        streamed = [answers.get(timeout=WAIT_S)[0].get_response() for _ in range(2)]
    last = client.infer("summed", inputs, sequence_id="grpc", sequence_end=True).get_response()
    assert [each.model_version for each in (begun, after, *streamed, last)] == [old] * 5
    assert client.infer("summed", inputs).get_response().model_version == str(int(old) + 1)


def test_streams_that_are_left_free_their_requests_without_a_word(server: Server) -> None:
    for _ in range(24):  # gRPC cancels the handler now before a response is written, now behind that
        with stream_to(server) as (client, answers):
            first = tensor("first", np.array([4]), "INT64")
            client.async_stream_infer("count", [first], parameters={"stream": True})
            assert answers.get(timeout=WAIT_S)[1] is None
    until(lambda: server.unfinished() == 0, "the streams are given up", 10.0)
    assert not any("gRPC" in line for line in server.lines if "serving" not in line)
