"""The Open Inference Protocol over HTTP: ``/v2`` with health, metadata, ``infer``, ``stats``, ``generate``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import cellrt
from cellrt.errors import DefinitionError, RequestError, UnknownModelError
from cellrt.serve import oip
from cellrt.serve.described import Described
from cellrt.serve.forms import checked
from cellrt.serve.http import REQUEST_ID, EventStream, gone, json_response, read_body
from cellrt.serve.inference import InferenceService
from cellrt.serve.model_statistics import model_statistics

EXTENSIONS = (
    "binary_tensor_data",
    "generate",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "sequence",
    "statistics",
)
NS = 1e9
_objects = msgspec.json.Decoder(dict[str, Any])
_index_requests = msgspec.json.Decoder(oip.IndexRequest)
_load_requests = msgspec.json.Decoder(oip.LoadRequest)


class OipHandlers:
    """The handlers of ``/v2``, which submit requests to ``service``."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._backend = service, service.backend
        self._limits = service.backend.settings.limits

    def routes(self) -> list[BaseRoute]:
        """Return the routes of all handlers."""
        made: list[BaseRoute] = [Route("/v2/models/stats", self.stats)]  # first: no model "stats" hides it
        for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            made += [
                Route(f"{base}/infer", self.infer, methods=["POST"]),
                Route(f"{base}/generate", self.generate, methods=["POST"]),
                Route(f"{base}/generate_stream", self.generate_stream, methods=["POST"]),
                Route(base, self.metadata),
                Route(f"{base}/ready", self.model_ready),
                Route(f"{base}/config", self.config),
                Route(f"{base}/stats", self.stats),
            ]
        return [
            *made,
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self.load, methods=["POST"]),
            Route("/v2/repository/models/{model}/unload", self.unload, methods=["POST"]),
        ]

    async def infer(self, request: Request) -> Response:
        """Return the answer to a request of tensors."""
        body = await read_body(request, self._limits.max_body_bytes)
        described = await self._described(request)
        inference = oip.read_request(described, body, request.headers.get(oip.HEADER_LENGTH))
        how = inference.parameters
        results, version, id = await self._service.infer(described, inference.request, how, gone(request))
        content, json_size = oip.write_response(described.name, version, inference, results)
        headers = {REQUEST_ID: id} if id else {}
        if json_size is None:
            return Response(content, 200, headers, "application/json")
        headers[oip.HEADER_LENGTH] = str(json_size)
        return Response(content, 200, headers, "application/octet-stream")

    async def generate(self, request: Request) -> Response:
        """Return the outputs by name, for a request that is one object of input names and values."""
        described, given, how, id = await self._read_generate(request)
        results, version, trace_id = await self._service.infer(described, given, how, gone(request))
        answer = {**_head(described.name, version, id), **oip.as_json(results)}
        return json_response(answer, request_id=trace_id)

    async def generate_stream(self, request: Request) -> Response:
        """Return the answer of ``generate`` as an event for each step."""
        described, given, how, id = await self._read_generate(request)

        async def events() -> AsyncIterator[bytes]:
            begin_s, is_first = time.perf_counter(), True
            async with self._service.stream(described, given, how) as (stream, version):
                async for step in stream:
                    if is_first:
                        is_first = False
                        self._service.measures.first_result.labels(described.name).observe(
                            time.perf_counter() - begin_s
                        )
                    yield oip.encode({**_head(described.name, version, id), **oip.as_json(step)})

        return EventStream(events(), self._limits.write_timeout_s, {})

    async def _read_generate(self, request: Request) -> tuple[Described, Any, oip.Parameters, str]:
        body = await read_body(request, self._limits.max_body_bytes)
        described = await self._described(request)
        given = checked(oip.decode(body, _objects, self._limits), self._limits)
        own = described.inputs  # an input may be named as a field of the protocol: then it is the input
        parameters = given.pop("parameters", {}) if "parameters" not in own else {}
        id = given.pop("id", "") if "id" not in own else ""
        if not isinstance(parameters, dict) or not isinstance(id, str):
            raise RequestError("expected parameters as an object, and id as a text")
        for name, meant in oip.inputs_among(parameters, own).items():
            if meant in given:
                raise RequestError(f"parameter {name!r}: the input {meant!r} has come already")
            given[meant] = parameters.pop(name)
        tensors = {
            name: oip.as_tensor(own[name].info.datatype, value, f"input {name!r}")
            for name, value in given.items()
            if name in own
        }
        if len(tensors) != len(given):
            raise RequestError(f"model {described.name!r}: expected {list(own)}, got {list(given)!r:.200}")
        return described, described.read_tensors(tensors), oip.read_parameters(parameters), id

    async def _described(self, request: Request) -> Described:
        return await self._backend.model(request.path_params["model"], request.path_params.get("version"))

    async def server(self, request: Request) -> Response:
        """Return the server's name, version and extensions."""
        return json_response({"name": "cellrt", "version": cellrt.__version__, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        """Return that this front end is alive."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Return whether every model that is loaded can be served."""
        return json_response({"ready": self._backend.is_ready}, 200 if self._backend.is_ready else 503)

    async def metadata(self, request: Request) -> Response:
        """Return a model's inputs and outputs."""
        described = await self._described(request)
        return json_response(
            {
                "name": described.name,
                "versions": [described.version],
                "platform": "cellrt",
                "inputs": [each.info.metadata() for each in described.inputs.values()],
                "outputs": [info.metadata() for info in described.outputs],
            }
        )

    async def config(self, request: Request) -> Response:
        """Return a model's inputs and outputs as Triton's configuration, for Triton's clients."""
        described = await self._described(request)

        def as_config(info: Any) -> dict[str, Any]:
            datatype = "STRING" if info.datatype == "BYTES" else info.datatype
            return {"name": info.name, "data_type": f"TYPE_{datatype}", "dims": list(info.shape)}

        config: dict[str, Any] = {
            "name": described.name,
            "backend": "cellrt",
            "max_batch_size": 0,
            "input": [
                {**as_config(each.info), **({"optional": True} if each.is_optional else {})}
                for each in described.inputs.values()
            ],
            "output": [as_config(info) for info in described.outputs],
        }
        if described.keeps_state:
            config["sequence_batching"] = {}
        return json_response(config)

    async def model_ready(self, request: Request) -> Response:
        """Return whether a model takes requests."""
        is_ready = self._backend.takes_requests
        try:
            await self._described(request)
        except DefinitionError:
            is_ready = False
        return json_response({"name": request.path_params["model"], "ready": is_ready}, 200 if is_ready else 503)

    async def stats(self, request: Request) -> Response:
        """Return counts of a model, or of all, in Triton's form."""
        name = request.path_params.get("model")
        if name is not None:
            await self._described(request)
        counts = await self._backend.call("statistics")
        versions = {entry["name"]: str(entry["version"]) for entry in await self._backend.call("models")}
        names = [name] if name is not None else [each for each in counts["models"] if each in versions]
        last_ms = self._service.measures.last_inference_ms
        stats = [model_statistics(each, versions[each], counts["models"][each], last_ms(each)) for each in names]
        return json_response({"model_stats": stats})

    async def index(self, request: Request) -> Response:
        """Return all models that ``cellrt serve`` was given, loaded or not."""
        body = await read_body(request, self._limits.max_body_bytes)
        only_ready = oip.decode(body, _index_requests, self._limits).ready if body else False
        entries = await self._backend.call("models")
        told = [_entry(entry, self._backend.why_unserved(entry["name"])) for entry in entries]
        return json_response([each for each in told if each["state"] == "READY" or not only_ready])

    async def load(self, request: Request) -> Response:
        """Load a model of the index again, from the place that ``cellrt serve`` was given. Requests go on meanwhile."""
        body = await read_body(request, self._limits.max_body_bytes)
        if body and _overrides(oip.decode(body, _load_requests, self._limits).parameters):
            raise RequestError("models come from where the operator said: no config and no files are taken")
        await self._backend.load(request.path_params["model"])
        return json_response({})

    async def unload(self, request: Request) -> Response:
        """Remove a model after its earlier requests have ended."""
        name = request.path_params["model"]
        if name not in {entry["name"] for entry in await self._backend.call("models")}:
            raise UnknownModelError(f"model {name!r} is not in the index")
        await self._backend.unload(name)
        return json_response({})


def _overrides(parameters: Mapping[str, Any]) -> bool:
    return any(name == "config" or name.startswith("file:") for name in parameters)


def _head(name: str, version: str, id: str) -> dict[str, str]:
    return {"model_name": name, "model_version": version, **({"id": id} if id else {})}


def _entry(entry: Mapping[str, Any], why_unserved: str) -> dict[str, Any]:
    reason = why_unserved if entry["is_loaded"] else "unloaded"
    state = "UNAVAILABLE" if reason else "READY"
    return {"name": entry["name"], "version": str(entry["version"]), "state": state, "reason": reason}
