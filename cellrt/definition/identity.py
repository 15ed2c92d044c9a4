"""The identity of a cell: a digest of its definition, its weights and the shapes of its rows.

Equal digests mean cells that may be batched together (BatchMaker section 2.4.2), in whatever process they were made.
So nothing is digested that differs from process to process: addresses, file names, the name of the module a class was
    imported from. A value that cannot be compared makes a digest of its own.

Code counts by its bytecode, with what it finds in its globals, its class and the user's modules that it names, and so
on through everything they use. The code of torch, NumPy and the standard library counts by its name, with what a
function of theirs encloses. Of other packages that are installed, code and constants count, but not the objects in
their globals, such as caches and loggers. A weak reference counts as what it refers to.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import _GeneratorContextManager
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from cellrt.definition.functions import (
    has_contents,
    is_installed,
    is_library,
    is_of_a_library,
    lies_installed,
    owner_of,
    used_globals,
)
from cellrt.definition.snapshot import OF_EVERY_MODULE, FunctionSnapshot, weights_of

BY_TEXT = (
    bool,
    int,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
ORIGINALS = ("py_func", "_torchdynamo_inline")
"""The attributes in which compiled functions of numba, and scripted ones of torch, have what they were made of."""
NOT_DEFINITION = frozenset({"__annotations__", "__dict__", "__doc__", "__module__", "__qualname__", "__weakref__"})


class Identity(NamedTuple):
    """The identity of a cell.

    Attributes:
        digest: hex digest of the definition, the weights and how they are used; equal digest = same cell type.
        definition: hex digest of all that the module is. What is loaded from files cannot compute it, but the rest.
    """

    digest: str
    definition: str


def identity_of(definition: Callable[..., Any], description: object) -> Identity:
    """Return the identity of a snapshot; ``description`` are plain values that say how it is used."""
    return _identity_of(definition, description, _TensorDigests())


def likeness_of(definition: Callable[..., Any], description: object) -> str:
    """Return a digest of the same, but of tensors by dtype and shape alone: cells of equal ones differ in their
    weights.
    """
    return _identity_of(definition, description, _TensorShapes()).digest


def _identity_of(definition: Callable[..., Any], description: object, tensors: _TensorDigests) -> Identity:
    digest = _Digest(tensors)
    try:
        digest.add(definition)
        written = digest.finish()
    except RecursionError:  # something nested deeper than the interpreter goes
        written = uuid.uuid4().hex
    return _identity(written, weights_of(definition).values(), description, tensors)


def identity_with(definition: str, weights: Iterable[torch.Tensor], description: object) -> Identity:
    """Return the identity of a cell with the digest of its definition and these weights, in the order of the
    snapshot's.
    """
    return _identity(definition, weights, description, _TensorDigests())


def _identity(
    definition: str, weights: Iterable[torch.Tensor], description: object, tensors: _TensorDigests
) -> Identity:
    whole = _Digest(tensors)
    whole.add([definition, list(weights), description])
    return Identity(whole.finish(), definition)


class _TensorDigests:
    """Digests of tensors by dtype, shape and values. Each tensor is read once, however often it is met."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, bytes]] = {}

    def of(self, tensor: torch.Tensor) -> bytes:
        """Return the digest; one like no other for a tensor of a kind that has no values here."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, self._read(tensor)
        return self._known[id(tensor)][1]

    def _read(self, tensor: torch.Tensor) -> bytes:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}:".encode())
        try:
            dense = tensor.detach().cpu()
            dense = dense if dense.layout is torch.strided else dense.to_dense()
            flat = dense.resolve_conj().resolve_neg().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        except Exception:
            return uuid.uuid4().bytes
        return digest.digest()


class _TensorShapes(_TensorDigests):
    """Digests of tensors by dtype and shape alone."""

    def _read(self, tensor: torch.Tensor) -> bytes:
        return f"{tensor.dtype} {tuple(tensor.shape)}".encode()


class _Digest:
    """Digests values by what they are. Code is queued and digested at the end, each function and class once.

    Each object is read once, whatever number of others hold it. An object outside cycles counts by its value, whether
    two objects hold the same one or equal ones. A part of a cycle that is met again counts as the one met before.
    """

    def __init__(self, tensors: _TensorDigests, open_: Mapping[int, int] | None = None) -> None:
        self._hash, self._tensors = hashlib.sha256(), tensors
        self._numbers: dict[int, int] = {}
        self._queue: list[Any] = []
        self._open = dict(open_ or {})  # how deep lies what is being read
        self._reaches = len(self._open)  # the depth of the highest object that a part of the current one leads back to
        self._known: dict[int, tuple[object, bytes]] = {}
        self._modules: set[tuple[str, frozenset[str]]] = set()

    def finish(self) -> str:
        """Return the digest of all that was added."""
        done = 0
        while done < len(self._queue):
            definition = self._queue[done]
            done += 1
            if isinstance(definition, type):
                self._add_class(definition)
            else:
                self._add_function(definition)
        return self._hash.hexdigest()

    def add(self, value: object) -> None:
        """Add any value."""
        if isinstance(value, BY_TEXT) and not isinstance(value, enum.Enum):
            self._write(type(value).__name__, repr(value).encode())
        elif isinstance(value, float):
            self._write("float", struct.pack("<d", value))
        elif isinstance(value, torch.Tensor):
            self._write("tensor", self._tensors.of(value))
        elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            self._write(f"array {value.dtype!r} {value.shape}", value.tobytes())
        elif isinstance(value, type) or _is_function(value):
            self._refer(value)
        elif isinstance(value, CodeType):
            self._add_code(value)
        elif isinstance(value, ModuleType):
            self._write("module", value.__name__.encode())
        elif id(value) in self._open:
            self._write("cycle", str(len(self._open) - self._open[id(value)]).encode())
            self._reaches = min(self._reaches, self._open[id(value)])
        else:
            if id(value) not in self._known:
                self._known[id(value)] = value, self._read(value)
            self._write("object", self._known[id(value)][1])

    def _read(self, value: object) -> bytes:
        """Return a digest of an object's parts; for a part of a cycle, from its second time on, a number."""
        depth, outer, reached = len(self._open), self._hash, self._reaches
        self._hash, self._reaches = hashlib.sha256(), depth
        self._open[id(value)] = depth
        self._add_structure(value)
        del self._open[id(value)]
        digest, is_part_of_cycle = self._hash.digest(), self._reaches < depth
        self._hash, self._reaches = outer, min(reached, self._reaches)
        if is_part_of_cycle:
            outer.update(digest)
            return f"part {len(self._known)}".encode()
        return digest

    def _write(self, tag: str, data: bytes | memoryview = b"") -> None:
        self._hash.update(f"{tag}:{len(data)}:".encode())
        self._hash.update(data)

    def _add_structure(self, value: object) -> None:
        """Add what consists of other values."""
        if isinstance(value, FunctionSnapshot):
            self._write("function snapshot")
            self._add_function(value.function, value.captured())
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, weakref.ReferenceType):
            self._write("weak reference")
            self.add(value())
        elif isinstance(value, MethodType):
            self._write("method")
            self.add(value.__self__)
            self.add(value.__func__)
        elif isinstance(value, _GeneratorContextManager):  # one that decorates a function makes itself anew of these
            self._write("context manager")
            self._add_all("made of", [value.func, value.args, value.kwds])
        elif type(value) in (tuple, list, torch.Size):
            self._add_all(type(value).__name__, value)
        elif isinstance(value, set | frozenset):
            self._add_all("set", sorted(map(self._digest_alone, value)))
        elif type(value) is dict:
            self._add_all("dict", [part for pair in value.items() for part in pair])
        else:
            self._add_object(value)

    def _add_all(self, tag: str, values: Any) -> None:
        self._write(f"{tag} {len(values)}")
        for value in values:
            self.add(value)

    def _digest_alone(self, value: object) -> str:
        digest = _Digest(self._tensors, self._open)
        digest.add(value)
        return digest.finish()

    def _add_module(self, module: nn.Module) -> None:
        """Add a module: its class, attributes, hooks, weights and submodules."""
        self._write("nn.Module in training" if module.training else "nn.Module")  # some stay in it
        self.add(type(module))
        attributes = {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}
        self.add(dict(sorted(attributes.items())))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            self._add_all("hooks", list(hooks.values()))
        self.add({**module._parameters, **module._buffers})
        self.add(dict(module._modules))

    def _add_object(self, value: object) -> None:
        """Add any other object by the parts that pickle would write, or as itself alone."""
        try:
            parts = value.__reduce_ex__(2)
        except Exception:
            self._write("unlike any other", uuid.uuid4().bytes)
            return
        self.add(type(value))
        # Items of lists and dicts come as iterators.
        self.add(parts if isinstance(parts, str) else [list(p) if isinstance(p, Iterator) else p for p in parts])

    def _refer(self, definition: Any) -> None:
        """Add a function or class by its name if it is a library's, else by a number, and queue it."""
        for original in ORIGINALS:
            definition = getattr(definition, original, definition)
        while not isinstance(definition, type | FunctionType) and hasattr(definition, "__wrapped__"):
            definition = definition.__wrapped__  # a cache before a function
        if is_of_a_library(definition) or not isinstance(definition, type | FunctionType):
            home = getattr(definition, "__module__", None) or ""
            name = getattr(definition, "__qualname__", None) or getattr(definition, "__name__", repr(definition))
            self._write("library", f"{home}.{name}".encode())
            if isinstance(definition, FunctionType):
                self._add_enclosed(definition)
            elif (owner := owner_of(definition)) is not None:
                self.add(owner)
            return
        if id(definition) not in self._numbers:
            self._numbers[id(definition)] = len(self._queue)
            self._queue.append(definition)
        self._write("definition", str(self._numbers[id(definition)]).encode())

    def _add_function(self, function: FunctionType, captured: Mapping[str, object] | None = None) -> None:
        """Add a function's code and what it uses; ``captured`` are values in place of those it has."""
        self.add(function.__code__)
        if captured is None:
            self._add_enclosed(function)
            self.add([function.__defaults__, function.__kwdefaults__])
            captured = {}
        names = _names_in(function.__code__)
        for key, value in captured.items():
            self._write("captured", key.encode())
            self._add_used(value, names, is_ready_made=False)
        for name, value in used_globals(function).items():
            if not name.isidentifier():  # of a tool that rewrites code, such as pytest's in an assert
                continue
            self._write("global", name.encode())
            if f"global_{name}" not in captured:
                self._add_used(value, names, is_installed(function))

    def _add_used(self, value: object, names: frozenset[str], is_ready_made: bool) -> None:
        """Add what code with these names in it finds in a global."""
        is_code = _is_function(value) or isinstance(value, type)
        if isinstance(value, ModuleType):
            self._add_parts(value, names)
        elif is_code or not is_ready_made or _is_constant(value) or isinstance(value, torch.Tensor | nn.Module):
            self.add(value)

    def _add_parts(self, module: ModuleType, names: frozenset[str]) -> None:
        """Add a module of code and, of the user's own, what it has of these names."""
        self.add(module)
        if (module.__name__, names) in self._modules or is_library(module.__name__):
            return
        self._modules.add((module.__name__, names))
        is_ready_made = lies_installed(module)
        for name in sorted(names & vars(module).keys()):
            self._write("attribute", name.encode())
            self._add_used(vars(module)[name], names, is_ready_made)

    def _add_enclosed(self, function: FunctionType) -> None:
        names = _names_in(function.__code__)
        for cell in function.__closure__ or ():
            self._write("enclosed")
            self._add_used(cell.cell_contents if has_contents(cell) else None, names, is_ready_made=False)

    def _add_class(self, kind: type) -> None:
        """Add a class of the user: its bases, methods and attributes."""
        self._write("class", kind.__qualname__.encode())
        self._add_all("bases", kind.__bases__ if type(kind) is type else (*kind.__bases__, type(kind)))
        is_ready_made = is_installed(kind)
        for name, value in sorted(vars(kind).items()):
            if name in NOT_DEFINITION:
                continue
            is_plain = not (is_ready_made or name == "_abc_impl" or (name.startswith("__") and name.endswith("__")))
            for part in _parts_of_attribute(value, is_plain):
                self._write("attribute", name.encode())
                self.add(part)

    def _add_code(self, code: CodeType) -> None:
        self._write("code", code.co_code)
        self.add([code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags])
        self.add([code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars])
        self._add_all("constants", code.co_consts)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type | nn.Module | MethodType) and hasattr(value, "__qualname__")


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, (*BY_TEXT, float, enum.Enum, np.generic))


def _parts_of_attribute(value: object, is_plain: bool) -> list[object]:
    """Return the parts of a class attribute that count: code, constants and tensors; if it ``is_plain``, any value."""
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset) if part is not None]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, MemberDescriptorType | GetSetDescriptorType):
        return []
    is_known = isinstance(value, FunctionType | torch.Tensor | nn.Module) or _is_constant(value)
    return [value] if is_plain or is_known else []


def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals in code and in what it defines."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)
