"""Attention over pages: the reference and the kernels against torch's own attention, node by node in float64."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.kernels.paged_attention import Mask, Pages, Spans, append_pages, paged_attention, reference
from tests.effort import examples
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches
from tests.kernels.paged_cases import (
    TOLERANCES,
    Case,
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

MIXED = [Node(9, (8,)), Node(30, tuple(range(30))), Node(0, ()), Node(40, (1, 2, 3, 37, 38, 39)), Node(70, (69,))]
"""A step, a prompt, a node with nothing, one with recomputed rows, and a step again."""
ON_ONE_DEVICE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MASKS = {"causal": Mask(), "all": Mask(causal=False), "window": Mask(window=5), "both ways": Mask(False, 7)}


@settings(max_examples=examples(40))
@given(nodes=nodes_with_gaps(), sizes=sizes, data=st.data())
def test_reference_is_attention_of_each_node(nodes: list[Node], sizes: Sizes, data: Any) -> None:
    mask = data.draw(masks(sizes.kv_heads * sizes.group))
    case = make_case(nodes, sizes, mask=mask)
    assert_close(reference.paged_attention(*case, 0.3), expected(case, 0.3))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("split_keys", [0, 64])
def test_kernel_mixes_steps_and_prompts(device: str, split_keys: int, mask: Mask, dtype: torch.dtype) -> None:
    case = make_case(MIXED, Sizes(page_size=16), dtype, mask)
    check_kernel(device, case, split_keys)


@settings(ON_ONE_DEVICE, max_examples=examples(15))
@given(nodes=nodes_with_gaps(longest=70), sizes=sizes, data=st.data())
def test_kernel_is_attention_of_each_node(device: str, nodes: list[Node], sizes: Sizes, data: Any) -> None:
    mask = data.draw(masks(sizes.kv_heads * sizes.group))
    check_kernel(device, make_case(nodes, sizes, mask=mask), data.draw(st.sampled_from([None, 0, 64])))


def check_kernel(device: str, case: Case, split_keys: int | None) -> None:
    from cellrt.kernels.paged_attention import triton as kernel

    found = kernel.paged_attention(*case.to(device), 0.3, split_keys=split_keys)
    assert found.dtype is case.query.dtype
    absolute, relative = TOLERANCES[found.dtype]
    # The kernel multiplies weights in the type of the values, where the reference has them in float32.
    loose = 1e-6 if found.dtype == torch.float32 else 3 * relative
    torch.testing.assert_close(found.double().cpu(), expected(case, 0.3), atol=absolute + loose, rtol=relative)


@settings(ON_ONE_DEVICE, max_examples=examples(10))
@given(nodes=nodes_with_gaps(), sizes=sizes)
def test_kernel_appends_as_the_reference(device: str, nodes: list[Node], sizes: Sizes) -> None:
    case = make_case(nodes, sizes)
    key, value = torch.randn(2, len(case.query), sizes.kv_heads, sizes.head_dim)
    mine = case.to(device)
    append_pages(mine.pages, mine.spans, key.to(device), value.to(device))
    reference.append_pages(case.pages, case.spans, key, value)
    for found, wanted in zip(mine.pages[:2], case.pages):
        assert torch.equal(found.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_kernel_reads_a_layer_of_larger_pages(device: str) -> None:
    case = make_case(MIXED, Sizes(page_size=16))
    pages = layer_of_larger(case.to(device).pages)
    key, value = torch.randn(2, len(case.query), 2, 16)
    check_kernel(device, case._replace(pages=pages), 64)
    append_pages(pages, case.to(device).spans, key.to(device), value.to(device))
    reference.append_pages(case.pages, case.spans, key, value)
    assert torch.equal(pages.values.cpu().nan_to_num(7.0), case.pages.values.nan_to_num(7.0))


def test_kernel_reads_ragged_rows(device: str) -> None:
    spans = Spans.from_lengths(int32([5, 0, 1, 12]))
    query, key, value = torch.randn(18, 4, 8), torch.randn(18, 2, 8), torch.randn(18, 2, 8)
    pages = Pages.of_rows(key, value, spans.offsets)
    check_kernel(device, Case(query, pages, spans, Mask(causal=False)), None)


def test_ragged_rows_are_one_page() -> None:
    lengths = int32([5, 0, 1, 12])
    spans = Spans.from_lengths(lengths)
    assert spans.positions.tolist() == [*range(5), 0, *range(12)]
    query, key, value = torch.randn(18, 4, 8), torch.randn(18, 2, 8), torch.randn(18, 2, 8)
    pages = Pages.of_rows(key, value, spans.offsets)
    assert pages.keys.data_ptr() == key.data_ptr()
    found = paged_attention(query, pages, spans, Mask(causal=False))
    for first, last in ((0, 5), (5, 6), (6, 18)):
        rows = (rows[first:last].transpose(0, 1) for rows in (query, key, value))
        wanted = torch.nn.functional.scaled_dot_product_attention(*rows, enable_gqa=True).transpose(0, 1)
        torch.testing.assert_close(found[first:last], wanted)


def test_no_rows_at_all() -> None:
    empty = torch.zeros(0, 2, 4)
    pages = Pages.of_rows(empty, empty, int32([0, 0]))
    assert paged_attention(empty, pages, Spans(int32([0, 0]), int32([])), Mask(False)).shape == (0, 2, 4)


def test_appended_rows_are_found_and_nothing_else_changes() -> None:
    case = make_case([Node(9, (3, 8)), Node(0, ()), Node(6, (0, 5, 1))], Sizes())
    before = case.pages.keys.clone(), case.pages.values.clone()
    key, value = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    append_pages(case.pages, case.spans, key, value)
    rows = [(0, 3), (0, 8), (2, 0), (2, 5), (2, 1)]
    for (node, position), new_key, new_value in zip(rows, key, value):
        page, slot = case.pages.tables[node, position // 4], position % 4
        assert torch.equal(case.pages.keys[page, slot], new_key)
        assert torch.equal(case.pages.values[page, slot], new_value)
        for old, now in zip(before, case.pages):
            old[page, slot] = now[page, slot]
    assert all(torch.equal(old.nan_to_num(7.0), now.nan_to_num(7.0)) for old, now in zip(before, case.pages))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(2, 6, 15)}, r"rows must be torch.float32 \[rows, heads, 16\] as the keys are"),
        ({"query": torch.zeros(2, 5, 16)}, "a multiple of the 2 heads of the keys, got 5"),
        ({"query": torch.zeros(2, 6, 16).half()}, "got torch.float16"),
        ({"mask": Mask(window=-1)}, "window must be at least 1"),
        ({"mask": Mask(bias=torch.zeros(6, 4))}, r"bias must be \[6 heads, 2 \* reach \+ 1\], got \(6, 4\)"),
        ({"mask": Mask(bias=torch.zeros(6, 3).double())}, "bias must be contiguous float32"),
        ({"spans": Spans(int32([0, 2]), int32([0]))}, r"positions must be contiguous int32 \[2\]"),
        ({"spans": Spans(torch.tensor([0, 2]), int32([0, 1]))}, "offsets must be .* got torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    good = make_case([Node(5, (3, 4))], Sizes())._asdict()
    paged_attention(**good)
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**good, **changed})


def test_rows_that_cannot_be_appended_are_refused() -> None:
    case = make_case([Node(5, (3, 4))], Sizes())
    key = torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match=r"key and value must be torch.float32 \[rows, 2, 16\]"):
        append_pages(case.pages, case.spans, key, key[:, :1])
    with pytest.raises(ValueError, match="values must be as the keys"):
        append_pages(case.pages._replace(values=key), case.spans, key, key)


def check_compiled(sizes: Sizes, num_rows: int, dtype: torch.dtype, mask: Mask, split_keys: int) -> None:
    """For 32 nodes with 4,096 keys each."""
    from cellrt.kernels.paged_attention import triton as kernel

    nodes = 32
    shape = 10, sizes.page_size, sizes.kv_heads, sizes.head_dim
    keys = torch.empty(shape, dtype=dtype, device="meta")
    numbers = torch.empty(nodes, 4096 // sizes.page_size, dtype=torch.int32, device="meta")
    pages, spans = Pages(keys, keys, numbers, numbers[:, 0]), Spans(numbers[:, 0], numbers[:, 0])
    query = torch.empty(num_rows, sizes.kv_heads * sizes.group, sizes.head_dim, dtype=dtype, device="meta")
    with recorded_launches() as launches:
        kernel.paged_attention(query, pages, spans, mask, 0.1, split_keys=split_keys)
        kernel.append_pages(pages, spans, query[:, : sizes.kv_heads], query[:, : sizes.kv_heads])
    assert len(launches) == (3 if split_keys else 2)
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0, compiled.name


@needs_compiler
@pytest.mark.parametrize("num_rows", [32, 2000])
def test_kernels_compile_without_spills(num_rows: int) -> None:
    check_compiled(Sizes(16, 3, 3, 64), num_rows, torch.bfloat16, Mask(), 512)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mask", [*MASKS.values(), Mask(bias=torch.zeros(8, 65))], ids=[*MASKS, "bias"])
@pytest.mark.parametrize(("head_dim", "num_rows"), [(64, 32), (64, 2000), (128, 32), (128, 2000), (80, 500)])
def test_every_form_compiles_without_spills(head_dim: int, num_rows: int, mask: Mask, dtype: torch.dtype) -> None:
    for split_keys in (0, 512):
        check_compiled(Sizes(16, 2, 4, head_dim), num_rows, dtype, mask, split_keys)
