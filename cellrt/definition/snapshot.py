"""A private copy of a module or function with every tensor it uses, which later training does not reach."""

from __future__ import annotations

import copy
import functools
import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from cellrt.definition.functions import (
    BY_VALUE,
    assigned_globals,
    constants_of,
    has_contents,
    is_data,
    is_of_a_library,
    owner_of,
    used_globals,
)
from cellrt.definition.uncompiled import HINT, is_compiled, original_of, put_back_originals
from cellrt.errors import DefinitionError

Value = TypeVar("Value")
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
CONSTANT, OF_WEIGHTS = "_is_constant_to_cellrt", "is_of_weights_alone"
"""Names of attributes: of a constant weight, and of a class whose values are made of weights alone."""
_SETTLED: WeakSet[nn.Module] = WeakSet()
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""The attributes in which a module has functions that run with it."""


@torch.inference_mode(False)  # the caller may be in it, and what was made there is not for other threads to write to
def take_snapshot(name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a private copy of a cell's module or function, in evaluation mode, its weights without gradients, and
    without ``torch.compile``.

    A function's tensors, modules and data (``is_data``) are copied with it: those in its closure, defaults and globals,
    in whatever they lie there, and those of functions that it finds there. What a module's methods find in globals is
    not. Raise DefinitionError if something cannot be copied.
    """
    try:
        copied = _copy_callable(definition)
        _settle(copied)
    except Exception as error:
        raise DefinitionError(f"cell {name!r}: its weights cannot be copied: {error}") from error
    return copied


def replica_of(definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a snapshot that shares its weights: what a call leaves in attributes and containers, another
    thread that calls another copy does not find there.

    Weights are the parameters and buffers of modules, which no call may write to; any other tensor may be scratch. What
    is made of weights alone is shared with them, if its class says so (``OF_WEIGHTS``).
    """
    parts = list(_parts_of_copy(definition))
    modules = [part for part in parts if isinstance(part, nn.Module)]
    weights = {id(tensor): tensor for module in modules for tensor in weights_of(module).values()}
    derived = {id(part): part for part in parts if getattr(type(part), OF_WEIGHTS, False) is True}
    with torch.inference_mode():
        made = copy.deepcopy(definition, {**weights, **derived, **_code_in(parts)})
    _SETTLED.update(part for part in _parts_of_copy(made) if isinstance(part, nn.Module))
    return made


def copy_of(definition: Value) -> Value:
    """Return a copy of a snapshot, weights and all, but for those that are constant."""
    parts = list(_parts_of_copy(definition))
    return copy.deepcopy(definition, {**_code_in(parts), **_constants_in(parts)})


def set_constant(weight: torch.Tensor) -> None:
    """Let snapshots share a weight instead of copying it: no other code has it, or will ever write to it."""
    setattr(weight, CONSTANT, True)


def _constants_in(parts: Iterable[object]) -> dict[int, torch.Tensor]:
    """Return the constant weights of modules by their identity."""
    modules = (part for part in parts if isinstance(part, nn.Module))
    held = (tensor for module in modules for of in (module._parameters, module._buffers) for tensor in of.values())
    return {id(tensor): tensor for tensor in held if tensor is not None and getattr(tensor, CONSTANT, False)}


def is_settled(module: nn.Module) -> bool:
    """Return whether a module is part of a snapshot or of a replica: its weights are what they were when it was first
    used.
    """
    return module in _SETTLED


def weights_of(definition: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a snapshot by name, each once; a function that holds no tensor has none."""
    if not isinstance(definition, nn.Module):
        return {}
    return dict((*definition.named_parameters(), *definition.named_buffers()))


class FunctionSnapshot(nn.Module):
    """A function with its own copies of what it captured; tensors are buffers and modules submodules here."""

    def __init__(self, function: FunctionType, memo: dict[int, Any] | None = None) -> None:
        super().__init__()
        self.function = function
        self._made: FunctionType | None = None
        self._names: list[str] = []
        self._values: dict[str, Any] = {}
        memo = {} if memo is None else memo
        memo[id(function)] = self  # what it captured may find it
        captured = {key: value for key, value in _captures(function).items() if value is not function}
        for key, value in _copy_with_code(captured, memo).items():
            self._names.append(key)
            value = _copy_callable(value) if isinstance(value, FunctionType) else value
            if isinstance(value, torch.Tensor):
                self.register_buffer(key, value.detach())
            elif isinstance(value, nn.Module) and "_globals" in vars(
                value
            ):  # else it is about to be made, and calls this
                self.add_module(key, value)
            else:
                self._values[key] = value
        self._assigned = assigned_globals(function) - globals_of(captured).keys()
        self._globals = _Globals(function.__globals__)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionSnapshot:
        made = FunctionSnapshot.__new__(FunctionSnapshot)
        memo |= {id(self): made, **_code_in(self._values)}
        nn.Module.__setstate__(made, copy.deepcopy(self.__getstate__(), memo))
        return made

    def captured(self) -> dict[str, Any]:
        """Return the captured values as they are now."""
        return {key: self._values[key] if key in self._values else getattr(self, key) for key in self._names}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the captured values in place of its own."""
        made = self._made or self._rebind()
        if not self._assigned:
            return made(*args, **kwargs)
        try:
            return made(*args, **kwargs)
        finally:
            self._globals.give_back(self._assigned)

    def _rebind(self) -> FunctionType:
        captured = self.captured()
        self._globals.update(globals_of(captured))
        made = rebound(self.function, captured, self._globals)
        if all(map(is_data, captured.values())):  # which nobody moves to a device
            self._made = made
        return made


def rebound(function: FunctionType, captured: Mapping[str, Any], names: dict[str, Any]) -> FunctionType:
    """Return the function with these captured values and globals."""
    names_within = [f"closure_{name}" for name in function.__code__.co_freevars]
    closure = tuple(CellType(captured[name]) if name in captured else CellType() for name in names_within)
    defaults = captured.get("defaults", function.__defaults__)
    made = FunctionType(function.__code__, names, function.__name__, defaults, closure)
    made.__kwdefaults__ = captured.get("kwdefaults", function.__kwdefaults__)
    for name, variable in zip(names_within, closure):
        if name not in captured:  # it is the function's own
            variable.cell_contents = made
    if function.__globals__.get(function.__name__) is function:
        names[function.__name__] = made
    return made


def globals_of(captured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the captured globals by their names."""
    return {key.removeprefix("global_"): value for key, value in captured.items() if key.startswith("global_")}


class MethodSnapshot(nn.Module):
    """A method of a module, bound to its own copy of the module."""

    def __init__(self, owner: nn.Module, method: str) -> None:
        super().__init__()
        self.owner = copy.deepcopy(owner)
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return getattr(self.owner, self.method)(*args, **kwargs)


class _Globals(dict[str, Any]):
    """A function's globals, some of them replaced."""

    def __init__(self, original: dict[str, Any]) -> None:
        super().__init__()
        self._original = original

    def __missing__(self, name: str) -> Any:
        return self._original[name]

    def give_back(self, names: Iterable[str]) -> None:
        """Write captured globals back to their module, if code assigns to these names."""
        for name in names:
            if name in self:
                self._original[name] = self.pop(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Globals:
        return _Globals(self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals_of_module, (self._original["__name__"],)


def _globals_of_module(name: str) -> _Globals:
    return _Globals(vars(importlib.import_module(name)))


def _copy_callable(definition: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(definition, FunctionType):
        return FunctionSnapshot(definition) if _captures(definition) else definition
    if isinstance(definition, MethodType) and isinstance(definition.__self__, nn.Module):
        return MethodSnapshot(definition.__self__, definition.__name__)
    if isinstance(definition, functools.partial):
        args, keywords = _copy_with_code((definition.args, definition.keywords), {})
        return functools.partial(_copy_callable(definition.func), *args, **keywords)
    return _copy_with_code(definition, {})


def _copy_with_code(value: Value, memo: dict[int, Any]) -> Value:
    """Return a deep copy in which functions of the user's that find weights find copies of them, wherever they lie in
    it.

    ``memo``: as ``deepcopy`` has it, of all that is copied together.
    """
    parts = list(_parts_of_copy(value, is_code_wanted=True))
    memo |= {**_code_in(parts), **_constants_in(parts)}
    for part in parts:
        if isinstance(part, torch.Tensor) and part.grad_fn is not None and id(part) not in memo:
            memo[id(part)] = part.detach().clone()  # deepcopy refuses what was computed
    for part in parts:
        owner = owner_of(part)
        if owner is not None and (is_data(owner) or _holds_own(owner)):
            memo[id(part)] = getattr(copy.deepcopy(owner, memo), part.__name__)  # type: ignore[attr-defined]
    for part in parts:
        if isinstance(part, FunctionType) and id(part) not in memo and _is_to_be_copied(part):
            FunctionSnapshot(part, memo)
    for part in parts:
        if isinstance(part, MethodType) and isinstance(memo.get(id(part.__func__)), FunctionSnapshot):
            owner = copy.deepcopy(part.__self__, memo)
            memo[id(part)] = MethodType(memo[id(part.__func__)], owner)
            names = [name for name, held in getattr(part.__self__, "__dict__", {}).items() if held is part]
            vars(owner).update(dict.fromkeys(names, memo[id(part)]))  # it was copied before there was this
    return copy.deepcopy(value, memo)


def _is_to_be_copied(function: FunctionType) -> bool:
    return not is_of_a_library(function) and not is_compiled(function) and _holds_own(function)


def _captures(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function holds beyond its code: ``closure_x``, and its own ``global_x`` and defaults."""
    captured: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        captured[f"closure_{name}"] = original_of(cell.cell_contents)
    constants = constants_of(function)
    for name, value in used_globals(function).items():
        if name in constants or is_compiled(value) or _holds_own(value):
            captured[f"global_{name}"] = original_of(value)
    for key, defaults in ("defaults", function.__defaults__), ("kwdefaults", function.__kwdefaults__):
        if _holds_own(defaults) or (defaults and _may_change(defaults)):
            captured[key] = defaults
    return captured


def _may_change(defaults: tuple[object, ...] | dict[str, object]) -> bool:
    """Return whether a function's defaults include data that could be written to."""
    values = defaults.values() if isinstance(defaults, dict) else defaults
    return any(not isinstance(value, BY_VALUE) and is_data(value) for value in values)


def _holds_own(value: object) -> bool:
    """Return whether a value contains something that a cell copies: a tensor, a module, or data in a function's
    globals.
    """
    return any(
        isinstance(part, torch.Tensor | nn.Module) or (isinstance(part, FunctionType) and constants_of(part))
        for part in _parts_of(value)
    )


def _parts_of(value: object) -> Iterator[object]:
    """Yield a value and what lies in it, each once; not what lies in tensors and modules."""
    seen: set[int] = set()
    left = [value]
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, BY_VALUE):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, Mapping):
            left += part.values()
        elif isinstance(part, list | tuple | set | frozenset | deque):
            left += part
        elif isinstance(part, functools.partial):
            left += [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, MethodType):
            left.append(part.__self__)
            name = getattr(part.__func__, "__name__", "")
            if getattr(type(part.__self__), name, None) is not part.__func__:  # else it is the class's
                left.append(part.__func__)
        elif (owner := owner_of(part)) is not None:
            left.append(owner)
        elif isinstance(part, FunctionType):
            if not is_of_a_library(part):
                left += [cell.cell_contents for cell in part.__closure__ or () if has_contents(cell)]
                left += [part.__defaults__, part.__kwdefaults__, *used_globals(part).values()]
        elif isinstance(part, type | torch.Tensor | nn.Module | ModuleType):
            continue
        elif isinstance(part, SimpleNamespace) or not is_of_a_library(type(part)):
            left += getattr(part, "__dict__", {}).values()


def _code_in(value: object) -> dict[int, Any]:
    """Return the modules of code in a value by their identity, as ``deepcopy`` knows what is not to be copied."""
    return {id(part): part for part in _parts_of(value) if isinstance(part, ModuleType)}


def _settle(definition: object) -> None:
    """Put modules in evaluation mode and weights without gradients, wherever they lie in a copy."""
    for part in _parts_of_copy(definition):
        if isinstance(part, nn.Module):
            if any(isinstance(module, torch.jit.ScriptModule) for module in part.modules()):
                raise TypeError("a part is scripted (torch.jit): give the module that it was made of")
            put_back_originals(part)
            if is_compiled(part):
                raise TypeError(HINT)
            part.eval().requires_grad_(False)
            for module in part.modules():
                _register_tensors(module)
                _SETTLED.add(module)
        elif isinstance(part, torch.Tensor) and part.requires_grad:
            part.requires_grad_(False)


def _parts_of_copy(definition: object, is_code_wanted: bool = False) -> Iterator[object]:
    """Yield all that lies in a copy; of a module also what lies in its attributes, but not in what it shares with
    others.

    ``is_code_wanted``: functions, too.
    """
    seen: set[int] = set()
    left = [definition]
    while left:
        for part in _parts_of(left.pop()):
            if id(part) in seen or (isinstance(part, FunctionType) and not is_code_wanted):
                continue
            seen.add(id(part))
            yield part
            if isinstance(part, nn.Module):
                own = {key: value for key, value in vars(part).items() if key not in OF_EVERY_MODULE}
                left += [
                    value
                    for value in own.values()
                    if not isinstance(value, _Globals) and (is_code_wanted or not isinstance(value, FunctionType))
                ]
                left += [hook for hooks in HOOKS for hook in vars(part)[hooks].values()]
                left += part.children()


def _register_tensors(module: nn.Module) -> None:
    """Make a module's plain tensor attributes buffers, so that they move and are saved with it; so with functions."""
    for key, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor):
            delattr(module, key)
            module.register_buffer(key, value.detach(), persistent=False)
        elif isinstance(value, FunctionSnapshot):
            if hasattr(type(module), key) or any(part is module for part in value.modules()):
                continue  # in place of a method, or of a module that it captured itself
            delattr(module, key)
            module.add_module(key, value)
