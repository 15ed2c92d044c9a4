"""gRPC's own health service, by the client that its package brings, as Kubernetes asks it: without a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.serve.helpers import KEY, Server, start

grpc = pytest.importorskip("grpc")
health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
WAIT_S = 30.0
SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.ServingStatus.Value(name) for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
)


@pytest.fixture(scope="module")
def stub(guarded_server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(guarded_server.grpc_address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


def set_loaded(server: Server, way: str) -> None:
    assert server.post(f"/v2/repository/models/chain/{way}", headers=KEY).status_code == 200


@pytest.mark.parametrize("service", ["", "readiness", "inference.GRPCInferenceService"])
def test_health_is_readiness_and_whoever_watches_hears_of_it(guarded_server: Server, stub: Any, service: str) -> None:
    assert stub.Check(asked(service), timeout=WAIT_S).status == SERVING
    watching = stub.Watch(asked(service), timeout=WAIT_S)
    assert next(watching).status == SERVING
    set_loaded(guarded_server, "unload")
    assert next(watching).status == NOT_SERVING
    assert stub.Check(asked(service), timeout=WAIT_S).status == NOT_SERVING
    assert stub.Check(asked("liveness"), timeout=WAIT_S).status == SERVING
    set_loaded(guarded_server, "load")
    assert next(watching).status == SERVING
    watching.cancel()


def test_a_service_that_is_not_here_is_unknown(stub: Any) -> None:
    with pytest.raises(grpc.RpcError, match="expected one of") as caught:
        stub.Check(asked("nobody"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watching = stub.Watch(asked("nobody"), timeout=WAIT_S)
    assert next(watching).status == UNKNOWN
    watching.cancel()


@pytest.mark.slow
def test_who_watches_hears_that_the_server_ends_and_does_not_delay_it() -> None:
    with ExitStack() as stack, start("chain", options=["--grpc-port", "0", "--drain-s", "60"]) as server:
        channel = stack.enter_context(grpc.insecure_channel(server.grpc_address))
        watching = health_pb2_grpc.HealthStub(channel).Watch(asked(""), timeout=WAIT_S)
        assert next(watching).status == SERVING
        server.process.terminate()
        assert next(watching).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(watching)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(WAIT_S) == 0
