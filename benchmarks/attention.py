"""Attention over pages on one core, beside torch's: microseconds a call.

Parts: ``heads`` (9 heads of 64 that share 3 of the keys, as in SmolLM2, in pages of 16: a step with 512 and with 2,000
keys, a prompt of 2,000 rows, sixteen requests at once, two of them with 200 rows of a prompt, and steps whose keys and
values, 98 MB in float32, are in no cache), ``flex`` (two of them beside FlexAttention, which is compiled first and
needs a C++ compiler), ``encoder`` (16 sentences, 12 heads of 32, nothing causal) and ``stack`` (a step of all layers
of a random model of SmolLM2's sizes).

Torch's attention is called once a request: "contiguous" finds keys and values as it likes them, which no server has;
"from pages" gathers them first, as it must. "padded" is one call for all. Each stands on the thread that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.timing import medians_us
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.paged_attention import Mask, Pages, Spans, paged_attention
from cellrt.definition.modes import torch_threads

PARTS = ("heads", "flex", "encoder", "stack")
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
MIXED = [*((1, 100 + 130 * k) for k in range(14)), (200, 200), (200, 900)]
"""Rows and keys of each request."""
CASES = {
    "1 row, 512 keys": [(1, 512)],
    "1 row, 2,000 keys": [(1, 2000)],
    "2,000 rows, 2,000 keys": [(2000, 2000)],
    "16 requests, mixed": MIXED,
    "32 rows, 2,000 keys each": [(1, 2000)] * 32,
}
SMOLLM = LlamaSizes(49_152, 576, 1536, 30, 9, 3, rotary_base=100_000.0, is_tied=True)
MOST_DIFFERENT = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


class Work(NamedTuple):
    """A call's arguments, and each request's keys and values as torch likes them: ``[1, heads, keys, head_dim]``."""

    query: Tensor
    pages: Pages
    spans: Spans
    contiguous: list[tuple[Tensor, Tensor]]


def make_work(requests: Sequence[tuple[int, int]], dtype: torch.dtype) -> Work:
    """Return random numbers in mixed pages."""
    counts = [-(-keys // PAGE_SIZE) for _, keys in requests]
    order = torch.randperm(sum(counts)).to(torch.int32)
    tables = torch.zeros(len(requests), max(counts), dtype=torch.int32)
    for node, count in enumerate(counts):
        tables[node, :count] = order[sum(counts[:node]) :][:count]
    keys, values = torch.randn(2, len(order), PAGE_SIZE, KV_HEADS, HEAD_DIM).to(dtype).unbind()
    pages = Pages(keys, values, tables, torch.tensor([keys for _, keys in requests], dtype=torch.int32))
    offsets = torch.tensor([0, *(rows for rows, _ in requests)]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(keys - rows, keys) for rows, keys in requests]).to(torch.int32)
    query = torch.randn(len(positions), HEADS, HEAD_DIM).to(dtype)
    return Work(query, pages, Spans(offsets, positions), [gathered(pages, node) for node in range(len(requests))])


def gathered(pages: Pages, node: int) -> tuple[Tensor, Tensor]:
    """Return a request's keys and values, copied from their pages."""
    length, table = int(pages.lengths[node]), pages.tables[node]
    key, value = (numbers[table].flatten(0, 1)[:length] for numbers in (pages.keys, pages.values))
    return key.transpose(0, 1)[None].contiguous(), value.transpose(0, 1)[None].contiguous()


def torch_attention(work: Work, masks: Sequence[Tensor | None], copies: bool) -> Tensor:
    """Request by request."""
    out = []
    for node, (first, last) in enumerate(pairwise(work.spans.offsets.tolist())):
        key, value = gathered(work.pages, node) if copies else work.contiguous[node]
        query, is_whole = work.query[first:last].transpose(0, 1)[None], last - first == key.shape[2]
        found = scaled_dot_product_attention(
            query, key, value, attn_mask=masks[node], is_causal=is_whole and last - first > 1, enable_gqa=True
        )
        out.append(found[0].transpose(0, 1))
    return torch.cat(out)


def causal_masks(requests: Sequence[tuple[int, int]]) -> list[Tensor | None]:
    """Return the keys that each row sees; None where torch needs no mask."""
    return [
        None if rows in (1, keys) else torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
        for rows, keys in requests
    ]


def run_heads(recorder: Recorder, seconds: float) -> None:
    """Both dtypes."""
    for dtype in MOST_DIFFERENT:
        for case, requests in CASES.items():
            work, masks = make_work(requests, dtype), causal_masks(requests)
            calls: dict[str, Callable[[], Tensor]] = {
                "cellrt": partial(paged_attention, work.query, work.pages, work.spans),
                "torch, contiguous": partial(torch_attention, work, masks, copies=False),
                "torch, from pages": partial(torch_attention, work, masks, copies=True),
            }
            compare(recorder, f"{case}, {str(dtype).removeprefix('torch.')}", calls, seconds, MOST_DIFFERENT[dtype])


def run_flex(recorder: Recorder, seconds: float) -> None:
    """One request each, its keys and values in one piece."""
    flex = torch.compile(flex_attention)
    for rows, keys in ((1, 2000), (2000, 2000)):
        work = make_work([(rows, keys)], torch.float32)

        def is_seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor, before: int = keys - rows) -> Tensor:
            return key <= row + before

        blocks = create_block_mask(is_seen, None, None, rows, keys, device="cpu")
        query = work.query.transpose(0, 1)[None].contiguous()
        calls: dict[str, Callable[[], Tensor]] = {
            "cellrt": partial(paged_attention, work.query, work.pages, work.spans),
            "FlexAttention": partial(call_flex, flex, query, *work.contiguous[0], blocks),
        }
        compare(recorder, f"FlexAttention, {rows:,} by {keys:,}", calls, seconds, MOST_DIFFERENT[torch.float32])


def call_flex(flex: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> Tensor:
    """Return the rows first, as the others give them."""
    return flex(query, key, value, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)


def run_encoder(recorder: Recorder, seconds: float) -> None:
    """Sentences of 3 to 48 rows."""
    lengths = torch.arange(3, 51, 3, dtype=torch.int32)
    spans = Spans.from_lengths(lengths)
    query, key, value = torch.randn(3, len(spans.positions), 12, 32).unbind()
    is_row = torch.arange(int(lengths.max())) < lengths[:, None]
    padded = [torch.zeros(*is_row.shape, 12, 32) for _ in range(3)]
    for target, rows in zip(padded, (query, key, value)):
        target[is_row] = rows

    def in_one_call() -> Tensor:
        query, key, value = (rows.transpose(1, 2) for rows in padded)
        found = scaled_dot_product_attention(query, key, value, attn_mask=is_row[:, None, None])
        return found.transpose(1, 2)[is_row]

    def each() -> Tensor:
        found = []
        for part in zip(*(rows.split(lengths.tolist()) for rows in (query, key, value))):
            one, its_key, its_value = (rows.transpose(0, 1)[None] for rows in part)
            found.append(scaled_dot_product_attention(one, its_key, its_value)[0].transpose(0, 1))
        return torch.cat(found)

    calls = {
        "cellrt": lambda: paged_attention(query, Pages.of_rows(key, value, spans.offsets), spans, Mask(causal=False)),
        "torch, padded": in_one_call,
        "torch, contiguous": each,
    }
    compare(recorder, "16 sentences", calls, seconds, MOST_DIFFERENT[torch.float32])


def compare(
    recorder: Recorder, case: str, calls: dict[str, Callable[[], Tensor]], seconds: float, most_different: float
) -> None:
    """Record times of calls that take turns, and ratios to the first. Raise RuntimeError if results differ."""
    first, *others = calls
    wanted = calls[first]()
    for name in others:
        if (difference := (calls[name]() - wanted).abs().max().item()) > most_different:
            raise RuntimeError(f"{case}: {name} differs from {first} by {difference}")
    times = medians_us({**calls}, seconds)
    for name, value in times.items():
        recorder.add(case, name, value, "us")
    for name in others:
        recorder.add(case, f"{name} / {first}", times[name] / times[first], "ratio")


def run_stack(recorder: Recorder, seconds: float) -> None:
    """Measure steps of 1, 8 and 32 requests with 200 keys each, beside the bare products with the same weights."""
    torch.manual_seed(0)
    model = Llama(SMOLLM).eval()
    weights = [weight for weight in model.parameters() if weight.ndim == 2]
    for count in (1, 8, 32):
        kept = model.new_pages(13 * count, PAGE_SIZE)
        tables = torch.arange(13 * count, dtype=torch.int32).view(count, 13)
        pages = [Pages(*one, tables, torch.full((count,), 200, dtype=torch.int32)) for one in kept]
        spans = Spans(torch.arange(count + 1, dtype=torch.int32), torch.full((count,), 199, dtype=torch.int32))
        tokens = torch.arange(count)
        rows = {weight.shape[1]: torch.randn(count, weight.shape[1]) for weight in weights}
        step = partial(run_step, model, tokens, spans, pages)
        times = medians_us({"step": step, "its products": partial(multiply, rows, weights)}, 2 * seconds)
        for name, value in times.items():
            recorder.add("SmolLM2's sizes", name, value, "us", rows=count)
        ratio = times["step"] / times["its products"]
        recorder.add("SmolLM2's sizes", "step / its products", ratio, "ratio", rows=count)


def run_step(model: Llama, tokens: Tensor, spans: Spans, pages: Sequence[Pages]) -> Tensor:
    """Run one step."""
    return model.logits(model(tokens, spans, pages))


def multiply(rows: dict[int, Tensor], weights: Sequence[Tensor]) -> None:
    """Rows of the right width by each weight."""
    for weight in weights:
        linear(rows[weight.shape[1]], weight)


@torch.inference_mode()
def run(recorder: Recorder, options: Options) -> None:
    """Measure calls with one thread, as a worker has."""
    torch.manual_seed(0)
    seconds = 0.3 if options.quick else 2.0
    with torch_threads(1):
        for part, measure in zip(PARTS, (run_heads, run_flex, run_encoder, run_stack)):
            if options.has(part):
                measure(recorder, seconds)
