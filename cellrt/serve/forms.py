"""The form of a model's requests in JSON, found from its example: a schema, and a parser.

A form has a ``schema`` (JSON Schema, for ``/openapi.json``) and converts parsed JSON to what the unfolder takes. It
checks all types of a client's values; the unfolder then checks the rest.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from cellrt.errors import DefinitionError, RequestError, RequestTooLargeError
from cellrt.graph.row_bits import TORCH_DTYPES
from cellrt.serve.arrays import DATATYPE_OF, TOO_LARGE, from_lists
from cellrt.serve.server_settings import Limits

Schema = dict[str, Any]


class Form(Protocol):
    """The form of one part of a request."""

    def schema(self) -> Schema:
        """Return the JSON Schema."""

    def read(self, value: Any, where: str) -> Any:
        """Return the value for the unfolder. Raise RequestError naming ``where``, what was expected and what came."""


@dataclasses.dataclass(frozen=True)
class TensorForm:
    """A tensor as nested lists; ``shape`` has -1 for dimensions that may differ.

    ``may_be_empty``, here and below: whether the model takes one without rows. ``is_untried``: whether its first
    dimension may differ though no other size that fits the other arrays was tried.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    limits: Limits
    may_be_empty: bool = False
    is_untried: bool = False

    def schema(self) -> Schema:
        """Return a schema of nested arrays of numbers."""
        schema: Schema = {"type": "boolean" if self.dtype == torch.bool else _type_of(self.dtype)}
        for place, size in reversed(list(enumerate(self.shape))):
            is_least = place < len(self.shape) - 1 or not self.may_be_empty  # JSON cannot say how wide no rows are
            least, most = (size, size) if size >= 0 else (int(is_least), self.limits.max_steps)
            schema = {"type": "array", "items": schema, "minItems": least, "maxItems": most}
        return schema

    def read(self, value: Any, where: str) -> torch.Tensor:
        """Return the value as a new tensor."""
        made = from_lists(value, self.dtype, where)
        check_shape(made.shape, self.shape, self.limits, where)
        return made

    def of(self, tensor: torch.Tensor) -> Any:
        """Return the part of a request for a tensor that has the shape."""
        return tensor


@dataclasses.dataclass(frozen=True)
class ScalarForm:
    """A number, a truth value or a text."""

    kind: type
    limits: Limits
    may_be_empty: bool = False

    def schema(self) -> Schema:
        """Return a schema of one type."""
        if self.kind is str:
            return {"type": "string", "minLength": int(not self.may_be_empty), "maxLength": self.limits.max_steps}
        return _NUMBERS[self.kind].copy()

    def read(self, value: Any, where: str) -> Any:
        """Return the value itself; an int where a float is expected becomes one."""
        if self.kind is float and type(value) in (int, float):
            if not abs(value) < BEYOND_FP32:
                raise RequestError(f"{where}: expected FP32{TOO_LARGE}")
            return float(value)
        if self.kind is int and type(value) is float and value.is_integer():  # JSON's 1.0 is an integer
            return int(value)
        if type(value) is not self.kind:
            raise RequestError(f"{where}: expected {_NAMES[self.kind]}, got {brief(value)}")
        if isinstance(value, str) and len(value) > self.limits.max_steps:
            raise too_large(f"{self.limits.max_steps} characters", "max_steps", str(len(value)), where)
        return value


@dataclasses.dataclass(frozen=True)
class ListForm:
    """A list of items of one form. ``make``: makes the type that the unfolder takes."""

    item: Form
    make: Callable[[list[Any]], Any]
    limits: Limits
    may_be_empty: bool = False

    def schema(self) -> Schema:
        """Return a schema of an array."""
        least, most = int(not self.may_be_empty), self.limits.max_steps
        return {"type": "array", "items": self.item.schema(), "minItems": least, "maxItems": most}

    def read(self, value: Any, where: str) -> Any:
        """Return the list."""
        if not isinstance(value, list):
            raise RequestError(f"{where}: expected a list, got {brief(value)}")
        if len(value) > self.limits.max_steps:
            raise too_large(f"{self.limits.max_steps} items", "max_steps", str(len(value)), where)
        if (
            isinstance(self.item, ScalarForm)
            and self.item.kind is not str
            and set(map(type, value)) == {self.item.kind}
            and (self.item.kind is not float or max(map(abs, value)) < BEYOND_FP32)
        ):
            return self.make(value)  # as most are: one by one they would cost much of a small request
        return self.make([self.item.read(item, f"{where}[{place}]") for place, item in enumerate(value)])


@dataclasses.dataclass(frozen=True)
class TreeForm:
    """Nested lists whose leaves have one form; a leaf that is a tensor is as deep as the tensor."""

    leaf: Form
    make: Callable[[list[Any]], Any]
    depth: int
    limits: Limits

    def schema(self) -> Schema:
        """Return a schema of nested arrays of any depth, down to leaves."""
        nested: Schema = {"type": "array", "minItems": 1}
        return {"anyOf": [self.leaf.schema(), nested], "description": "a tree: nested lists, down to leaves"}

    def read(self, value: Any, where: str) -> Any:
        """Return the tree, of any depth."""
        return rebuilt(value, self._is_leaf, lambda item: self.leaf.read(item, where), self.make)

    def _is_leaf(self, value: Any) -> bool:
        """Return whether lists are nested no deeper here than in a leaf."""
        for _ in range(self.depth + 1):
            if not isinstance(value, list) or not value:
                return True
            value = value[0]
        return False


@dataclasses.dataclass(frozen=True)
class RecordForm:
    """An object with named parts."""

    fields: Mapping[Any, Form]
    make: Callable[..., Any]
    optional: frozenset[str] = frozenset()

    def schema(self) -> Schema:
        """Return a schema of an object."""
        properties = {name: form.schema() for name, form in self.fields.items()}
        required = [name for name in self.fields if name not in self.optional]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def read(self, value: Any, where: str) -> Any:
        """Return the record."""
        if not isinstance(value, dict):
            raise RequestError(f"{where}: expected an object with {list(self.fields)}, got {brief(value)}")
        missing, unknown = self.fields.keys() - value.keys() - self.optional, value.keys() - self.fields.keys()
        if missing or unknown:
            raise RequestError(f"{where}: expected {list(self.fields)}, got {list(value)!r:.200}")
        parts = {name: self.fields[name].read(item, f"{where}.{name}") for name, item in value.items()}
        return self.build(parts, where)

    def build(self, parts: Mapping[str, Any], where: str) -> Any:
        """Return the record of parts that were read. Raise RequestError if its class refuses them."""
        try:
            return self.make(**parts)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: no request ends the server
            raise RequestError(f"{where}: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class PlacesForm:
    """A list with as many parts as a tuple, each of which has a form of its own. ``fields``: the forms, by index."""

    fields: Mapping[Any, Form]
    make: Callable[[list[Any]], Any]

    def schema(self) -> Schema:
        """Return a schema of an array with a schema for each index."""
        count = len(self.fields)
        items = [form.schema() for form in self.fields.values()]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": count, "maxItems": count}

    def read(self, value: Any, where: str) -> Any:
        """Return the tuple."""
        if not isinstance(value, list) or len(value) != len(self.fields):
            raise RequestError(f"{where}: expected a list of {len(self.fields)} parts, got {brief(value)}")
        return self.make(
            [form.read(item, f"{where}[{place}]") for (place, form), item in zip(self.fields.items(), value)]
        )

    def build(self, parts: Mapping[int, Any], where: str) -> Any:
        """Return the tuple of parts that were read; ``where`` is not used, as there are no errors."""
        return self.make(list(parts.values()))


class NetworkForm:
    """A directed graph of networkx, in its node-link format."""

    def __init__(self, attributes: Form | None) -> None:
        self._attributes = attributes

    def schema(self) -> Schema:
        """Return a schema of the result of ``networkx.node_link_data``."""
        node: Schema = {"type": "object", "properties": {"id": {}}, "required": ["id"]}
        edge: Schema = {"type": "object", "properties": {"source": {}, "target": {}}, "required": ["source", "target"]}
        parts = {"nodes": {"type": "array", "items": node}, "edges": {"type": "array", "items": edge}}
        return {"type": "object", "properties": parts, "required": ["nodes", "edges"]}

    def read(self, value: Any, where: str) -> Any:
        """Return the graph."""
        if not isinstance(value, dict):
            raise RequestError(f"{where}: expected an object with nodes and edges, got {brief(value)}")
        import networkx as nx  # the model that takes one has imported it; the others do without, and start sooner

        try:
            graph = nx.node_link_graph({**value, "directed": True, "multigraph": False}, edges="edges")
        except (AttributeError, KeyError, TypeError, ValueError, nx.NetworkXError) as error:
            raise RequestError(f"{where}: not a graph of nodes and edges: {type(error).__name__}: {error}") from None
        if self._attributes is not None:
            for node, given in graph.nodes(data=True):
                read = self._attributes.read(dict(given), f"{where}.nodes[{node!r:.40}]")
                given.clear()
                given.update(read)
        return graph


class AnyForm:
    """A part without a known form: the unfolder takes JSON as it is."""

    def schema(self) -> Schema:
        """Return a schema that allows anything."""
        return {}

    def read(self, value: Any, where: str) -> Any:
        """Return the value itself."""
        return value


def form_of(example: Any, limits: Limits) -> Form:
    """Return the form of requests like this one; all dimensions of tensors are the example's.

    Raise DefinitionError for a tensor of a dtype that no row can have.
    """
    if isinstance(example, np.ndarray | np.generic):
        return _ArrayForm(_taken(TORCH_DTYPES.get(example.dtype.newbyteorder("=")), example), example.shape, limits)
    if isinstance(example, torch.Tensor):
        return TensorForm(_taken(example.dtype, example), tuple(example.shape), limits)
    if type(example) in _NAMES:
        return ScalarForm(type(example), limits)
    if "networkx" in sys.modules and isinstance(example, sys.modules["networkx"].DiGraph):
        attributes = next((data for _, data in example.nodes(data=True) if data), None)
        return NetworkForm(None if attributes is None else form_of(dict(attributes), limits))
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return RecordForm({name: form_of(part, limits) for name, part in example.items()}, dict)
    if dataclasses.is_dataclass(example) and not isinstance(example, type):
        return RecordForm({name: form_of(part, limits) for name, part in parts_of(example).items()}, type(example))
    if isinstance(example, tuple) and hasattr(example, "_asdict"):
        return RecordForm({name: form_of(part, limits) for name, part in parts_of(example).items()}, type(example))
    if isinstance(example, list | tuple):
        return _form_of_list(example, limits)
    return AnyForm()


def parts_of(example: Any) -> dict[Any, Any]:
    """Return the parts of a record: of a mapping, a tuple, or a dataclass, which makes some of its fields itself."""
    if isinstance(example, Mapping):
        return dict(example)
    if isinstance(example, tuple):
        return dict(example._asdict() if hasattr(example, "_asdict") else enumerate(example))
    return {field.name: getattr(example, field.name) for field in dataclasses.fields(example) if field.init}


def _taken(dtype: torch.dtype | None, example: torch.Tensor | np.ndarray | np.generic) -> torch.dtype:
    if dtype not in DATATYPE_OF:
        raise DefinitionError(
            f"a request has a tensor of {example.dtype}; expected one of {list(DATATYPE_OF.values())}"
        )
    return dtype


@dataclasses.dataclass(frozen=True)
class _ArrayForm(TensorForm):
    """A NumPy array."""

    def read(self, value: Any, where: str) -> Any:
        """Return the array; a NumPy scalar if it has no dimension."""
        return self.of(super().read(value, where))

    def of(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as such an array."""
        return tensor.numpy()[()]


def _form_of_list(example: Sequence[Any], limits: Limits) -> Form:
    """Return the form of a plain list, of a tuple of unlike parts, or of a tree.

    Tuples are trees unless they have unlike arrays; lists are trees if they hold lists.
    """
    if _is_of_unlike_arrays(example):
        return PlacesForm({place: form_of(part, limits) for place, part in enumerate(example)}, tuple)
    make = tuple if isinstance(example, tuple) else list
    leaf: Any = example
    while isinstance(leaf, list | tuple) and not hasattr(leaf, "_asdict"):
        if not leaf:
            return AnyForm()
        leaf = leaf[0]
    form = form_of(leaf, limits)
    if any(_kind_of(other) != _kind_of(leaf) for other in leaves(example)):
        form = AnyForm()  # which of its places has which type, the example does not tell
    if isinstance(example, tuple) or isinstance(example[0], list | tuple):
        depth = leaf.ndim if isinstance(leaf, torch.Tensor | np.ndarray) else 0
        return TreeForm(form, make, depth, limits)
    if any(type(item) is not type(example[0]) for item in example):
        return AnyForm()
    return ListForm(form, make, limits)


def _kind_of(part: Any) -> tuple[Any, ...]:
    """Return a key that is equal for parts that one form can read."""
    return type(part), getattr(part, "dtype", None), getattr(part, "ndim", None)


def _is_of_unlike_arrays(example: Sequence[Any]) -> bool:
    """Return whether this is a tuple with arrays in it, and with parts that no one form could read."""
    if not isinstance(example, tuple) or any(isinstance(part, tuple) for part in example):
        return False
    return len(set(map(_kind_of, example))) > 1 and any(isinstance(part, torch.Tensor | np.ndarray) for part in example)


def rebuilt(
    tree: Any, is_leaf: Callable[[Any], bool], made_of: Callable[[Any], Any], make: Callable[[list[Any]], Any]
) -> Any:
    """Return a tree with each leaf replaced by ``made_of`` of it, and each inner node by ``make`` of its children.

    The function is not recursive: trees may be deep.
    """
    root: list[Any] = []
    opened: list[tuple[Iterator[Any], list[Any]]] = [(iter((tree,)), root)]  # rest of a node, its new children
    while True:
        items, made = opened[-1]
        for item in items:
            if not is_leaf(item):
                opened.append((iter(item), []))
                break
            made.append(made_of(item))
        else:
            opened.pop()
            if not opened:
                return root[0]
            opened[-1][1].append(make(made))


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists and tuples, in any order."""
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | tuple) and not hasattr(part, "_asdict"):
            waiting += part
        else:
            yield part


def checked(value: Any, limits: Limits) -> Any:
    """Return the value. Raise RequestError if it is nested too deeply, or RequestTooLargeError for too many items."""
    level, depth, num_items = [value], 0, 0
    while level:
        depth += 1
        num_items += len(level)
        if depth > limits.max_depth + 1:
            raise RequestError(TOO_DEEP.format(limits.max_depth))
        if num_items > limits.max_items:
            raise too_large(f"{limits.max_items} items", "max_items", "more")
        if not {dict, list} & set(map(type, level)):
            break
        inside = [item.values() if type(item) is dict else item for item in level if type(item) in (dict, list)]
        level = list(chain.from_iterable(inside))
    return value


def check_shape(given: Sequence[int], expected: Sequence[int], limits: Limits, where: str) -> None:
    """Raise RequestError unless a shape is the expected one, where -1 stands for any size.

    Raise RequestTooLargeError for a size above the limit.
    """
    if len(given) != len(expected) or any(e not in (-1, g) for g, e in zip(given, expected)):
        raise RequestError(f"{where}: expected shape {list(expected)}, got {list(given)}")
    if max(given, default=0) > max(limits.max_steps, *expected, 0):
        raise too_large(f"{limits.max_steps} rows", "max_steps", f"shape {list(given)}", where)


def too_large(most: str, limit: str, given: str, where: str = "the request") -> RequestTooLargeError:
    """Return the error of what is larger than a limit of ``Limits``, by its name."""
    return RequestTooLargeError(f"{where}: expected at most {most} ({limit}), got {given}")


def brief(value: Any) -> str:
    """Return a short text of a value for an error, however long or deep it is."""
    text = reprlib.repr(value[:8]) if isinstance(value, str | list) else repr(type(value).__name__)
    return text if len(text) <= 60 else text[:60] + "..."


TOO_DEEP = "the request is nested more than {} deep (max_depth)"
BEYOND_FP32 = 2.0**128 - 2.0**103
"""The least number that is rounded to infinity: a number of a request is an FP32, as the protocol calls it."""
_NUMBERS: dict[type, Schema] = {bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"}}
_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _type_of(dtype: torch.dtype) -> str:
    return "number" if dtype.is_floating_point else "integer"
