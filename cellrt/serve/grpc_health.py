"""The standard health service of gRPC (package ``grpc.health.v1``), for Kubernetes and load balancers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cellrt.errors import EngineClosedError, UnknownModelError
from cellrt.serve.grpc_access import Context, Message
from cellrt.serve.inference import InferenceService

LIVENESS = "liveness"
READINESS = ("", "readiness", "inference.GRPCInferenceService")
"""Names of services: one for whether this front end answers, others for whether every loaded model can be served."""
LOOK_EVERY_S = 0.5
"""The seconds between two checks for clients that watch."""


class HealthHandlers(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The handlers, by the protocol's names. ``service``: the server whose health is reported."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def Check(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return the health of a service. Raise UnknownModelError for one that is not here."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            known = [LIVENESS, *READINESS]
            raise UnknownModelError(f"service: expected one of {known}, got {request.service!r:.80}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Message, context: Context) -> None:  # noqa: N802
        """Send the health of a service, and again whenever it changes, until the server ends."""
        told = None
        with self._service.place_of_stream():
            while True:
                is_last = self._service.draining.is_set()
                status = self._status(request.service)
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                if is_last:
                    raise EngineClosedError("the server is about to end")
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._service.draining.wait()

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return int(health_pb2.HealthCheckResponse.SERVING)
        if service not in READINESS:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        response = health_pb2.HealthCheckResponse
        return int(response.SERVING if self._service.backend.is_ready else response.NOT_SERVING)
