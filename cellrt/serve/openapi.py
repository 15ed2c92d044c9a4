"""The server's OpenAPI 3.1 document, with each model's schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import quote

import msgspec

import cellrt
from cellrt.serve.described import Described, language_in
from cellrt.serve.http_native import NativeRequest
from cellrt.serve.oip import IndexRequest, InferRequest, LoadRequest
from cellrt.serve.openai_messages import ChatRequest, CompletionRequest, EmbeddingRequest

Schema = dict[str, Any]
OPENAI = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
}
"""Bodies of OpenAI's protocol, by path."""
MOST_SHOWN = 10_000
"""The most requests that ``/debug/timeline`` returns at once."""
DESCRIPTION = """
Bodies of requests may be compressed with gzip or deflate.

OpenAPI has no words for the websocket `/v1/models/{model}/session`: each text message is an object with `request`, as
`/v1/models/{model}/infer` takes it, and perhaps `deadline_s`, `schedule_by_s` and `priority`; a binary one is raw rows
of the one tensor that the model takes. Each is answered in order, with `number` and `results`, or `error` and `type`.
All are in one session if the model keeps state: that of the id that `?id=` has, or a new one.
"""
ERRORS = {
    "400": "the request is wrong",
    "401": "a key is needed",
    "403": "a page of another origin sent it",
    "404": "no such model or version",
    "410": "the session is not open",
    "413": "the request is too large",
    "415": "the body is encoded otherwise than gzip or deflate",
    "429": "too many requests: try again after Retry-After",
    "499": "the client was gone",
    "500": "a cell failed",
    "503": "the engine is not there, or is about to end",
    "504": "the deadline passed",
}


def document(models: Sequence[Described], *, has_keys: bool) -> Schema:
    """Return the whole document."""
    messages = [NativeRequest, InferRequest, IndexRequest, LoadRequest, *OPENAI.values()]
    components = msgspec.json.schema_components(messages, ref_template="#/components/schemas/{name}")[1]
    schemas: Schema = {**components, "Error": _ERROR, "Ready": _READY, "Parameters": _PARAMETERS}
    names = [model.name for model in models if language_in(model) is not None]
    for each in OPENAI.values() if names else ():
        schemas[each.__name__] = _with_field(schemas[each.__name__], "model", {"enum": names})
    paths: Schema = {}  # in this order they are shown: a model's own doors first
    for model in models:
        paths |= _tagged(_paths_of(model, schemas), model.name)
    if models:
        paths |= _tagged(_paths_of_versions(models), "versions")
    paths |= _tagged(_common_paths(), "server")  # of a model called stats, /v2/models/stats is not the metadata
    made: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "cellrt", "version": cellrt.__version__, "description": DESCRIPTION},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _tagged(paths: Schema, tag: str) -> Schema:
    """Return the paths with a tag, by which pages group them."""
    return {path: {way: {"tags": [tag], **what} for way, what in ways.items()} for path, ways in paths.items()}


def _common_paths() -> Schema:
    """Return the paths that belong to no model."""
    count = {"type": "integer", "minimum": 1, "maximum": MOST_SHOWN}
    model = _parameter("model", {"type": "string", "minLength": 1})
    index = {"$ref": "#/components/schemas/IndexRequest"}
    load = {"$ref": "#/components/schemas/LoadRequest"}
    repository = "/v2/repository/models/{model}"
    return {
        "/": _get("A page that shows what happens.", kind="text/html"),
        "/docs": _get("A page to try all this.", kind="text/html"),
        "/openapi.json": _get("This description.", "503"),
        "/metrics": _get("Counts, for Prometheus.", kind="text/plain"),
        "/debug/statistics": _get("Counts of the engine.", "503"),
        "/debug/timeline": _get(
            "The last requests and tasks, for Perfetto.", "400", "503", parameters=[_parameter("count", count, "query")]
        ),
        "/debug/requests/{id}": _get(
            "Which tasks a request was in, and what it waited for: of the id that x-cellrt-request has.",
            "400",
            "404",
            "503",
            parameters=[
                _parameter("id", {"type": "string", "minLength": 1}),
                _parameter("format", {"const": "trace"}, "query"),
            ],
        ),
        "/health": _get_ready("Whether every model that is loaded can be served."),
        "/v1/models": _get("The models.", "503"),
        "/v1/models/{model}": _get("A model.", "404", "503", parameters=[model]),
        "/v1/completions": _openai("What follows texts, by a language model.", "/v1/completions", streams="too"),
        "/v1/chat/completions": _openai("What an assistant says next.", "/v1/chat/completions", streams="too"),
        "/v1/embeddings": _openai("Embeddings of texts.", "/v1/embeddings"),
        "/v1/models/{model}/session": _get_websocket("Opens a websocket: see above.", parameters=[model]),
        "/v2": _get("What this server is."),
        "/v2/health/live": _get("Whether this front end answers."),
        "/v2/health/ready": _get_ready("Whether every model that is loaded can be served."),
        "/v2/models/stats": _get("Counts of all models.", "503"),
        "/v2/repository/index": _post("All models that the operator named.", index, {"type": "array"}, may_lack=True),
        f"{repository}/load": _post("Registers a model anew.", load, {}, may_lack=True, parameters=[model]),
        f"{repository}/unload": _post("Takes a model out.", None, {}, parameters=[model]),
    }


def _with_field(schema: Schema, name: str, field: Schema) -> Schema:
    """Return the schema of an object with one of its fields replaced."""
    return {**schema, "properties": {**schema["properties"], name: field}}


def _openai(summary: str, path: str, *, streams: Literal["no", "too"] = "no") -> Schema:
    """Return the entry of a path of OpenAI's protocol."""
    body = {"$ref": f"#/components/schemas/{OPENAI[path].__name__}"}
    return _post(summary, body, {"type": "object"}, streams=streams)


def _paths_of(model: Described, schemas: Schema) -> Schema:
    """Return the paths of one model; its request is added to the schemas."""
    name, place = model.name, quote(model.name, safe="")
    key = f"{place.replace('.', '%2E').replace('~', '%7E').replace('%', '.')}.Request"  # characters allowed in a key
    schemas[key] = _with_field(schemas["NativeRequest"], "request", model.request.schema())
    results = {"type": "object", "required": ["model", "version", "results"], "properties": _results(model)}
    generate: Schema = {
        "type": "object",
        "properties": {
            "parameters": {"$ref": "#/components/schemas/Parameters"},
            "id": {"type": "string"},
            **{each.info.name: {} for each in model.inputs.values()},  # which go before the protocol's
        },
        "required": [name for name, each in model.inputs.items() if not each.is_optional],
        "additionalProperties": False,
    }
    native = {"$ref": f"#/components/schemas/{key}"}
    infer = _post(f"Runs {name}.", native, results, streams="too")
    return {f"/v1/models/{place}/infer": infer, **_protocol_paths(f"/v2/models/{place}", name, generate, [])}


def _paths_of_versions(models: Sequence[Described]) -> Schema:
    """Return the paths that name a version, for all models: of each, only the newest takes requests."""
    names, versions = [model.name for model in models], sorted({model.version for model in models})
    parameters = [_parameter("model", {"enum": names}), _parameter("version", {"enum": versions})]
    base = "/v2/models/{model}/versions/{version}"
    return _protocol_paths(base, "that version of a model", {"type": "object"}, parameters)


def _protocol_paths(base: str, what: str, generate: Schema, parameters: Sequence[Schema]) -> Schema:
    """Return the paths of the Open Inference Protocol for a model or version. ``generate``: the body of that path."""
    tensors, made = {"$ref": "#/components/schemas/InferRequest"}, {"type": "object"}
    given: Any = {"parameters": parameters}
    errors = ("404", "500", "503")
    return {
        f"{base}/generate": _post(f"Runs {what} on values by name.", generate, made, **given),
        f"{base}/generate_stream": _post("As generate, an event a step.", generate, made, streams="only", **given),
        f"{base}/infer": _post(f"Runs {what} on tensors.", tensors, made, may_be_binary=True, **given),
        base: _get(f"Inputs and outputs of {what}.", *errors, **given),
        f"{base}/ready": _get_ready(f"Whether {what} takes requests.", "404", "500", **given),
        f"{base}/config": _get(f"The same of {what}, as Triton's configuration.", *errors, **given),
        f"{base}/stats": _get(f"Counts of {what}.", *errors, **given),
    }


def _results(model: Described) -> Schema:
    properties = {info.name: _values(info.datatype, info.shape) for info in model.outputs}
    results = {"type": "object", "properties": properties, "required": list(properties)}
    return {"model": {"const": model.name}, "version": {"type": "string"}, "results": results}


def _values(datatype: str, shape: Sequence[int]) -> Schema:
    kind = {"B": "boolean", "U": "integer", "I": "integer"}.get(datatype[0], "number")
    schema: Schema = {"type": "number" if datatype == "BF16" else kind}
    if schema["type"] == "number":
        schema = {"type": ["number", "null"]}  # JSON has no infinities
    for _ in shape:
        schema = {"type": "array", "items": schema}
    return schema


def _parameter(name: str, schema: Schema, place: str = "path") -> Schema:
    """Return a parameter of the address: of its path, where it is required, or of its query."""
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _get(
    summary: str, *errors: str, kind: str = "application/json", parameters: Sequence[Schema] = ()
) -> dict[str, Any]:
    responses = {"200": _content("Yes.", {}, kind), **_errors("401", *errors)}
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": responses}}


def _get_ready(summary: str, *errors: str, parameters: Sequence[Schema] = ()) -> Schema:
    """Return a GET entry of a path that says no with 503."""
    made = _get(summary, *errors, parameters=parameters)
    either = {"anyOf": [{"$ref": "#/components/schemas/Ready"}, {"$ref": "#/components/schemas/Error"}]}
    made["get"]["responses"]["503"] = _content("No.", either, "application/json")
    return made


def _get_websocket(summary: str, parameters: Sequence[Schema]) -> Schema:
    """Return a GET entry of a path that takes a websocket, and answers other requests with 426."""
    made = _get(summary, parameters=parameters)
    made["get"]["responses"] = {"101": {"description": "It is open."}, **_errors("401", "403")}
    error = {"$ref": "#/components/schemas/Error"}
    made["get"]["responses"]["426"] = _content("the connection is to be upgraded", error, "application/json")
    return made


def _post(
    summary: str,
    body: Schema | None,
    answer: Schema,
    *,
    streams: Literal["no", "too", "only"] = "no",
    may_be_binary: bool = False,
    may_lack: bool = False,
    parameters: Sequence[Schema] = (),
) -> Schema:
    """Return a POST entry.

    ``streams``: whether the answer may, or must, be events; ``may_lack``: whether the body is optional.
    """
    done = _content("The results.", answer, "application/json")
    if streams != "no":
        events = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
        done["content"] = {**({} if streams == "only" else done["content"]), "text/event-stream": events}
    if may_be_binary:
        done["content"]["application/octet-stream"] = {"schema": {}}
    made: Schema = {"summary": summary, "parameters": list(parameters)}
    if body is not None:
        made["requestBody"] = {"required": not may_lack, "content": {"application/json": {"schema": body}}}
    return {"post": {**made, "responses": {"200": done, **_errors(*ERRORS)}}}


def _content(what: str, schema: Schema, kind: str) -> Schema:
    return {"description": what, "content": {kind: {"schema": schema}}}


def _errors(*statuses: str) -> Schema:
    reference = {"$ref": "#/components/schemas/Error"}
    return {status: _content(ERRORS[status], reference, "application/json") for status in statuses}


_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": ["string", "object"]}, "type": {"type": "string"}},
    "description": "Of OpenAI's protocol an object in error has message, type, param and code.",
    "required": ["error"],
}
_READY: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ready": {"type": "boolean"}},
    "required": ["ready"],
}
_PARAMETERS: Schema = {
    "type": "object",
    "description": "Inputs of the model may be here too.",
    "properties": {
        "timeout": {"type": "integer", "minimum": 0, "description": "Microseconds; 0: none."},
        "schedule_by": {"type": "integer", "minimum": 0, "description": "Microseconds to begin within; 0: any."},
        "priority": {"type": "integer", "minimum": 0, "description": "1 is the highest; 0: the default."},
        "sequence_id": {"type": ["integer", "string"]},
        "sequence_start": {"type": "boolean"},
        "sequence_end": {"type": "boolean"},
    },
}
