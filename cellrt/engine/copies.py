"""Copies of requests that are unfolded later than they were handed in: their owner may change them meanwhile.

Audio callbacks and environments of actors, for example, hand in a buffer that is filled again and again. So a request
that is kept for later is copied first; one that this module cannot copy by itself is unfolded at once, or copied by
Python's ``copy``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

import numpy as np
import torch

from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.errors import CellrtError, RequestError

CONSTANTS = frozenset((bool, bytes, complex, float, int, str, type(None)))
"""The types of objects that cannot change."""
LIKE_TENSORS = (torch.Tensor, torch.nn.Parameter)
LISTS = (list, tuple, torch.Tensor, np.ndarray)
"""The types whose items are all there: no code of the owner's runs while one goes from item to item."""
NOT_PLAIN: Final = object()
"""The value in place of a copy: the request contains other objects."""


class _NotPlainError(Exception):
    """An error: an object is no tensor, array, number or text, nor a list, tuple or dict of these."""


def plain_copy(request: Any) -> Any:
    """Return a copy of a request of tensors, arrays, numbers and texts in lists, tuples and dicts; else NOT_PLAIN."""
    try:
        return _copied(request, {})
    except (_NotPlainError, RecursionError):
        return NOT_PLAIN


def deep_copy(request: Any) -> Any:
    """Return a copy of any request, which takes long if it has objects of its owner's.

    Raise RequestError if it cannot be copied.
    """
    made = plain_copy(request)
    if made is not NOT_PLAIN:
        return made
    try:
        return copy.deepcopy(request)
    except Exception as error:
        raise RequestError(
            f"the request is read later than it is handed in, and so must be copied, but {type(request).__name__} "
            f"cannot be: {type(error).__name__}: {error}"
        ) from error


def listed(requests: Iterable[Any]) -> list[Any]:
    """Return the items of an iterable, each as it was when it was given. Raise RequestError if one cannot be copied."""
    if isinstance(requests, LISTS):
        return list(requests)
    return [deep_copy(request) for request in requests]


def begun(submit: Callable[[], RequestFuture]) -> Coroutine[Any, Any, Result]:
    """Submit a request now; return a coroutine that gives its results, or raises the error of submitting it."""
    made: RequestFuture | CellrtError
    try:
        made = submit()
    except CellrtError as error:
        made = error
    return _outcome_of(made)


async def _outcome_of(made: RequestFuture | CellrtError) -> Result:
    if isinstance(made, CellrtError):
        try:
            raise made
        finally:
            del made  # else the error and this frame would hold each other
    return await as_awaitable(made)


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Return a plain copy of a value; ``known`` are the copies so far, by the ids of their originals."""
    kind = type(value)
    if kind in CONSTANTS or isinstance(value, np.number | np.bool_):
        return value
    made = known.get(id(value))
    if made is not None:
        return made
    if kind in LIKE_TENSORS:
        made = (value.detach() if value.requires_grad else value).clone()
    elif kind is np.ndarray and value.dtype != object:
        made = value.copy()
    elif kind is list:
        made = known[id(value)] = []
        made += value if CONSTANTS.issuperset(map(type, value)) else [_copied(item, known) for item in value]
    elif kind is dict:
        made = known[id(value)] = {}
        for name, item in value.items():
            made[name] = _copied(item, known)
    elif kind is tuple:
        made = tuple([_copied(item, known) for item in value])
    elif issubclass(kind, tuple) and hasattr(value, "_make"):
        made = value._make([_copied(item, known) for item in value])
    else:
        raise _NotPlainError
    known[id(value)] = made
    return made
