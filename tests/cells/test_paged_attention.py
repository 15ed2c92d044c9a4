"""Attention compiled for a CPU: against the reference, and the same bits in any company and however it is cut."""

import ctypes
import os
import platform
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.cells._paged_attention import append_task, attend_task
from cellrt.cells.paged_attention import append_pages, paged_attention, settings_of, task_of
from cellrt.kernels.paged_attention import Mask, Spans, reference
from cellrt.kernels.paged_attention.pages import Pages
from tests.effort import examples
from tests.kernels.paged_cases import (
    TOLERANCES,
    Node,
    Sizes,
    assert_close,
    expected,
    int32,
    layer_of_larger,
    make_case,
    masks,
    nodes_with_gaps,
    sizes,
)

ROOT = Path(__file__).resolve().parents[2]
LONG = [Node(300, tuple(range(300))), Node(77, (76,)), Node(1, (0,)), Node(210, (0, 1, 2, 208, 209)), Node(130, ())]


@settings(max_examples=examples(100))
@given(nodes=nodes_with_gaps(), sizes=sizes, data=st.data(), dtype=st.sampled_from(list(TOLERANCES)))
def test_compiled_is_attention_of_each_node(nodes, sizes, data, dtype):
    case = make_case(nodes, sizes, dtype, data.draw(masks(sizes.kv_heads * sizes.group)))
    with torch.inference_mode():
        found = paged_attention(*case, scale=0.3)
    assert found.dtype is dtype
    assert_close(found, expected(case, 0.3))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mask", [Mask(), Mask(False), Mask(window=70), Mask(False, 40)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_long_spans_are_as_the_reference_says(head_dim, mask, dtype):
    case = make_case(LONG, Sizes(16, 2, 3, head_dim), dtype, mask)
    with torch.inference_mode():
        assert_close(paged_attention(*case, scale=0.1), reference.paged_attention(*case, 0.1).double())


@settings(max_examples=examples(40))
@given(nodes=nodes_with_gaps(longest=150), sizes=sizes, data=st.data())
def test_bits_are_the_same_alone_and_in_company(nodes, sizes, data):
    case = make_case(nodes, sizes, mask=data.draw(masks(sizes.kv_heads * sizes.group)))
    with torch.inference_mode():
        together = paged_attention(*case)
        alone = [paged_attention(*case.node(node)) for node in range(len(nodes))]
    assert torch.equal(together, torch.cat(alone))


@settings(max_examples=examples(30))
@given(
    length=st.integers(1, 200),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    group=st.sampled_from([1, 3, 4]),
    window=st.sampled_from([0, 9, 100]),
)
def test_bits_are_the_same_whole_and_in_chunks(length, cuts, group, window):
    """Each chunk sees the keys up to its own last row, as it does when they come one after the other."""
    case = make_case([Node(length, tuple(range(length)))], Sizes(group=group), mask=Mask(window=window))
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    with torch.inference_mode():
        whole = paged_attention(*case)
        parts = [
            paged_attention(
                case.query[first:last],
                case.pages._replace(lengths=int32([last])),
                Spans(int32([0, last - first]), case.spans.positions[first:last]),
                case.mask,
            )
            for first, last in pairwise(edges)
        ]
    assert torch.equal(whole, torch.cat(parts))


def test_bits_do_not_depend_on_the_pages():
    spans = Spans.from_lengths(int32([130]))
    query, key, value = torch.randn(130, 6, 24), torch.randn(130, 2, 24), torch.randn(130, 2, 24)
    paged = make_case([Node(130, ())], Sizes(16, 2, 3, 24)).pages
    with torch.inference_mode():
        append_pages(paged, spans, key, value)
        in_one = paged_attention(query, Pages.of_rows(key, value, spans.offsets), spans)
        assert torch.equal(paged_attention(query, paged, spans), in_one)


def test_pages_may_be_a_layer_of_larger_ones():
    case = make_case(LONG, Sizes(16))
    pages = layer_of_larger(case.pages)
    key, value = torch.randn(2, len(case.query), 2, 16)
    with torch.inference_mode():
        append_pages(case.pages, case.spans, key, value)
        append_pages(pages, case.spans, key, value)
        in_larger = paged_attention(*case._replace(pages=pages))
        assert torch.equal(in_larger, paged_attention(*case))
    assert_close(in_larger, expected(case, 0.25))


def test_a_row_that_is_not_a_number_harms_no_other():
    case = make_case([Node(70, tuple(range(70))), Node(5, (4,))], Sizes())
    with torch.inference_mode():
        good = paged_attention(*case)
        case.query[7] = torch.nan
        bad = paged_attention(*case)
    assert bad[7].isnan().all()
    others = torch.arange(len(good)) != 7
    assert torch.equal(good[others], bad[others])


def test_large_scores_do_not_overflow():
    case = make_case([Node(50, (0, 20, 49))], Sizes())
    with torch.inference_mode():
        assert_close(paged_attention(*case, scale=1e4), expected(case, 1e4))


def call(function, settings, task):
    signature = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    assert signature(function.address)(settings.ctypes.data, task.ctypes.data) == 0


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_c_functions_do_the_same(dtype):
    case = make_case(LONG, Sizes(), dtype)
    rows = case.query.shape[0]
    key, value = torch.randn(rows, 2, 16).to(dtype), torch.randn(rows, 2, 16).to(dtype)
    mine, theirs = (case.pages._replace(keys=case.pages.keys.clone(), values=case.pages.values.clone()) for _ in "ab")
    out = torch.empty_like(case.query)
    settings = settings_of(6, mine, case.mask, 0.25)
    call(append_task, settings, task_of(mine, case.spans, key=key, value=value))
    call(attend_task, settings, task_of(mine, case.spans, query=case.query, out=out))
    reference.append_pages(theirs, case.spans, key, value)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(mine[:2], theirs[:2]))
    assert_close(out, reference.paged_attention(case.query, theirs, case.spans, case.mask, 0.25).double())


def test_a_memory_without_rows_gives_zeros():
    empty = torch.zeros(0, 2, 16)
    pages = Pages.of_rows(empty, empty, int32([0, 0, 0]))
    spans, query = Spans(int32([0, 2, 3]), int32([0, 1, 0])), torch.randn(3, 4, 16)
    with torch.inference_mode():
        assert not paged_attention(query, pages, spans, Mask(causal=False)).any()
    assert not reference.paged_attention(query, pages, spans, Mask(causal=False), 1.0).any()


def test_what_does_not_fit_is_refused():
    case = make_case([Node(5, (3, 4))], Sizes())
    with torch.inference_mode(), pytest.raises(ValueError, match="got 5"):
        paged_attention(case.query[:, :5], *case[1:])
    with torch.inference_mode(), pytest.raises(ValueError, match="key and value must be"):
        append_pages(case.pages, case.spans, case.query, case.query)


def test_gradients_go_through_the_plain_form():
    spans = Spans.from_lengths(int32([4, 3]))
    rows = [torch.randn(7, 2, 8, requires_grad=True) for _ in range(3)]
    paged_attention(rows[0], Pages.of_rows(rows[1], rows[2], spans.offsets), spans, Mask(False)).sum().backward()
    assert all(row.grad is not None for row in rows)


NARROW = """
import numpy as np
import torch
from cellrt.cells._attention_tile import read_row, write_row
from cellrt.definition.compiled_form import nogil
from cellrt.products.vectors import FLOAT16, LANES
from cellrt.cells.paged_attention import paged_attention
from cellrt.kernels.paged_attention import Mask, reference
from tests.cells.test_paged_attention import LONG
from tests.kernels.paged_cases import TOLERANCES, Sizes, assert_close, make_case

assert LANES == {lanes}

@nogil
def read(kind, source, target, size, factor):
    read_row(kind, source, target, size, factor)

@nogil
def write(kind, source, target, size, factor):
    write_row(kind, source, target, size, factor)

numbers = torch.arange(2**16).to(torch.uint16).view(torch.float16)
wide = torch.empty(2**16)
read(FLOAT16, numbers.data_ptr(), wide.data_ptr(), 2**16, np.float32(1))
assert torch.equal(wide.isnan(), numbers.isnan()) and torch.equal(wide[~wide.isnan()], numbers[~wide.isnan()].float())
wide = torch.cat([wide, torch.randn(10**5), torch.randn(10**5) * 1e-6, torch.tensor([65519.9, 65520.0, -1e9, 1e-8])])
found = torch.empty(len(wide), dtype=torch.float16)
write(FLOAT16, wide.data_ptr(), found.data_ptr(), len(wide), np.float32(1))
assert torch.equal(found.isnan(), wide.isnan()) and torch.equal(found[~wide.isnan()], wide[~wide.isnan()].half())
for dtype in TOLERANCES:
    case = make_case(LONG, Sizes(16, 2, 3, 36), dtype, Mask(window=70))
    with torch.inference_mode():
        assert_close(paged_attention(*case, scale=0.1), reference.paged_attention(*case, 0.1).double())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86-64 processors")
@pytest.mark.parametrize(("lanes", "features"), [(8, "+avx,+avx2,+fma,+f16c"), (4, "+sse,+sse2")])
def test_narrower_machines_get_the_same(lanes, features, tmp_path):
    environment = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    program = NARROW.format(lanes=lanes)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
