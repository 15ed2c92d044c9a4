"""Conversion of a request's tensors, arrays, numbers and lists of them to the bits of rows."""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state.copying import LARGE_BYTES
from cellrt.definition.bits import NUMPY_DTYPES, as_bits
from cellrt.definition.spec import RowSpec, conversion, describe
from cellrt.errors import RequestError
from cellrt.graph.symbols import Handle, Steps

# Tuples, because a union of types is made anew wherever it is written.
ARRAYS = (torch.Tensor, np.ndarray)
LISTS = (list, tuple)
NUMBERS = (int, float)

INTEGER, FLOAT, BOOL = (RowSpec((), dtype) for dtype in (torch.int64, torch.float32, torch.bool))
I4 = np.dtype(np.int32)
FEW = 256
"""Numbers that NumPy copies without giving up the interpreter lock: it begins with 500."""
TORCH_DTYPES = {numpy: dtype for dtype, numpy in NUMPY_DTYPES.items()}


def spec_of(value: object) -> RowSpec | None:
    """Return the spec of a number, tensor or array as a row; None for anything else.

    An int is int64, a float float32.
    """
    if isinstance(value, torch.Tensor):
        return RowSpec(tuple(value.shape), value.dtype)
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, np.ndarray | np.generic):
        return RowSpec(value.shape, TORCH_DTYPES[value.dtype]) if value.dtype in TORCH_DTYPES else None
    return INTEGER if isinstance(value, int) else FLOAT if isinstance(value, float) else None


def bits_of(spec: RowSpec, source: object) -> NDArray[Any]:
    """Return the bits (``as_bits``) of a source in the spec's dtype, in whatever shape it has; they may be its own
    memory.

    Integers are widened, Python's numbers converted if they fit. Raise RequestError with what was expected and got.
    """
    wanted = NUMPY_DTYPES.get(spec.dtype)
    if type(source) is np.ndarray and source.dtype is wanted:  # as each of these is one object for the whole process
        return source
    is_list = isinstance(source, LISTS)  # first: to ask whether something is a tensor takes as long as four others
    if is_list and source and not isinstance(source[0], NUMBERS) and isinstance(source[0], torch.Tensor):  # type: ignore[index]
        source, is_list = _stacked(spec, source), False  # type: ignore[arg-type]
    if not is_list and isinstance(source, torch.Tensor):
        if source.dtype != spec.dtype:
            if not _is_wider(spec.dtype, source.dtype):
                raise RequestError(f"expected {spec}, got {describe(source)}{conversion(spec.dtype, source.dtype)}")
            source = source.to(spec.dtype)
        try:
            return as_bits(source.detach().cpu() if source.requires_grad or not source.is_cpu else source)
        except (TypeError, RuntimeError):  # of a tensor without values, or with another layout
            raise RequestError(
                f"expected {spec}, got {describe(source)} with layout {source.layout} on device {source.device}"
            ) from None
    try:
        try:
            array = np.asarray(source)
        except RuntimeError:
            array = np.asarray(_readable(source))
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"expected {spec}, got {describe_source(source)}: {error}") from None
    if wanted is None:  # bfloat16, which NumPy does not have: what would do for float32 is rounded
        single = array if array.dtype == np.float32 else _converted(spec, np.dtype(np.float32), array, source)
        return as_bits(torch.from_numpy(np.array(single)).to(spec.dtype))
    return array if array.dtype == wanted else _converted(spec, np.dtype(wanted), array, source)


def bits_together(spec: RowSpec, parts: Sequence[Any]) -> NDArray[Any] | None:
    """Return the bits ``[parts, ...]`` of parts of one kind, converted at once; None if each must be looked at by
    itself.
    """
    kind = type(parts[0])
    if any(type(part) is not kind for part in parts):
        return None
    try:
        if kind is torch.Tensor or kind is np.ndarray:
            if any(part.dtype != parts[0].dtype for part in parts):
                return None
            return bits_of(spec, torch.stack(list(parts)) if kind is torch.Tensor else np.stack(parts))
        if kind in LISTS and parts[0] and isinstance(parts[0][0], NUMBERS):
            return _integers_together(parts) if _are_integers(spec, parts[0]) else bits_of(spec, list(parts))
    except (RequestError, RuntimeError, ValueError, TypeError, OverflowError):
        pass
    return None


def _are_integers(spec: RowSpec, part: object) -> bool:
    """Return whether this is the usual: a list of Python's integers that are to be int64."""
    return type(part) is list and type(part[0]) is int and spec.dtype == torch.int64


def integers_of(spec: RowSpec, source: object) -> NDArray[Any] | None:
    """Return a list of Python's integers as int64, in half of NumPy's time; None for anything else."""
    if type(source) is not list or not source or not _are_integers(spec, source):
        return None
    try:
        return np.frombuffer(array("q", source), np.int64)
    except (TypeError, OverflowError):
        return None


def _integers_together(parts: Sequence[Any]) -> NDArray[Any]:
    """Return several lists of equally many integers as one array, in half of NumPy's time.

    Raise TypeError, ValueError or OverflowError if they are not such lists.
    """
    values = array("q")
    for part in parts:
        values.fromlist(part)
    if {len(part) for part in parts} != {len(parts[0])}:
        raise ValueError("lists of unequal lengths")
    return np.frombuffer(values, np.int64).reshape(len(parts), -1)


def copied(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in C order, made without giving up the interpreter lock: of more than a few numbers NumPy does,
    and then waits to get it back.
    """
    if array.size <= FEW:
        return array.copy()
    if not array.flags.c_contiguous or array.nbytes > LARGE_BYTES:
        return np.array(array, order="C")
    flat = np.frombuffer(bytearray(array.data), array.dtype)
    return flat if array.ndim == 1 else flat.reshape(array.shape)


def rows_of(spec: RowSpec, sources: Sequence[object]) -> NDArray[Any] | None:
    """Return a list as bits ``[n, *shape]`` of its own memory; None if it is not one of n rows of the spec."""
    try:
        rows = bits_of(spec, sources)
    except RequestError:
        return None
    return rows if rows.shape[1:] == spec.shape else None


def num_steps(source: object, spec: RowSpec) -> int:
    """Return how many steps a source has values for; -1 if it is one row for all steps."""
    if type(source) is np.ndarray:
        return len(source) if source.ndim == len(spec.shape) + 1 else -1
    if not isinstance(source, LISTS):
        if isinstance(source, Steps):
            return len(source)
        if isinstance(source, ARRAYS):
            shape = source.shape
            return int(shape[0]) if len(shape) == len(spec.shape) + 1 else -1
        return -1
    first = source[0] if source else 0
    if isinstance(first, NUMBERS):
        return -1 if spec.shape else len(source)
    return len(source) if isinstance(first, Handle) or _ndim(first) == len(spec.shape) else -1


def describe_source(source: object) -> str:
    """Return a description of a source for errors: dtype and shape, or type and value."""
    if isinstance(source, torch.Tensor):
        return describe(source)
    if isinstance(source, np.ndarray | np.generic):
        return f"{source.dtype}{list(source.shape)}"
    if source is None or isinstance(source, Handle):
        return repr(source)
    return f"{type(source).__name__} {reprlib.repr(source)}"


def _ndim(value: object) -> int:
    try:
        return np.ndim(value)  # type: ignore[arg-type]
    except ValueError:  # rows of unequal lengths
        return -1
    except RuntimeError:  # tensors in lists that NumPy cannot read
        return np.ndim(_readable(value))  # type: ignore[arg-type]


def _readable(source: object) -> object:
    """Return the lists with each tensor as one that NumPy can read, without a pending negation for example."""
    if isinstance(source, torch.Tensor):
        return source.detach().cpu().resolve_conj().resolve_neg()
    return [_readable(item) for item in source] if isinstance(source, LISTS) else source


def _is_wider(wanted: torch.dtype, given: torch.dtype) -> bool:
    """Return whether every integer of one dtype is one of the other."""
    to, of = NUMPY_DTYPES.get(wanted), NUMPY_DTYPES.get(given)
    return to is not None and of is not None and to.kind in "iu" and of.kind in "iu" and np.can_cast(of, to)


def _stacked(spec: RowSpec, sources: Sequence[object]) -> object:
    """Return tensors as one tensor; NumPy would take long, and does not know all of their dtypes."""
    if not all(isinstance(source, torch.Tensor) for source in sources):
        return sources
    try:
        return torch.stack(tuple(sources))  # type: ignore[arg-type]
    except RuntimeError as error:
        raise RequestError(f"expected {spec}, got {describe_source(sources)}: {error}") from None


def _converted(spec: RowSpec, wanted: np.dtype[Any], array: NDArray[Any], source: object) -> NDArray[Any]:
    """Return values of another dtype converted to the wanted one; only the rounding of floats may change a value."""
    are_integers = array.dtype.kind in "iu" and wanted.kind in "iu"
    if isinstance(source, np.ndarray | np.generic):
        is_fit = are_integers and np.can_cast(array.dtype, wanted)
    else:
        is_fit = are_integers or np.can_cast(array.dtype, wanted, "same_kind")
    if not is_fit:
        are_floats = isinstance(source, np.ndarray | np.generic) and array.dtype.kind == wanted.kind == "f"
        hint = f"; use .astype(numpy.{wanted.name})" if are_floats else ""
        got = describe_source(array if array.dtype.kind in "biuf" else source)
        raise RequestError(f"expected {spec}, got {got}{hint}")
    with np.errstate(over="ignore"):
        converted = array.astype(wanted)
    is_lost = converted != array if are_integers else np.isinf(converted) & ~np.isinf(array)
    if is_lost.any():
        raise RequestError(f"expected {spec}, got a number that does not fit: {reprlib.repr(source)}")
    return converted


def as_integers(values: object, expected: str, least: int) -> NDArray[Any]:
    """Return numbers of nodes as the core takes them: int32 in memory of their own, or as they are where one does not
    fit.

    Raise RequestError, which begins with ``expected``, if they are no integers ``[n]``, or fewer than ``least``.
    """
    if type(values) is np.ndarray and values.dtype is I4 and values.ndim == 1 and values.size >= least:
        return values.copy()
    if (
        isinstance(values, list) and values and type(values[0]) is int and len(values) >= least
    ):  # the usual, in half the time
        with suppress(TypeError, OverflowError):
            if bool not in set(map(type, values)):
                return np.frombuffer(array("i", values), np.int32)
    try:
        numbers = np.asarray(values)
        if isinstance(values, LISTS) and any(isinstance(value, bool | np.bool_) for value in values):
            numbers = np.empty((0, 0))  # among integers NumPy takes them for some
    except (TypeError, ValueError, RuntimeError):
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or numbers.size < least or (numbers.size and numbers.dtype.kind not in "iu"):
        raise RequestError(f"{expected}, got {describe_source(values)}")
    narrow = np.array(numbers, np.int32)
    fits = narrow.dtype == numbers.dtype or not np.count_nonzero(narrow != numbers)
    return narrow if fits else numbers
