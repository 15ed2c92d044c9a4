"""What the tests of paged attention share: nodes with pages at random places, and attention node by node in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cellrt.kernels.paged_attention import Mask, Pages, Spans
from cellrt.kernels.paged_attention.pages import CAUSAL

# Largest errors, absolute and relative: of the order of the sums in float32, one unit in the last place of the others.
TOLERANCES = {torch.float32: (4e-6, 0.0), torch.bfloat16: (1e-5, 2**-7), torch.float16: (1e-5, 2**-10)}


class Sizes(NamedTuple):
    """Sizes that all nodes share."""

    page_size: int = 4
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16


class Node(NamedTuple):
    """How many keys a node has, and the positions of its query rows."""

    length: int
    positions: tuple[int, ...]


class Case(NamedTuple):
    """Arguments of the operation."""

    query: Tensor
    pages: Pages
    spans: Spans
    mask: Mask

    def node(self, node: int) -> Case:
        """The same for one node alone: its rows, its row of the table, all pages."""
        first, last = self.spans.offsets[node : node + 2].tolist()
        offsets = torch.tensor([0, last - first], dtype=torch.int32)
        lengths, tables = self.pages.lengths[node : node + 1], self.pages.tables[node : node + 1]
        starts = None if self.pages.starts is None else self.pages.starts[node : node + 1]
        pages = self.pages._replace(lengths=lengths, tables=tables, starts=starts)
        return Case(self.query[first:last], pages, Spans(offsets, self.spans.positions[first:last]), self.mask)

    def to(self, device: str) -> Case:
        """The same on a device."""
        pages = Pages(*(None if tensor is None else tensor.to(device) for tensor in self.pages))  # type: ignore[arg-type]
        bias = None if self.mask.bias is None else self.mask.bias.to(device)
        spans = Spans(*(tensor.to(device) for tensor in self.spans))
        return Case(self.query.to(device), pages, spans, self.mask._replace(bias=bias))


def make_case(
    nodes: Sequence[Node], sizes: Sizes, dtype: torch.dtype = torch.float32, mask: Mask = CAUSAL, seed: int = 0
) -> Case:
    """Random numbers in pages at random places; NaN wherever no key is."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-node.length // sizes.page_size) for node in nodes]
    order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    tables = torch.full((len(nodes), max([*counts, 1])), 2**30, dtype=torch.int32)
    shape = len(order), sizes.page_size, sizes.kv_heads, sizes.head_dim
    keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    for node, count in enumerate(counts):
        tables[node, :count] = order[sum(counts[:node]) :][:count]
    pages = Pages(keys, values, tables, int32([node.length for node in nodes]))
    for number, node in enumerate(nodes):
        positions = torch.arange(node.length)
        slots = pages.slots(torch.full_like(positions, number), positions)
        for numbers in (keys, values):
            rows = torch.randn(node.length, *shape[2:], generator=generator)
            numbers[slots] = rows.to(dtype)
    positions = [position for node in nodes for position in node.positions]
    offsets = [0, *torch.tensor([len(node.positions) for node in nodes]).cumsum(0).tolist()]
    query = torch.randn(len(positions), sizes.kv_heads * sizes.group, sizes.head_dim, generator=generator)
    return Case(query.to(dtype), pages, Spans(int32(offsets), int32(positions)), mask)


def layer_of_larger(pages: Pages) -> Pages:
    """The same as one layer of pages ``[pages, layers, 2, page_size, kv_heads, head_dim]`` with NaN in the others."""
    shape = pages.keys.shape[0], 3, 2, *pages.keys.shape[1:]
    larger = torch.full(shape, torch.nan, dtype=pages.keys.dtype, device=pages.keys.device)
    larger[:, 1, 0], larger[:, 1, 1] = pages.keys, pages.values
    return pages._replace(keys=larger[:, 1, 0], values=larger[:, 1, 1])


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def expected(case: Case, scale: float) -> Tensor:
    """Torch's own attention in float64, node by node, with keys looked up one by one."""
    query, pages, spans, mask = case
    out = torch.zeros(query.shape, dtype=torch.float64)
    starts = [0] * len(pages.lengths) if pages.starts is None else pages.starts.tolist()
    for node, length in enumerate(pages.lengths.tolist()):
        first, last = spans.offsets[node : node + 2].tolist()
        places = [divmod(starts[node] + k, pages.page_size) for k in range(length)]
        if not places or first == last:
            continue
        key, value = (
            torch.stack([numbers[pages.tables[node, page], slot] for page, slot in places], 1).double().cpu()
            for numbers in (pages.keys, pages.values)
        )
        added = torch.stack([added_scores(p, length, mask, query.shape[1]) for p in spans.positions[first:last]], 1)
        rows = query[first:last].transpose(0, 1).double()
        found = scaled_dot_product_attention(rows, key, value, attn_mask=added, scale=scale, enable_gqa=True)
        out[first:last] = found.transpose(0, 1).nan_to_num(0.0)
    return out


def added_scores(position: Tensor, length: int, mask: Mask, heads: int) -> Tensor:
    """What is added to the scores of a row, ``[heads, keys]``: minus infinity where a key is not seen."""
    added = torch.zeros(heads, length, dtype=torch.float64)
    for key in range(length):
        distance = key - int(position)
        if mask.bias is not None:
            reach = mask.bias.shape[1] // 2
            added[:, key] = mask.bias[:, reach + max(-reach, min(reach, distance))].double()
        if (mask.causal and distance > 0) or (mask.window and abs(distance) >= mask.window):
            added[:, key] = -torch.inf
    return added


def assert_close(found: Tensor, wanted: Tensor) -> None:
    absolute, relative = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double().cpu(), wanted, atol=absolute, rtol=relative)


@st.composite
def nodes_with_gaps(draw: Any, longest: int = 40) -> list[Node]:
    """Nodes of any length, with rows at any positions, in order and with gaps, now and then none."""
    nodes = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(0, longest))
        positions = draw(st.lists(st.integers(0, max(0, length - 1)), unique=True, max_size=8)) if length else []
        nodes.append(Node(length, tuple(sorted(positions))))
    return nodes


sizes = st.builds(
    Sizes,
    page_size=st.sampled_from([1, 3, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([4, 16, 20]),
)


@st.composite
def masks(draw: Any, heads: int) -> Mask:
    """Any mask, without or with biases."""
    reach = draw(st.sampled_from([None, 0, 3, 50]))
    generator = torch.Generator().manual_seed(0)
    bias = None if reach is None else torch.randn(heads, 2 * reach + 1, generator=generator)
    return Mask(draw(st.booleans()), draw(st.sampled_from([0, 1, 5])), bias)
