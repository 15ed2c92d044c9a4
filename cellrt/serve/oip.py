"""The messages of the Open Inference Protocol, version 2: parsing of requests, writing of responses.

This module uses no socket and no engine. Protocol: "Predict Protocol - Version 2" (KServe), with Triton's extensions
for binary tensors, sequences, priorities and timeouts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cellrt.engine.future import Result
from cellrt.engine.option_checks import LONGEST_S
from cellrt.errors import RequestError
from cellrt.serve.arrays import (
    BYTES,
    DATATYPE_OF,
    DATATYPES,
    from_bytes,
    from_lists,
    leaves_of,
    texts_of,
    to_bytes,
    to_list,
)
from cellrt.serve.described import Described, TensorInfo
from cellrt.serve.forms import TOO_DEEP, checked
from cellrt.serve.server_settings import Limits

HEADER_LENGTH = "inference-header-content-length"
US = 1e6
DEFAULT_PRIORITY = 1
UNSUPPORTED = {
    "shared_memory_region": "there is no shared memory here, tensors come in requests",
    "classification": "outputs come as they are",
}
"""Parameters of Triton's that are not supported, with what the server does instead."""
PARAMETERS = ("timeout", "schedule_by", "priority", "sequence_id", "sequence_start", "sequence_end")
"""Parameters of a request; each protocol has some more."""
LENGTHS = ("max_tokens", "max_new_tokens", "max_steps")
"""Names that clients use for the most steps of an answer; models have one of them as an input."""
MOST_ELEMENTS = 1 << 40
MOST_DIGITS = 18
"""The most digits of a number that a client writes; Python refuses to parse one of thousands."""
LONGEST_ID = 256


class InputTensor(msgspec.Struct):
    """An input in JSON; ``data`` is left out if bytes after the JSON have it."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class OutputTensor(msgspec.Struct):
    """A requested output."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct):
    """The JSON of a request."""

    inputs: list[InputTensor]
    id: str = ""
    outputs: list[OutputTensor] = []
    parameters: dict[str, Any] = {}


class IndexRequest(msgspec.Struct):
    """A request for the index of the repository."""

    ready: bool = False
    """True for only the models that take requests."""


class LoadRequest(msgspec.Struct):
    """A request to load a model; whatever its parameters say, where the model comes from is the operator's choice."""

    parameters: dict[str, Any] = {}


class InSequence(NamedTuple):
    """The session that a request belongs to, and whether the request is its first or last."""

    id: str
    is_start: bool
    is_end: bool


class Parameters(NamedTuple):
    """The options of a request: ``deadline`` and ``schedule_by`` in seconds or None, ``priority`` 0 to 3, perhaps a
    sequence.
    """

    deadline: float | None = None
    priority: int = DEFAULT_PRIORITY
    sequence: InSequence | None = None
    schedule_by: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``submit`` for these options."""
        return {"deadline": self.deadline, "schedule_by": self.schedule_by, "priority": self.priority}


class Inference(NamedTuple):
    """A parsed request.

    Attributes:
        id: the client's, or empty.
        request: the request for the unfolder.
        parameters: its options.
        outputs: names of the requested outputs; empty: all.
        binary: the outputs that are to come as bytes; None: all.
    """

    id: str
    request: Any
    parameters: Parameters
    outputs: Sequence[str]
    binary: frozenset[str] | None


_decoder = msgspec.json.Decoder(InferRequest)
_encoder = msgspec.json.Encoder()


def decode(body: bytes | str, decoder: msgspec.json.Decoder[Any], limits: Limits) -> Any:
    """Return parsed JSON. Raise RequestError if it is invalid, of another type, or nested too deeply."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise RequestError(TOO_DEEP.format(limits.max_depth)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body: {_said(body, decoder, error)}") from None


def _said(body: bytes | str, decoder: msgspec.json.Decoder[Any], error: Exception) -> str:
    """Return the fault of a body, with the expected fields where the decoder's own words leave them open."""
    said, fields = str(error), list(getattr(decoder.type, "__struct_encode_fields__", ()))
    if not body.strip():
        return f"expected a JSON object with fields among {fields}, got nothing"
    is_field = isinstance(error, msgspec.ValidationError) and " field `" in said and " - at `" not in said
    return f"{said}; its fields are {fields}" if is_field else said


def read_request(described: Described, body: bytes, header_length: str | None) -> Inference:
    """Return a parsed request. Raise RequestError."""
    json_size = len(body) if header_length is None else _header_size(header_length, len(body))
    message: InferRequest = decode(body if json_size == len(body) else body[:json_size], _decoder, described.limits)
    checked([given.data for given in message.inputs], described.limits)
    checked([message.parameters, *(tensor.parameters for tensor in message.inputs)], described.limits)
    checked([tensor.parameters for tensor in message.outputs], described.limits)
    tensors: dict[str, Any] = {}
    place = json_size
    for given in message.inputs:
        check_supported(given.parameters, f"input {given.name!r}")
        info = _known_input(described, given.name, given.datatype)
        size = given.parameters.get("binary_data_size")
        if size is None:
            tensors[given.name] = _from_json(given, info)
            continue
        if type(size) is not int or size < 0 or given.data is not None:
            raise RequestError(f"input {given.name!r}: expected binary_data_size and no data, got {size!r:.40}")
        tensors[given.name] = from_raw(memoryview(body)[place : place + size], given.shape, info)
        place += size
    if place != len(body):
        named = place - json_size
        raise RequestError(f"the body has {len(body) - json_size} bytes behind its JSON, its inputs name {named}")
    if len(tensors) != len(message.inputs):
        raise RequestError("the request has two inputs of one name")
    for output in message.outputs:
        check_supported(output.parameters, f"output {output.name!r}")
    outputs = check_outputs(described, [output.name for output in message.outputs])
    return Inference(
        message.id,
        described.read_tensors(tensors),
        read_parameters(message.parameters, ("binary_data_output",)),
        outputs,
        _binary_outputs(message),
    )


def _header_size(text: str, size: int) -> int:
    if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) > size:
        raise RequestError(f"Inference-Header-Content-Length: expected at most {size}, got {text!r:.40}")
    return int(text)


def _known_input(described: Described, name: str, datatype: str) -> TensorInfo:
    known = described.inputs.get(name)
    if known is None:
        raise RequestError(f"model {described.name!r}: expected inputs {list(described.inputs)}, got {name!r:.80}")
    if datatype != known.info.datatype:
        raise RequestError(f"input {name!r}: expected {known.info.datatype}, got {datatype!r:.40}")
    return known.info


def _from_json(given: InputTensor, info: TensorInfo) -> Any:
    """Return the tensor, or list of bytes, of an input in JSON, flat or nested."""
    where = f"input {given.name!r}"
    if given.data is None:
        raise RequestError(f"{where}: expected data")
    count = count_of(given.shape, where)
    if info.datatype == BYTES:
        texts, kinds, _ = leaves_of(given.data, where)
        if len(texts) != count or not kinds <= {str}:
            raise RequestError(f"{where}: expected {count} texts")
        return [text.encode() for text in texts]
    made = from_lists(given.data, DATATYPES[info.datatype], where)
    if made.numel() != count:
        raise RequestError(f"{where}: expected {count} numbers for shape {given.shape}, got {made.numel()}")
    return made.reshape(given.shape)


def from_raw(data: bytes | memoryview, shape: Sequence[int], info: TensorInfo) -> Any:
    """Return the tensor, or list of bytes, of raw bytes. Raise RequestError."""
    where = f"input {info.name!r}"
    count = count_of(shape, where)
    if info.datatype == BYTES:
        return texts_of(data, count, where)
    return from_bytes(data, DATATYPES[info.datatype], shape, where)


def count_of(shape: Sequence[int], where: str) -> int:
    """Return the number of elements of a shape. Raise RequestError for an invalid shape."""
    count = 1
    for size in shape:
        if not 0 <= size <= MOST_ELEMENTS or (count := count * size) > MOST_ELEMENTS:
            raise RequestError(f"{where}: no tensor has the shape {list(shape)!r:.80}")
    return count


def check_supported(parameters: Mapping[str, Any], where: str) -> None:
    """Raise RequestError for unsupported parameters of a tensor."""
    for name, instead in UNSUPPORTED.items():
        if given := parameters.get(name):
            raise RequestError(f"{where}: parameter {name!r} is not supported ({given!r:.40}): {instead}")


def check_outputs(described: Described, names: Sequence[str]) -> Sequence[str]:
    """Return the names of outputs. Raise RequestError for one that the model does not have."""
    known = [info.name for info in described.outputs]
    for name in names:
        if name not in known:
            raise RequestError(f"model {described.name!r}: expected outputs among {known}, got {name!r:.80}")
    return names


def _binary_outputs(message: InferRequest) -> frozenset[str] | None:
    if message.outputs:
        default = message.parameters.get("binary_data_output") is True
        return frozenset(
            output.name for output in message.outputs if output.parameters.get("binary_data", default) is True
        )
    return None if message.parameters.get("binary_data_output") is True else frozenset()


def read_parameters(given: Mapping[str, Any], others: Collection[str] = ()) -> Parameters:
    """Return the parsed parameters: priority, timeout and schedule_by in microseconds, and sequence.

    Priority 1 is the highest, as Triton's, and 0 the default. ``others``: names of further parameters that the protocol
    takes. Raise RequestError, for unknown parameters too.
    """
    if not given:
        return Parameters()
    unknown = [name for name in given if name not in PARAMETERS and name not in others]
    if unknown:
        raise RequestError(f"parameters: expected some of {[*PARAMETERS, *others]}, got {unknown!r:.200}")
    level, id = given.get("priority", 0), given.get("sequence_id", 0)
    deadline_s, schedule_by_s = (_seconds(given, name) for name in ("timeout", "schedule_by"))
    if type(level) is not int or level < 0:
        raise RequestError(f"priority: expected 0 or more, got {level!r:.40}")
    if type(id) not in (int, str):
        raise RequestError(f"sequence_id: expected an integer or a text, got {id!r:.40}")
    if len(text := str(id)) > LONGEST_ID:
        raise RequestError(f"sequence_id: expected at most {LONGEST_ID} characters, got {len(text)}")
    is_start, is_end = (_flag(given, name) for name in ("sequence_start", "sequence_end"))
    if id in (0, "") and (is_start or is_end):
        raise RequestError("sequence_start and sequence_end need a sequence_id")
    sequence = None if id in (0, "") else InSequence(text, is_start, is_end)
    priority = DEFAULT_PRIORITY if level == 0 else max(0, 4 - level)
    return Parameters(deadline_s, priority, sequence, schedule_by_s)


def _seconds(given: Mapping[str, Any], name: str) -> float | None:
    time_us = given.get(name, 0)
    if type(time_us) is not int or not 0 <= time_us <= LONGEST_S * US:
        raise RequestError(f"{name}: expected microseconds, at most {LONGEST_S * US:g}, got {time_us!r:.40}")
    return time_us / US if time_us else None


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if type(value) is not bool:
        raise RequestError(f"{name}: expected true or false, got {value!r:.40}")
    return value


def write_response(name: str, version: str, inference: Inference, results: Result) -> tuple[bytes, int | None]:
    """Return a response's body, and the length of its JSON if tensors follow it as bytes.

    ``name``, ``version``: of the model that computed the results.
    """
    outputs, blobs = [], []
    for key in inference.outputs or results:
        tensor = results[key]
        output: dict[str, Any] = {"name": key, "datatype": DATATYPE_OF[tensor.dtype], "shape": list(tensor.shape)}
        if inference.binary is None or key in inference.binary:
            blobs.append(to_bytes(tensor))
            output["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            output["data"] = to_list(tensor.reshape(-1))
        outputs.append(output)
    message: dict[str, Any] = {"model_name": name, "model_version": version}
    if inference.id:
        message["id"] = inference.id
    text = _encoder.encode({**message, "outputs": outputs})
    if not blobs:
        return text, None
    return b"".join([text, *blobs]), len(text)


def as_tensor(datatype: str, value: Any, where: str) -> Any:
    """Return a tensor, or list of bytes, of a plain value of ``generate``. Raise RequestError."""
    values = value if isinstance(value, list) else [value]
    if datatype == BYTES:
        if not all(isinstance(text, str) for text in values):
            raise RequestError(f"{where}: expected a text, or a list of texts")
        return [text.encode() for text in values]
    return from_lists(values, DATATYPES[datatype], where)


def inputs_among(parameters: Mapping[str, Any], inputs: Collection[str]) -> dict[str, str]:
    """Return the parameters of ``generate`` that are inputs of the model, with the inputs' names.

    They are parameters with the name of an input that the protocol does not have, and the most steps by any name of
    ``LENGTHS``.
    """
    found = {name: name for name in parameters if name in inputs and name not in PARAMETERS}
    length = next((name for name in LENGTHS if name in inputs), None)
    if length is not None:
        found |= {name: length for name in parameters if name in LENGTHS and name not in inputs}
    return found


def as_json(results: Result) -> dict[str, Any]:
    """Return results as nested lists, by name; a result without dimensions is a number."""
    return {name: to_list(tensor) for name, tensor in results.items()}


def encode(value: object) -> bytes:
    """Return a value as JSON."""
    return _encoder.encode(value)
