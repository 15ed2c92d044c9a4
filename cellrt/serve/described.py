"""The inputs and outputs of a model, found by unfolding its example and longer ones: for metadata, schemas and parsing.

Requests are only recorded here, which needs no device. A dimension is variable if the unfolder takes the example with
one more row there. Arrays that depend on each other, as those of a graph's edges, cannot be tried so: of several
tensors each may differ in its first dimension that is not a dimension of a cell's row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec
import torch

from cellrt.definition.bits import tensor_of
from cellrt.definition.spec import RowSpec
from cellrt.errors import CellrtError, DefinitionError, RequestError, UnknownModelError
from cellrt.graph.binding import Binding as GraphBinding
from cellrt.graph.results import Recorded
from cellrt.graph.unfolder import Unfolder
from cellrt.language.language import Language
from cellrt.process.model_binding import Binding
from cellrt.serve.arrays import BYTES, DATATYPE_OF, from_bytes
from cellrt.serve.forms import (
    TOO_DEEP,
    Form,
    ListForm,
    PlacesForm,
    RecordForm,
    ScalarForm,
    TensorForm,
    TreeForm,
    check_shape,
    checked,
    form_of,
    leaves,
    parts_of,
    rebuilt,
)
from cellrt.serve.server_settings import Limits
from cellrt.serve.sized import SizedGraph

VARIABLE = -1


class TensorInfo(NamedTuple):
    """The name, datatype and shape of an input or output, as the protocol has them."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def metadata(self) -> dict[str, Any]:
        """Return the tensor's entry in metadata."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


class Input(NamedTuple):
    """A tensor of a request.

    Attributes:
        info: its entry in metadata.
        read: converts the tensor (BYTES: a list of bytes) to the part of the request.
        is_optional: whether the model takes requests without it.
    """

    info: TensorInfo
    read: Callable[[Any], Any]
    is_optional: bool = False


@dataclass(frozen=True)
class Described:
    """A model with its inputs and outputs, for HTTP and gRPC.

    Attributes:
        binding: the binding with which requests are unfolded.
        request: the form of a request.
        inputs: the tensors of a request, by name.
        outputs: the tensors of results; streamed steps have them without the first dimension.
        keeps_state: whether requests may be in sessions.
    """

    binding: Binding
    request: Form
    inputs: Mapping[str, Input]
    outputs: Sequence[TensorInfo]
    keeps_state: bool
    limits: Limits
    _assemble: Callable[[dict[str, Any]], Any]

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.binding.name

    @property
    def version(self) -> str:
        """The version of the model; only the newest takes requests."""
        return str(self.binding.version)

    def check_version(self, version: str | None) -> None:
        """Raise UnknownModelError unless that is the version that takes requests. None stands for it."""
        if version not in (None, "", self.version):
            raise UnknownModelError(f"model {self.name!r} has version {self.version}, not {version!r:.40}")

    def read_json(self, value: Any) -> Any:
        """Return a request from JSON. Raise RequestError."""
        return self.request.read(checked(value, self.limits), "request")

    @cached_property
    def raw_rows(self) -> RawRows | None:
        """The reader of requests of one tensor that comes as raw rows; None if the model takes none."""
        form = self.request
        if not isinstance(form, TensorForm) or form.shape[:1] != (VARIABLE,) or VARIABLE in form.shape[1:]:
            return None
        return RawRows(self, form, next(iter(self.inputs)))

    def read_tensors(self, tensors: Mapping[str, Any]) -> Any:
        """Return a request from its input tensors. Raise RequestError if some are missing or unknown."""
        missing = [name for name, each in self.inputs.items() if name not in tensors and not each.is_optional]
        if missing or tensors.keys() - self.inputs.keys():
            raise RequestError(f"model {self.name!r}: expected inputs {list(self.inputs)}, got {list(tensors)!r:.200}")
        return self._assemble({name: self.inputs[name].read(value) for name, value in tensors.items()})


class RawRows:
    """A reader of requests of one tensor, whose rows come raw and little-endian, in any number."""

    def __init__(self, described: Described, form: TensorForm, name: str) -> None:
        self._described, self._form, self._name = described, form, name
        self._row_shape, self._dtype = form.shape[1:], form.dtype
        self._row_bytes = math.prod(self._row_shape) * form.dtype.itemsize
        self._most = 0 if form.dtype == torch.bool else described.limits.max_steps
        """The most rows that need no further check; 0 for bool, whose bytes may have any value."""

    def read(self, data: bytes) -> Any:
        """Return the request. Raise RequestError."""
        count, rest = divmod(len(data), self._row_bytes) if self._row_bytes else (0, len(data))
        if rest:
            raise RequestError(f"expected rows of {self._row_bytes} bytes, got {len(data)} bytes")
        shape = count, *self._row_shape
        if 0 < count <= self._most:
            return self._form.of(tensor_of(bytearray(data), self._dtype, shape))
        name = self._name
        return self._described.read_tensors({name: from_bytes(data, self._dtype, shape, f"input {name!r}")})


def language_in(described: Described) -> Language | None:
    """Return the description of a language model without its weights; None for other models."""
    language = getattr(described.binding.unfolder, "language", None)
    return language if isinstance(language, Language) else None


def describe(binding: Binding, limits: Limits) -> Described:
    """Return a model's description, after unfolding its example some times.

    Raise DefinitionError for any fault of the model, also if it is another than the engine's.
    """
    found = found_of(binding.unfolder, binding, [each.spec for each in binding.formats], limits)
    return Described(binding, found.request, found.inputs, found.outputs, bool(binding.states), limits, found.assemble)


class Found(NamedTuple):
    """The inputs and outputs of a model.

    ``assemble``: makes a request of the values that its input tensors were read to.
    """

    request: Form
    inputs: Mapping[str, Input]
    outputs: Sequence[TensorInfo]
    assemble: Callable[[dict[str, Any]], Any]


def found_of(unfolder: Unfolder, binding: GraphBinding, specs: Sequence[RowSpec], limits: Limits) -> Found:
    """Return the inputs and outputs that unfolding a model shows.

    ``specs``: of the engine's rows, by kind. Raise DefinitionError.
    """
    if "/" in unfolder.name:
        raise DefinitionError(f"model {unfolder.name!r} cannot be served: a '/' ends a name in an address")
    graph = SizedGraph(binding)
    try:
        recorded = unfolder.record_in(graph, unfolder.example)
    except RequestError as error:
        raise DefinitionError(
            f"model {unfolder.name!r} cannot be served: each process makes it anew, and in this one its own example "
            f"fails; its weights must come from files or a seed: {error}"
        ) from error
    try:
        return _found_beside(recorded, graph, unfolder, binding, specs, limits)
    except Exception as error:  # also what a request's own class raises
        why = str(error) if isinstance(error, CellrtError) else f"{type(error).__name__}: {error}"
        raise DefinitionError(f"model {unfolder.name!r} cannot be served: from its example, {why}") from error


def _found_beside(
    first: Recorded,
    graph: SizedGraph,
    unfolder: Unfolder,
    binding: GraphBinding,
    specs: Sequence[RowSpec],
    limits: Limits,
) -> Found:
    recorded = [first]

    def takes(other: Any) -> bool:
        try:
            recorded.append(unfolder.record(binding, other))
        except CellrtError:
            return False
        return True

    form = request_form(unfolder.example, takes, limits, graph)
    for longer in _longer_ones(form, unfolder.example):
        takes(longer)
    inputs, assemble = _inputs_of(form, _parameter(unfolder), limits)
    return Found(form, inputs, _outputs_of(specs, recorded, is_open=_is_open(form)), assemble)


def request_form(example: Any, takes: Callable[[Any], bool], limits: Limits, graph: SizedGraph) -> Form:
    """Return the form of requests like the example, of any length that the model ``takes``.

    ``graph``: the example's.
    """
    return _with_variable_dimensions(form_of(example, limits), example, takes, graph)


def _parameter(unfolder: Unfolder) -> str:
    """Return the name of the unfolder's parameter for the request."""
    names = list(inspect.signature(unfolder.function).parameters)
    return names[1] if len(names) > 1 else "request"


def _with_variable_dimensions(form: Form, example: Any, takes: Callable[[Any], bool], graph: SizedGraph) -> Form:
    """Return the form of the example, with -1 for dimensions along which the model takes more."""
    if isinstance(form, ListForm):
        item = _with_variable_leaves(form.item, form.make, example, takes, graph)
        return replace(form, item=item, may_be_empty=takes(example[:0]))
    if isinstance(form, TreeForm):
        return replace(form, leaf=_with_variable_leaves(form.leaf, form.make, example, takes, graph))
    if isinstance(form, ScalarForm) and form.kind is str:
        return replace(form, may_be_empty=takes(example[:0]))
    if isinstance(form, TensorForm):
        shape = list(form.shape)
        for dimension in range(len(shape)):
            if takes(_longer(example, dimension)):
                shape[dimension] = VARIABLE
        if VARIABLE not in shape[:1] and graph.is_sized(example):
            return replace(form, shape=(VARIABLE, *shape[1:]), may_be_empty=len(shape) == 1, is_untried=True)
        is_free = len(shape) == 1 and shape[0] == VARIABLE
        return replace(form, shape=tuple(shape), may_be_empty=is_free and takes(example[:0]))
    if isinstance(form, RecordForm | PlacesForm):
        return _with_variable_fields(form, parts_of(example), takes, graph)
    return form


def _with_variable_leaves(
    leaf: Form, make: Callable[[list[Any]], Any], example: Any, takes: Callable[[Any], bool], graph: SizedGraph
) -> Form:
    """Return the form of arrays in a list or tree, with variable dimensions.

    A dimension is variable if the model takes more along it of all arrays, or of one, or if the arrays differ in it.
    """
    if not isinstance(leaf, TensorForm):
        return leaf
    arrays = list(leaves(example))

    def takes_longer(dimension: int, chosen: Sequence[Any]) -> bool:
        def longer(array: Any) -> Any:
            return _longer(array, dimension) if any(array is each for each in chosen) else array

        return takes(rebuilt(example, lambda part: not isinstance(part, list | tuple), longer, make))

    shape = list(leaf.shape)
    for dimension in range(len(shape)):
        sizes = {array.shape[dimension] for array in arrays}
        if len(sizes) > 1 or takes_longer(dimension, arrays) or takes_longer(dimension, arrays[:1]):
            shape[dimension] = VARIABLE
    is_untried = bool(shape) and shape[0] != VARIABLE and any(map(graph.is_sized, arrays))
    shape[:1] = [VARIABLE] if is_untried else shape[:1]
    return replace(leaf, shape=tuple(shape), is_untried=is_untried)


def _with_variable_fields(
    form: RecordForm | PlacesForm, parts: dict[Any, Any], takes: Callable[[Any], bool], graph: SizedGraph
) -> RecordForm | PlacesForm:
    """Return the form of a record, with variable dimensions of one field, or first dimensions of several fields
    together.

    Raise RequestError if the record's class does not take the example's own parts.
    """
    form.build(parts, "a request")

    def takes_changed(changed: Mapping[Any, Any]) -> bool:
        return _takes_built(form, {**parts, **changed}, takes)

    fields = {
        name: _with_variable_dimensions(field, parts[name], partial(_named, takes_changed, name), graph)
        for name, field in form.fields.items()
    }
    fixed = {
        name: field
        for name, field in fields.items()
        if isinstance(field, TensorForm) and field.shape and VARIABLE not in field.shape
    }
    if fixed and takes_changed({name: _longer(parts[name], 0) for name in fixed}):
        fields |= {name: replace(field, shape=(VARIABLE, *field.shape[1:])) for name, field in fixed.items()}
    if isinstance(form, PlacesForm):
        return replace(form, fields=fields)
    return replace(form, fields=fields, optional=_optional_fields(form, parts, takes))


def _optional_fields(form: RecordForm, parts: dict[str, Any], takes: Callable[[Any], bool]) -> frozenset[str]:
    """Return the fields that the model takes requests without: without each of them, and without all together."""

    def takes_without(names: Collection[str]) -> bool:
        return _takes_built(form, {name: part for name, part in parts.items() if name not in names}, takes)

    found = frozenset(name for name in parts if len(parts) > 1 and takes_without({name}))
    return found if found and len(found) < len(parts) and takes_without(found) else frozenset()


def _takes_built(form: RecordForm | PlacesForm, parts: Mapping[Any, Any], takes: Callable[[Any], bool]) -> bool:
    """Return whether the record's class takes the parts, and the model the record."""
    try:
        request = form.build(parts, "a request")
    except RequestError:
        return False
    return takes(request)


def _named(takes: Callable[[Mapping[Any, Any]], bool], name: object, part: Any) -> bool:
    return takes({name: part})


def _longer(tensor: Any, dimension: int) -> Any:
    """Return a tensor of zeros with one more row along a dimension."""
    given = torch.as_tensor(tensor)
    rows = list(given.shape)
    rows[dimension] += 1
    longer = torch.zeros(rows, dtype=given.dtype)
    return longer if isinstance(tensor, torch.Tensor) else longer.numpy()


def _longer_ones(form: Form, example: Any) -> Iterator[Any]:
    """Yield requests that are longer than the example in parts that are no tensors, to see which results grow."""
    if isinstance(example, str) and example:
        yield example + example[-1]
    elif isinstance(form, ScalarForm) and form.kind is int:
        yield example + 1
    elif isinstance(form, ListForm) and example:
        yield form.make([*example, example[-1]])
    elif isinstance(form, RecordForm | PlacesForm):
        parts = parts_of(example)
        for name, field in form.fields.items():
            for longer in _longer_ones(field, parts[name]):
                with suppress(RequestError):  # its class does not take it
                    yield form.build({**parts, name: longer}, "a request")


def _is_open(form: Form) -> bool:
    """Return whether requests may differ from the example in untried ways: trees, graphs, any JSON."""
    if isinstance(form, RecordForm | PlacesForm):
        return any(map(_is_open, form.fields.values()))
    if isinstance(form, ListForm):
        return not isinstance(form.item, ScalarForm)
    return form.is_untried if isinstance(form, TensorForm) else not isinstance(form, ScalarForm)


def _outputs_of(specs: Sequence[RowSpec], recorded: Sequence[Recorded], *, is_open: bool) -> list[TensorInfo]:
    infos = []
    for place, result in enumerate(recorded[0].results):
        spec = specs[result.kind]
        same = (one.results[place] for one in recorded if len(one.results) > place)
        sizes = {len(other.positions) for other in same if other.name == result.name}
        first: tuple[int, ...] = ()
        if not result.is_single:
            first = (VARIABLE,) if result.is_loop or is_open or len(sizes) > 1 else (len(result.positions),)
        infos.append(TensorInfo(result.name, DATATYPE_OF[spec.dtype], (*first, *spec.shape)))
    return infos


def _inputs_of(form: Form, parameter: str, limits: Limits) -> tuple[dict[str, Input], Callable[[dict[str, Any]], Any]]:
    """Return the input tensors of a form, and the function that makes a request of the values read from them."""
    if isinstance(form, RecordForm):
        inputs = {name: _input_of(name, part, limits) for name, part in form.fields.items()}
        named = {
            name: made._replace(is_optional=name in form.optional) for name, made in inputs.items() if made is not None
        }
        if len(named) == len(inputs):
            return named, lambda parts: form.build(parts, "request")
    made = _input_of(parameter, form, limits) or _json_input(parameter, form, limits)
    return {parameter: made}, lambda parts: parts[parameter]


def _input_of(name: str, form: Form, limits: Limits) -> Input | None:
    """Return the input tensor for a part of a request; None if the part is no tensor."""
    where = f"input {name!r}"
    if isinstance(form, TensorForm):

        def read_tensor(tensor: torch.Tensor) -> Any:
            check_shape(tensor.shape, form.shape, limits, where)
            return form.of(tensor)

        return Input(TensorInfo(name, DATATYPE_OF[form.dtype], form.shape), read_tensor)
    if isinstance(form, ScalarForm) and form.kind is str:

        def read_text(texts: list[bytes]) -> Any:
            check_shape((len(texts),), (1,), limits, where)
            return form.read(_decoded(texts[0], where), where)

        return Input(TensorInfo(name, BYTES, (1,)), read_text)
    if isinstance(form, ScalarForm):
        datatype = _SCALARS[form.kind]

        def read_scalar(tensor: torch.Tensor) -> Any:
            check_shape(tensor.shape, (1,), limits, where)
            return tensor.item()

        return Input(TensorInfo(name, datatype, (1,)), read_scalar)
    if isinstance(form, ListForm) and isinstance(form.item, ScalarForm):
        return _list_input(name, form, form.item, limits)
    return None


def _list_input(name: str, form: ListForm, item: ScalarForm, limits: Limits) -> Input:
    where = f"input {name!r}"

    def read_list(values: Any) -> Any:
        if item.kind is str:
            check_shape((len(values),), (VARIABLE,), limits, where)
            return form.make([item.read(_decoded(text, where), where) for text in values])
        check_shape(values.shape, (VARIABLE,), limits, where)
        return form.make(values.tolist())

    return Input(TensorInfo(name, BYTES if item.kind is str else _SCALARS[item.kind], (VARIABLE,)), read_list)


def _json_input(name: str, form: Form, limits: Limits) -> Input:
    """Return the input for a form without fixed shapes: one text, which is JSON."""
    where = f"input {name!r}"

    def read_text(texts: list[bytes]) -> Any:
        check_shape((len(texts),), (1,), limits, where)
        try:
            value = msgspec.json.decode(texts[0])
        except RecursionError:
            raise RequestError(TOO_DEEP.format(limits.max_depth)) from None
        except msgspec.DecodeError as error:
            raise RequestError(f"{where}: expected JSON: {error}") from None
        return form.read(checked(value, limits), where)

    return Input(TensorInfo(name, BYTES, (1,)), read_text)


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{where}: expected UTF-8: {error}") from None


_SCALARS = {bool: "BOOL", int: "INT64", float: "FP32"}
