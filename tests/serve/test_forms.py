"""Requests from JSON and from bytes: what fits comes through unchanged, what does not is refused by name."""

from __future__ import annotations

import re
import struct
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cellrt.definition.bits import NUMPY_DTYPES
from cellrt.errors import RequestError, RequestTooLargeError
from cellrt.serve.arrays import from_bytes, from_lists, texts_of, to_bytes
from cellrt.serve.forms import check_shape, checked, form_of
from cellrt.serve.server_settings import Limits

DTYPES = sorted(NUMPY_DTYPES, key=str)
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
LIMITS = Limits(max_depth=5, max_items=50, max_steps=20)


def arrays_of(dtype: torch.dtype) -> st.SearchStrategy[np.ndarray]:
    options = {"allow_nan": False, "allow_infinity": False} if dtype.is_floating_point else {}
    numpy_dtype = NUMPY_DTYPES[dtype]
    return hnp.arrays(numpy_dtype, SHAPES, elements=hnp.from_dtype(numpy_dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_nested_lists_are_the_tensor(dtype: torch.dtype, data: st.DataObject) -> None:
    array = data.draw(arrays_of(dtype))
    made = from_lists(array.tolist(), dtype, "x")
    assert made.dtype == dtype
    np.testing.assert_array_equal(made.numpy(), array)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@given(data=st.data())
def test_bytes_are_the_tensor_and_back(dtype: torch.dtype, data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = data.draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    made = from_bytes(raw, dtype, shape, "x")
    assert tuple(made.shape) == shape and made.dtype == dtype
    assert to_bytes(made) == raw
    with pytest.raises(RequestError, match="bytes, got"):
        from_bytes(raw + b"x", dtype, shape, "x")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([256], torch.uint8),
        ([-129], torch.int8),
        ([2**63], torch.int64),
        ([2**70], torch.int64),
        ([2.0**63], torch.int64),
        ([2**63, -1], torch.int64),
        ([10**400, 1.0], torch.int64),
        ([10**400], torch.float32),
        ([1e39, 1], torch.float32),
        ([0.5], torch.int64),
        ([1e300], torch.int32),
        (["1"], torch.float32),
        ([None], torch.float32),
        ([{}], torch.int64),
        ([1], torch.bool),
        ([[1], [1, 2]], torch.int64),
    ],
)
def test_numbers_that_do_not_fit_are_refused(value: list[Any], dtype: torch.dtype) -> None:
    with pytest.raises(RequestError, match="^x: expected"):
        from_lists(value, dtype, "x")


def test_integers_are_never_rounded() -> None:
    assert from_lists([2**53 + 1, 0.0, 1], torch.int64, "x").tolist() == [2**53 + 1, 0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, True], "expected FP32, got true or false"),
        ([None], "expected FP32, got null"),
        ([{}], "expected FP32, got an object"),
        ([[1], [2, 3]], "expected lists of equal lengths, got some of 1 and 2"),
        ([[1], 2], "expected lists of equal lengths, got integers beside a list"),
    ],
)
def test_what_is_no_array_of_numbers_is_told_by_what_came(given: object, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^x: {message}$"):
        from_lists(given, torch.float32, "x")


def test_a_long_text_among_many_costs_no_more_than_it_is_long() -> None:
    texts = ["a" * 20_000, *[""] * 1999]  # as an array of NumPy, 160 MB
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="got texts"):
            from_lists(texts, torch.int64, "x")
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_texts_are_read_as_they_were_written(texts: list[bytes]) -> None:
    data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    assert texts_of(data, len(texts), "x") == texts
    for wrong, count in ((data + b"\0", len(texts)), (data, len(texts) + 1), (data[:-1], len(texts) if texts else 1)):
        with pytest.raises(RequestError):
            texts_of(wrong, count, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=3), inside, max_size=4),
    max_leaves=12,
)


@dataclass
class Part:
    words: list[str]
    weight: float


EXAMPLES = {
    "tensor": torch.zeros(2, 3),
    "array": np.zeros(3, np.int32),
    "text": "a",
    "integer": 1,
    "number": 1.0,
    "truth": True,
    "list": [1, 2],
    "tree": ((1, 2), 3),
    "tensors in a tree": ((torch.zeros(2), torch.zeros(2)), torch.zeros(2)),
    "record": {"a": [1], "b": "c"},
    "object": Part(["a"], 0.5),
}


@pytest.mark.parametrize("name", EXAMPLES)
@given(value=JSON)
def test_whatever_comes_is_read_or_refused(name: str, value: Any) -> None:
    form = form_of(EXAMPLES[name], LIMITS)
    try:
        form.read(checked(value, LIMITS), "request")
    except RequestError as error:
        assert str(error)


@given(st.recursive(st.integers(0, 9), lambda inside: st.tuples(inside, inside), max_leaves=10))
def test_trees_come_through(tree: Any) -> None:
    def as_json(node: Any) -> Any:
        return [as_json(child) for child in node] if isinstance(node, tuple) else node

    limits = Limits()
    assert form_of(((1, 2), 3), limits).read(as_json(tree), "request") == tree


def test_leaves_of_a_tree_may_be_tensors() -> None:
    form = form_of((torch.zeros(2), torch.zeros(2)), LIMITS)
    left, (middle, right) = form.read([[1, 2], [[3, 4], [5, 6]]], "request")
    assert [leaf.tolist() for leaf in (left, middle, right)] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("number", [1e39, 10**400])
def test_a_number_beyond_an_fp32_is_refused_by_name(number: float) -> None:
    for example, value, where in ((0.5, number, "x"), ([0.5], [1.0, number], "x[1]"), ((0.5, 0.5), [1, number], "x")):
        with pytest.raises(RequestError, match=f"^{re.escape(where)}: expected FP32, got a number that is too large"):
            form_of(example, LIMITS).read(value, "x")
    assert form_of([0.5], LIMITS).read([3.4028235e38], "x") == [3.4028235e38]


@pytest.mark.parametrize(("depth", "is_fine"), [(5, True), (6, False), (10_000, False)])
def test_depth_is_limited_without_recursion(depth: int, is_fine: bool) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    if is_fine:
        assert checked(value, LIMITS) is value
        return
    with pytest.raises(RequestError, match="nested more than 5 deep"):
        checked(value, LIMITS)


def test_items_are_limited() -> None:
    with pytest.raises(RequestTooLargeError, match=r"the request: expected at most 50 items \(max_items\), got more"):
        checked({"a": [1] * 30, "b": [1] * 30}, LIMITS)


@pytest.mark.parametrize(
    ("example", "given", "words"),
    [
        ("text", "a" * 21, r"expected at most 20 characters \(max_steps\), got 21"),
        ([1], [1] * 21, r"expected at most 20 items \(max_steps\), got 21"),
    ],
)
def test_what_is_larger_than_a_limit_is_too_large_and_names_it(example: Any, given: Any, words: str) -> None:
    with pytest.raises(RequestTooLargeError, match=words):
        form_of(example, LIMITS).read(given, "x")


def test_more_rows_than_the_limit_are_too_large() -> None:
    with pytest.raises(RequestTooLargeError, match=r"x: expected at most 20 rows \(max_steps\), got shape \[21, 3\]"):
        check_shape((21, 3), (-1, 3), LIMITS, "x")
