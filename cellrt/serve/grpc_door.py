"""The Open Inference Protocol over gRPC, with the messages that Triton publishes (package ``inference``).

``ModelStreamInfer`` answers each request of a stream in turn; one with the parameter ``stream`` gets a response for
each step, and a last one that is empty and has ``triton_final_response``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

import cellrt
from cellrt.engine.future import Result
from cellrt.errors import CellrtError, DefinitionError, InternalError, RequestError, UnknownModelError, http_status
from cellrt.serve import oip
from cellrt.serve.arrays import BYTES, DATATYPES, NAMES, array_of, to_bytes
from cellrt.serve.described import Described, TensorInfo
from cellrt.serve.door import Door
from cellrt.serve.http_oip import EXTENSIONS
from cellrt.serve.keys import Keys
from cellrt.serve.model_statistics import model_statistics

log = logging.getLogger("cellrt")
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    410: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.OUT_OF_RANGE,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Of our HTTP statuses; others are INTERNAL."""
FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8",), "uint_contents"),
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
Context = Any
Message = Any


class GrpcDoor(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The handlers, by the names that the protocol has for them. ``door``: where requests go."""

    def __init__(self, door: Door) -> None:
        self._door, self._backend = door, door.backend
        self._limits = door.backend.settings.limits

    async def ServerLive(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Whether this front end answers."""
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Whether every model that is loaded can be served."""
        return service_pb2.ServerReadyResponse(ready=self._backend.is_ready)

    async def ServerMetadata(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Who serves."""
        return service_pb2.ServerMetadataResponse(name="cellrt", version=cellrt.__version__, extensions=EXTENSIONS)

    async def ModelReady(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Whether a model takes requests."""
        try:
            await self._backend.model(request.name, request.version)
        except (UnknownModelError, DefinitionError):
            return service_pb2.ModelReadyResponse(ready=False)
        return service_pb2.ModelReadyResponse(ready=self._backend.takes_requests)

    async def ModelMetadata(self, request: Message, context: Context) -> Message:  # noqa: N802
        """A model's inputs and outputs."""
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
        """The same in the words of Triton's configuration."""
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
        """Counts of a model, or of all."""
        counts = await self._backend.call("statistics")
        versions = {entry["name"]: str(entry["version"]) for entry in await self._backend.call("models")}
        if request.name:
            await self._backend.model(request.name, request.version)
        names = [request.name] if request.name else [name for name in counts["models"] if name in versions]
        response = service_pb2.ModelStatisticsResponse()
        for name in names:
            last_ms = self._door.measures.last_inference_ms(name)
            given = model_statistics(name, versions[name], counts["models"][name], last_ms)
            spent = {part: service_pb2.StatisticDuration(**each) for part, each in given["inference_stats"].items()}
            del given["inference_stats"], given["batch_stats"]
            response.model_stats.add(**given, inference_stats=service_pb2.InferStatistics(**spent))
        return response

    async def RepositoryIndex(self, request: Message, context: Context) -> Message:  # noqa: N802
        """All models that the operator named."""
        response = service_pb2.RepositoryIndexResponse()
        for entry in await self._backend.call("models"):
            reason = self._backend.why_unserved(entry["name"]) if entry["is_loaded"] else "unloaded"
            if not reason or not request.ready:
                state, version = "UNAVAILABLE" if reason else "READY", str(entry["version"])
                response.models.add(name=entry["name"], version=version, state=state, reason=reason)
        return response

    async def RepositoryModelLoad(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Registers a model of the index anew."""
        if request.parameters:
            raise RequestError("models come from where the operator said: no config and no files are taken")
        await self._backend.call("load", request.model_name)
        await self._backend.model(request.model_name)
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Message, context: Context) -> Message:  # noqa: N802
        """Takes a model out."""
        await self._backend.call("unregister", request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: Message, context: Context) -> Message:  # noqa: N802
        """A request as tensors."""
        described, given, how = await self._read(request)
        left_s = context.time_remaining()
        if left_s is not None and (how.deadline is None or left_s < how.deadline):
            how = how._replace(deadline=max(left_s, 1e-6))
        results, _ = await self._door.infer(described, given, how, _never_gone)
        return _response(described, request, results)

    async def ModelStreamInfer(self, requests: AsyncIterator[Message], context: Context) -> AsyncIterator[Message]:  # noqa: N802
        """A stream of requests; an error is a response, and the stream goes on."""
        async for request in requests:
            try:
                described, given, how = await self._read(request)
                if not request.parameters["stream"].bool_param:
                    results, _ = await self._door.infer(described, given, how, _never_gone)
                    yield service_pb2.ModelStreamInferResponse(infer_response=_response(described, request, results))
                    continue
                async with self._door.stream(described, given, how) as stream:
                    async for step in stream:
                        response = _response(described, request, step)
                        yield service_pb2.ModelStreamInferResponse(infer_response=response)
                last = _response(described, request, {})
                last.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=last)
            except Exception as error:
                told = service_pb2.ModelStreamInferResponse(error_message=str(_ours(error)))
                told.infer_response.id = request.id
                yield told

    async def _read(self, request: Message) -> tuple[Described, Any, oip.Parameters]:
        """A request: for which model, what its unfolder takes, and how it is to be run."""
        described = await self._backend.model(request.model_name, request.model_version)
        raw, tensors = list(request.raw_input_contents), {}
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
        parameters = {name: _value(each) for name, each in request.parameters.items()}
        oip.check_supported(parameters, *({n: _value(p) for n, p in one.parameters.items()} for one in request.inputs))
        oip.check_outputs(described, [output.name for output in request.outputs])
        return described, described.read_tensors(tensors), oip.read_parameters(parameters)


def _tensor(given: Message, info: TensorInfo, raw: bytes | None, max_items: int) -> Any:
    """The tensor, or list of bytes, of an input; ``max_items``: of one that is not raw."""
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
        raise RequestError(f"{where}: expected at most {max_items} values, got {len(values)}; raw contents may be more")
    values = list(values)
    return values if info.datatype == BYTES else array_of(values, DATATYPES[info.datatype], where).reshape(shape)


def _value(parameter: Message) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _response(described: Described, request: Message, results: Result) -> Message:
    response = service_pb2.ModelInferResponse(model_name=described.name, model_version=described.version, id=request.id)
    wanted = [output.name for output in request.outputs]
    for name, tensor in results.items():
        if not wanted or name in wanted:
            response.outputs.add(name=name, datatype=NAMES[tensor.dtype], shape=list(np.shape(tensor)))
            response.raw_output_contents.append(to_bytes(tensor))
    return response


def _ours(error: Exception) -> CellrtError:
    """The error, or what a client is told instead of one that nobody expected."""
    if isinstance(error, CellrtError):
        return error
    log.error("an error of the gRPC door", exc_info=error)
    return InternalError("an error of the server; its log has it")


async def _never_gone() -> None:
    """gRPC cancels the handler when its client goes."""
    await asyncio.get_running_loop().create_future()


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Keys, and errors as statuses."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Wraps the handler of a call."""
        handler = await continuation(details)
        if handler is None:
            return None
        is_open = details.method.endswith(("/ServerLive", "/ServerReady"))
        knows = is_open or self._keys.came_with(dict(details.invocation_metadata))
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=_with_status(handler.unary_unary, knows))
        return handler if knows else handler._replace(stream_stream=_refused_stream)


def _with_status(handle: Callable[[Message, Context], Awaitable[Message]], knows: bool) -> Any:
    async def answer(request: Message, context: Context) -> Message:
        if not knows:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a key is needed: authorization, or x-api-key")
        try:
            return await handle(request, context)
        except NotImplementedError:  # of the protocol's classes; gRPC would log a traceback for each call
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not do that")
        except Exception as error:
            ours = _ours(error)
            await context.abort(CODES.get(http_status(ours), grpc.StatusCode.INTERNAL), str(ours))

    return answer


async def _refused_stream(_: Any, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a key is needed: authorization, or x-api-key")


async def open_grpc(door: Door, port: int) -> grpc.aio.Server:
    """Takes gRPC at a port, which front ends share."""
    settings = door.backend.settings
    most = settings.limits.max_body_bytes
    server = grpc.aio.server(
        interceptors=[_Guard(Keys(settings.api_keys))],
        options=[("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 1)],
        maximum_concurrent_rpcs=settings.limits.max_streams,
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcDoor(door), server)
    server.add_insecure_port(settings.at(port))
    await server.start()
    return server
