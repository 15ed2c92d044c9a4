"""The description of the server's own doors in OpenAPI 3.1, with each model's schema; the page that tries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import cellrt
from cellrt.serve.described import Described
from cellrt.serve.http_native import NativeRequest
from cellrt.serve.oip import InferRequest

Schema = dict[str, Any]
ERRORS = {
    "400": "the request is wrong",
    "401": "a key is needed",
    "404": "no such model or version",
    "410": "the session is not open",
    "413": "the request is too large",
    "429": "too many requests: try again after Retry-After",
    "499": "the client was gone",
    "500": "a cell failed",
    "503": "the engine is not there, or is about to end",
    "504": "the deadline passed",
}


def document(models: Sequence[Described], *, has_keys: bool) -> Schema:
    """The whole description."""
    components = msgspec.json.schema_components(
        [NativeRequest, InferRequest], ref_template="#/components/schemas/{name}"
    )[1]
    schemas: Schema = {**components, "Error": _ERROR}
    paths: Schema = {
        "/v2": _get("What this server is."),
        "/v2/health/live": _get("Whether this front end answers."),
        "/v2/health/ready": _get("Whether every model that is loaded can be served.", "503"),
        "/v1/models": _get("The models.", "503"),
        "/metrics": _get("Counts, for Prometheus.", kind="text/plain"),
    }
    for model in models:
        paths |= _paths_of(model, schemas)
    made: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "cellrt", "version": cellrt.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _paths_of(model: Described, schemas: Schema) -> Schema:
    """The paths of one model."""
    name = model.name
    body = {**schemas["NativeRequest"]}
    body["properties"] = {**body["properties"], "request": model.request.schema()}
    schemas[f"{name}.Request"] = body
    results = {"type": "object", "required": ["model", "version", "results"], "properties": _results(model)}
    generate: Schema = {
        "type": "object",
        "properties": {
            **{each.info.name: {} for each in model.inputs.values()},
            "parameters": {"type": "object"},
            "id": {"type": "string"},
        },
        "required": [name for name, each in model.inputs.items() if not each.is_optional],
        "additionalProperties": False,
    }
    native, tensors = f"#/components/schemas/{name}.Request", "#/components/schemas/InferRequest"
    return {
        f"/v1/models/{name}/infer": _post(f"Runs {name}.", {"$ref": native}, results, may_stream=True),
        f"/v2/models/{name}": _get(f"Inputs and outputs of {name}.", "404", "503"),
        f"/v2/models/{name}/ready": _get(f"Whether {name} takes requests.", "404", "503"),
        f"/v2/models/{name}/stats": _get(f"Counts of {name}.", "404", "503"),
        f"/v2/models/{name}/infer": _post(f"Runs {name} on tensors.", {"$ref": tensors}, {"type": "object"}),
        f"/v2/models/{name}/generate": _post(f"Runs {name} on values by name.", generate, {"type": "object"}),
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


def _get(summary: str, *errors: str, kind: str = "application/json") -> Schema:
    return {"get": {"summary": summary, "responses": {"200": _content("Yes.", {}, kind), **_errors("401", *errors)}}}


def _post(summary: str, body: Schema, answer: Schema, *, may_stream: bool = False) -> Schema:
    content = {"application/json": {"schema": body}}
    done = _content("The results.", answer, "application/json")
    if may_stream:
        done["content"]["text/event-stream"] = {
            "schema": {"type": "object", "properties": {"data": {"type": "string"}}}
        }
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": done, **_errors(*ERRORS)},
        }
    }


def _content(what: str, schema: Schema, kind: str) -> Schema:
    return {"description": what, "content": {kind: {"schema": schema}}}


def _errors(*statuses: str) -> Schema:
    reference = {"$ref": "#/components/schemas/Error"}
    return {status: _content(ERRORS[status], reference, "application/json") for status in statuses}


_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "type": {"type": "string"}},
    "required": ["error"],
}
