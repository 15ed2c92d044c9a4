"""The Open Inference Protocol over gRPC, with the messages that Triton publishes (package ``inference``).

``ModelStreamInfer`` answers the requests of a stream concurrently, each as soon as it is done, those of one sequence in
turn. Each response has ``triton_final_response``, true for the last of its request: a request with the parameter
``stream`` gets one for each step, and a last one that is empty.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2_grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

import cellrt
from cellrt.engine.future import Result
from cellrt.errors import DefinitionError, RequestError, UnknownModelError
from cellrt.serve import oip
from cellrt.serve.arrays import BYTES, DATATYPE_OF, DATATYPES, from_lists, to_bytes
from cellrt.serve.described import Described, TensorInfo
from cellrt.serve.forms import too_large
from cellrt.serve.grpc_access import AccessInterceptor, Calls, Context, Message
from cellrt.serve.grpc_health import HealthHandlers
from cellrt.serve.grpc_stream import FINAL, GrpcStream, value_of
from cellrt.serve.http_oip import EXTENSIONS
from cellrt.serve.inference import InferenceService, never_gone
from cellrt.serve.keys import Keys
from cellrt.serve.model_statistics import model_statistics

FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8",), "uint_contents"),
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}

PINGS = (("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_ping_strikes", 0))
"""Options that let clients ping as often as they like, with or without calls; else two pings too many cut them off."""
STREAM_PARAMETERS = ("stream", "triton_enable_empty_final_response")
"""Parameters that a request of a stream may have beside ``oip.PARAMETERS``."""


class GrpcHandlers(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The handlers, by the protocol's names. ``service``: submits requests."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._backend = service, service.backend
        self._limits = service.backend.settings.limits

    async def ServerLive(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return that this front end answers."""
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return whether every model that is loaded can be served."""
        return service_pb2.ServerReadyResponse(ready=self._backend.is_ready)

    async def ServerMetadata(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return the server's name, version and extensions."""
        return service_pb2.ServerMetadataResponse(name="cellrt", version=cellrt.__version__, extensions=EXTENSIONS)

    async def ModelReady(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return whether a model takes requests."""
        try:
            await self._backend.model(request.name, request.version)
        except (UnknownModelError, DefinitionError):
            return service_pb2.ModelReadyResponse(ready=False)
        return service_pb2.ModelReadyResponse(ready=self._backend.takes_requests)

    async def ModelMetadata(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return a model's inputs and outputs."""
        described = await self._backend.model(request.name, request.version)
        metadata = service_pb2.ModelMetadataResponse.TensorMetadata
        return service_pb2.ModelMetadataResponse(
            name=described.name,
            versions=[described.version],
            platform="cellrt",
            inputs=[metadata(**each.info.metadata()) for each in described.inputs.values()],
            outputs=[metadata(**info.metadata()) for info in described.outputs],
        )

    async def ModelConfig(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return a model's inputs and outputs as Triton's configuration."""
        described = await self._backend.model(request.name, request.version)

        def as_config(kind: Any, info: TensorInfo, **more: bool) -> Message:
            name = "STRING" if info.datatype == BYTES else info.datatype
            datatype = model_config_pb2.DataType.Value(f"TYPE_{name}")
            return kind(name=info.name, data_type=datatype, dims=info.shape, **more)

        config = model_config_pb2.ModelConfig(
            name=described.name,
            backend="cellrt",
            input=[
                as_config(model_config_pb2.ModelInput, each.info, optional=each.is_optional)
                for each in described.inputs.values()
            ],
            output=[as_config(model_config_pb2.ModelOutput, info) for info in described.outputs],
        )
        if described.keeps_state:
            config.sequence_batching.SetInParent()
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return counts of a model, or of all."""
        counts = await self._backend.call("statistics")
        versions = {entry["name"]: str(entry["version"]) for entry in await self._backend.call("models")}
        if request.name:
            await self._backend.model(request.name, request.version)
        names = [request.name] if request.name else [name for name in counts["models"] if name in versions]
        response = service_pb2.ModelStatisticsResponse()
        for name in names:
            last_ms = self._service.measures.last_inference_ms(name)
            given = model_statistics(name, versions[name], counts["models"][name], last_ms)
            spent = {part: service_pb2.StatisticDuration(**each) for part, each in given["inference_stats"].items()}
            del given["inference_stats"], given["batch_stats"]
            response.model_stats.add(**given, inference_stats=service_pb2.InferStatistics(**spent))
        return response

    async def RepositoryIndex(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return all models that the operator named."""
        response = service_pb2.RepositoryIndexResponse()
        for entry in await self._backend.call("models"):
            reason = self._backend.why_unserved(entry["name"]) if entry["is_loaded"] else "unloaded"
            if not reason or not request.ready:
                state, version = "UNAVAILABLE" if reason else "READY", str(entry["version"])
                response.models.add(name=entry["name"], version=version, state=state, reason=reason)
        return response

    async def RepositoryModelLoad(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Register a model of the index anew."""
        if request.parameters:
            raise RequestError("models come from where the operator said: no config and no files are taken")
        await self._backend.load(request.model_name)
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Remove a model."""
        await self._backend.unload(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Return the answer to a request of tensors."""
        described, given, how = await self._read(request)
        left_s = context.time_remaining()
        if left_s is not None and (how.deadline is None or left_s < how.deadline):
            how = how._replace(deadline=max(left_s, 1e-6))
        results, version, _ = await self._service.infer(described, given, how, never_gone)
        return _response(version, request, results)

    async def ModelStreamInfer(self, requests: AsyncIterator[Message], context: Context) -> None:  # noqa: N802
        """Answer a stream of requests; an error is a response, and the stream goes on."""
        with self._service.place_of_stream():
            await GrpcStream(self._service, self._answer, "ModelStreamInfer", context).run(requests)

    async def _answer(self, request: Message) -> AsyncGenerator[Message, None]:
        """Yield the responses to a request of a stream."""
        described, given, how = await self._read(request, STREAM_PARAMETERS)
        if not request.parameters["stream"].bool_param:
            results, version, _ = await self._service.infer(described, given, how, never_gone)
            yield _response(version, request, results, is_last=True)
            return
        note_first = self._service.measures.first_result_of(described.name)
        async with self._service.stream(described, given, how) as (stream, version):
            async for step in stream:
                note_first()
                yield _response(version, request, step, is_last=False)
        yield _response(version, request, {}, is_last=True)

    async def _read(self, request: Message, others: Collection[str] = ()) -> tuple[Described, Any, oip.Parameters]:
        """Return a request's model, the request for its unfolder, and its parameters.

        ``others``: parameters that it may have beside ``oip.PARAMETERS``.
        """
        described = await self._backend.model(request.model_name, request.model_version)
        raw, tensors = list(request.raw_input_contents), {}
        for kind, given in [*(("input", one) for one in request.inputs), *(("output", one) for one in request.outputs)]:
            oip.check_supported(_values(given.parameters), f"{kind} {given.name!r}")
        if raw and len(raw) != len(request.inputs):
            raise RequestError(f"{len(request.inputs)} inputs came with {len(raw)} raw contents")
        for place, given in enumerate(request.inputs):
            known = described.inputs.get(given.name)
            if known is None or given.datatype != known.info.datatype:
                wanted = {name: each.info.datatype for name, each in described.inputs.items()}
                raise RequestError(f"expected inputs {wanted}, got {given.name!r:.80} of {given.datatype!r:.40}")
            data = raw[place] if raw else None
            tensors[given.name] = _tensor(given, known.info, data, self._limits.max_items)
        if len(tensors) != len(request.inputs):
            raise RequestError("the request has two inputs of one name")
        oip.check_outputs(described, [output.name for output in request.outputs])
        return described, described.read_tensors(tensors), oip.read_parameters(_values(request.parameters), others)


def _values(parameters: Message) -> dict[str, Any]:
    return {name: value_of(each) for name, each in parameters.items()}


def _tensor(given: Message, info: TensorInfo, raw: bytes | None, max_items: int) -> Any:
    """Return the tensor, or list of bytes, of an input. ``max_items``: the limit of an input that is not raw."""
    shape = list(given.shape)
    if raw is not None:
        return oip.from_raw(raw, shape, info)
    where = f"input {info.name!r}"
    field = FIELDS.get(info.datatype)
    if field is None:
        raise RequestError(f"{where}: {info.datatype} goes as raw contents only")
    values = getattr(given.contents, field)
    if len(values) != oip.count_of(shape, where):
        raise RequestError(f"{where}: expected as many values as shape {shape} has, got {len(values)}")
    if len(values) > max_items:
        raise too_large(f"{max_items} values", "max_items", f"{len(values)}; raw contents may be more", where)
    values = list(values)
    return values if info.datatype == BYTES else from_lists(values, DATATYPES[info.datatype], where).reshape(shape)


def _response(version: str, request: Message, results: Result, *, is_last: bool | None = None) -> Message:
    """Return a response with the requested results, in that order. ``is_last``: of a stream."""
    response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version=version, id=request.id)
    for name in dict.fromkeys(output.name for output in request.outputs) or results:
        if name in results:  # a step has not all of them
            tensor = results[name]
            response.outputs.add(name=name, datatype=DATATYPE_OF[tensor.dtype], shape=list(np.shape(tensor)))
            response.raw_output_contents.append(to_bytes(tensor))
    if is_last is not None:
        response.parameters[FINAL].bool_param = is_last
    return response


async def open_grpc(service: InferenceService, port: int, calls: Calls) -> grpc.aio.Server:
    """Start a gRPC server at a port, which front ends share. ``calls``: see ``AccessInterceptor``."""
    settings = service.backend.settings
    most = settings.limits.max_body_bytes
    server = grpc.aio.server(
        interceptors=[AccessInterceptor(Keys(settings.api_keys), service.measures, calls)],
        options=[("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 1), *PINGS],
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcHandlers(service), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthHandlers(service), server)
    server.add_insecure_port(settings.at(port))
    await server.start()
    return server
