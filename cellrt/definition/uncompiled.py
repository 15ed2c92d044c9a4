"""Modules and functions as they were before ``torch.compile``.

A cell is run with any number of rows, by threads of the runtime, which would have it compiled anew again and again; and
cellrt compiles cells itself. So what ``torch.compile`` was given takes the place of what it made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

ORIGINAL_MODULE, ORIGINAL_FUNCTION = "_orig_mod", "_torchdynamo_orig_callable"
"""The attributes in which a compiled module, and a compiled function, keep the original."""
WRAPPERS_AT = os.path.join("torch", "_dynamo", "external_utils.py")
"""The file in which torch wraps a function of its own before it compiles it."""
MARK = "_is_torch_compile"
"""The attribute that ``torch.compile`` leaves on a module that it was given."""
LEFT_OUT = "torch.compile is left out, and what it was given runs: cellrt compiles cells itself (Engine(compile=...))"
HINT = "a part is compiled (torch.compile): give what it was made of; cellrt compiles cells itself"


def original_of(value: Any) -> Any:
    """Return the module or function that a compiled one was made of; any other value as it is."""
    while (original := _made_of(value)) is not None:
        value = original
    return value


def is_compiled(value: object) -> bool:
    """Return whether ``torch.compile`` made it."""
    return _made_of(value) is not None


def has_compiled(definition: object) -> bool:
    """Return whether ``torch.compile`` made a module or function, or a part of a module."""
    if is_compiled(definition):
        return True
    parts = definition.modules() if isinstance(definition, nn.Module) else ()
    return any(is_compiled(part) or _compiled_functions(part) for part in parts)


def put_back_originals(module: nn.Module) -> None:
    """Replace compiled parts by their originals, in a module that has no other owner.

    Raise TypeError for an attribute that is a compiled method of another object, or a function with a closure: it
    would go on with weights that later training reaches.
    """
    for part in [part for part in module.modules() if not is_compiled(part)]:
        vars(part).pop(MARK, None)
        children = vars(part)["_modules"]
        children.update({key: original_of(child) for key, child in children.items()})
        for key, value in _compiled_functions(part).items():
            _put_back_function(part, key, original_of(value))


def _compiled_functions(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are compiled functions."""
    return {key: value for key, value in vars(part).items() if is_compiled(value)}


def _put_back_function(owner: nn.Module, key: str, original: Callable[..., Any]) -> None:
    if isinstance(original, MethodType):
        if getattr(type(owner), key, None) is not original.__func__:
            raise TypeError(HINT)
        delattr(owner, key)  # the class has it
    elif getattr(original, "__closure__", None):
        raise TypeError(HINT)
    else:
        setattr(owner, key, original)


def _made_of(value: object) -> Any:
    if isinstance(value, nn.Module):
        return vars(value)["_modules"].get(ORIGINAL_MODULE) if type(value).__name__ == "OptimizedModule" else None
    if not isinstance(value, FunctionType):
        return None
    is_wrapper = value.__code__.co_filename.endswith(WRAPPERS_AT)
    return vars(value).get(ORIGINAL_FUNCTION) or (vars(value).get("__wrapped__") if is_wrapper else None)
