"""A private copy of a module or function with every tensor it uses, which later training does not reach."""

from __future__ import annotations

import copy
import dis
import functools
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from cellrt.errors import DefinitionError


def take_snapshot(name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """A private copy of a cell's module or function, in evaluation mode, its weights without gradients.

    A function's tensors and modules (from its closure, defaults and globals) are copied with it. Raises DefinitionError
    if something cannot be copied.
    """
    try:
        copied = _copy_callable(definition)
        _settle(copied)
    except Exception as error:
        raise DefinitionError(f"cell {name!r}: its weights cannot be copied: {error}") from error
    return copied


def weights_of(definition: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a snapshot by name, each once; a function that holds no tensor has none."""
    if not isinstance(definition, nn.Module):
        return {}
    return dict((*definition.named_parameters(), *definition.named_buffers()))


class FunctionSnapshot(nn.Module):
    """A function with its own copies of what it captured; tensors are buffers and modules submodules here."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__()
        self.function = function
        self._names: list[str] = []
        self._values: dict[str, Any] = {}
        for key, value in copy.deepcopy(_captures(function)).items():
            self._names.append(key)
            value = _copy_callable(value) if isinstance(value, FunctionType) else value
            if isinstance(value, torch.Tensor):
                self.register_buffer(key, value.detach())
            elif isinstance(value, nn.Module):
                self.add_module(key, value)
            else:
                self._values[key] = value
        self._globals = _Globals(function.__globals__)

    def captured(self) -> dict[str, Any]:
        """The captured values as they are now."""
        return {key: self._values[key] if key in self._values else getattr(self, key) for key in self._names}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with the captured values in place of its own."""
        captured = self.captured()
        self._globals.update(globals_of(captured))
        return rebound(self.function, captured, self._globals)(*args, **kwargs)


def rebound(function: FunctionType, captured: Mapping[str, Any], names: dict[str, Any]) -> FunctionType:
    """The function with these captured values and globals."""
    closure = tuple(CellType(captured[f"closure_{name}"]) for name in function.__code__.co_freevars)
    defaults = captured.get("defaults", function.__defaults__)
    made = FunctionType(function.__code__, names, function.__name__, defaults, closure)
    made.__kwdefaults__ = captured.get("kwdefaults", function.__kwdefaults__)
    return made


def globals_of(captured: Mapping[str, Any]) -> dict[str, Any]:
    """The captured globals by their names."""
    return {key.removeprefix("global_"): value for key, value in captured.items() if key.startswith("global_")}


class MethodSnapshot(nn.Module):
    """A method of a module, bound to its own copy of the module."""

    def __init__(self, owner: nn.Module, method: str) -> None:
        super().__init__()
        self.owner = copy.deepcopy(owner)
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method."""
        return getattr(self.owner, self.method)(*args, **kwargs)


class _Globals(dict[str, Any]):
    """A function's globals, some of them replaced."""

    def __init__(self, original: dict[str, Any]) -> None:
        super().__init__()
        self._original = original

    def __missing__(self, name: str) -> Any:
        return self._original[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Globals:
        return _Globals(self._original)


def used_globals(function: FunctionType) -> dict[str, object]:
    """The globals that a function's code reads, by name in order."""
    names = sorted(_global_names(function.__code__))
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _global_names(code: CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def _copy_callable(definition: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(definition, FunctionType):
        return FunctionSnapshot(definition) if _captures(definition) else definition
    if isinstance(definition, MethodType) and isinstance(definition.__self__, nn.Module):
        return MethodSnapshot(definition.__self__, definition.__name__)
    if isinstance(definition, functools.partial):
        args, keywords = copy.deepcopy((definition.args, definition.keywords))
        return functools.partial(_copy_callable(definition.func), *args, **keywords)
    return copy.deepcopy(definition)


def _captures(function: FunctionType) -> dict[str, Any]:
    """What a function holds beyond its code: ``closure_x``, ``global_x`` (tensors and modules only), defaults."""
    captured: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        captured[f"closure_{name}"] = cell.cell_contents
    for name, value in used_globals(function).items():
        if isinstance(value, torch.Tensor | nn.Module):
            captured[f"global_{name}"] = value
    if _has_tensor(function.__defaults__):
        captured["defaults"] = function.__defaults__
    if _has_tensor(function.__kwdefaults__):
        captured["kwdefaults"] = function.__kwdefaults__
    return captured


def _has_tensor(values: tuple[Any, ...] | Mapping[str, Any] | None) -> bool:
    items = values.values() if isinstance(values, Mapping) else values or ()
    return any(isinstance(item, torch.Tensor | nn.Module) for item in items)


def _settle(definition: object) -> None:
    """Puts modules in evaluation mode, also those given to a partial function."""
    if isinstance(definition, nn.Module):
        definition.eval().requires_grad_(False)
        for part in definition.modules():
            _register_tensors(part)
    elif isinstance(definition, functools.partial):
        for part in (definition.func, *definition.args, *definition.keywords.values()):
            _settle(part)


def _register_tensors(module: nn.Module) -> None:
    """Makes a module's plain tensor attributes buffers, so that they move and are saved with it."""
    for key, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor):
            delattr(module, key)
            module.register_buffer(key, value.detach(), persistent=False)
