"""Finds what functions use from outside themselves, and tells the user's own data from that of libraries."""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinMethodType, CodeType, FunctionType, MethodWrapperType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

LIBRARIES = frozenset({"torch", "numpy", "numba", "llvmlite", "networkx", *sys.stdlib_module_names})
OWN, INSTALLED = "cellrt", frozenset({"site-packages", "dist-packages"})
OF_PYTHON = sysconfig.get_path("stdlib")
BY_VALUE = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
"""Kinds of values in which nothing lies."""
CODE = (type, FunctionType, ModuleType, nn.Module, torch.Tensor)
"""Kinds of values that are no data, whatever their attributes are."""


def used_globals(function: FunctionType) -> dict[str, object]:
    """Return the globals that a function's code reads, by name in order."""
    names = sorted(_global_names(function.__code__, "LOAD_GLOBAL"))
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def assigned_globals(function: FunctionType) -> frozenset[str]:
    """Return the names of the globals that a function's code assigns."""
    return _global_names(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL")


def constants_of(function: FunctionType) -> dict[str, object]:
    """Return the data that a function of the user's finds in its globals; but for variables, which code of its module
    assigns by ``global``.
    """
    if is_of_a_library(function) or is_installed(function):
        return {}
    found = {name: value for name, value in used_globals(function).items() if is_data(value)}
    if not found:
        return {}
    others = [value for value in function.__globals__.values() if isinstance(value, FunctionType)]
    variables = frozenset[str]().union(*map(assigned_globals, (function, *others)))
    return {name: value for name, value in found.items() if name not in variables}


def is_data(value: object) -> bool:
    """Return whether a value is of numbers, texts and arrays alone, of at least one: in tuples, lists, sets, dicts, and
    objects of the user's classes.

    An empty list is none: it is where code notes something. Nor is what holds a library's object, such as a lock.
    """
    seen: set[int] = set()
    left, is_found = [value], False
    while left:
        part = left.pop()
        if isinstance(part, (*BY_VALUE, np.generic)) or (isinstance(part, np.ndarray) and part.dtype != object):
            is_found = True
        elif id(part) not in seen:
            seen.add(id(part))
            inner = _parts_of_data(part)
            if inner is None:
                return False
            left += inner
    return is_found


def _parts_of_data(value: object) -> Iterable[object] | None:
    """Return the parts of a container or an object of data; None if it is another kind of value."""
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if isinstance(value, tuple) or type(value) in (list, set, frozenset):
        return value  # type: ignore[return-value]
    if isinstance(value, CODE) or hasattr(value, "__del__") or not hasattr(value, "__dict__"):
        return None
    is_plain = isinstance(value, SimpleNamespace) or not is_of_a_library(type(value))
    return vars(value).values() if is_plain else None


@functools.lru_cache(maxsize=4096)  # the same functions of torch are met in every module
def _global_names(code: CodeType, *operations: str) -> frozenset[str]:
    wanted = {dis.opmap[name] for name in operations}
    names = set()
    if not wanted.isdisjoint(code.co_code[::2]):  # to disassemble takes long
        names = {step.argval for step in dis.get_instructions(code) if step.opname in operations}
    inner = [_global_names(constant, *operations) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names).union(*inner)


def has_contents(cell: Any) -> bool:
    """Return whether a variable of a closure was assigned."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def owner_of(function: object) -> object:
    """Return the object that a built-in method is bound to, as in ``table.get`` or ``weight.mul``; None if there is
    none.
    """
    owner = getattr(function, "__self__", None) if isinstance(function, BuiltinMethodType | MethodWrapperType) else None
    is_function = isinstance(owner, type | ModuleType) or type(owner).__name__.startswith(("PyCapsule", "pybind11_"))
    return None if is_function else owner


def is_of_a_library(definition: Any) -> bool:
    """Return whether a function or class is a library's; a class that a library derives from one of the user's is
    not, nor is a function of the user's that took over a library's name (``functools.wraps``).
    """
    parts = definition.__mro__ if isinstance(definition, type) else (definition,)
    homes = [getattr(part, "__module__", None) for part in parts]
    if isinstance(definition, FunctionType):
        homes.append(definition.__globals__.get("__name__"))
    return all(map(is_library, homes)) and (
        definition.__module__ != "builtins" or hasattr(builtins, definition.__name__)  # else ``exec`` made it
    )


def is_library(name: object) -> bool:
    """Return whether a module of code of this name is a library's; the user's own ``token.py`` is not Python's."""
    top = str(name or "").partition(".")[0]
    if top not in sys.stdlib_module_names:
        return top in LIBRARIES
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or file.startswith(OF_PYTHON)


def is_installed(definition: Any) -> bool:
    """Return whether a function or class is of an installed package, or of this one."""
    home = sys.modules.get(getattr(definition, "__module__", None) or "")
    return home is not None and lies_installed(home)


def lies_installed(module: ModuleType) -> bool:
    """Return whether a module of code is of an installed package, or of this one."""
    is_own = module.__name__.partition(".")[0] == OWN
    return is_own or not INSTALLED.isdisjoint(Path(getattr(module, "__file__", None) or "").parts)
