"""The layouts of sentences in an encoder's batch in plain torch, and how each is filled: the comparison of TCB.

All layouts have one budget: the places of a batch, padding included, are ``ROWS`` x ``LONGEST``.

padded       one sentence a row, as long as the longest of them
sorted       the same, of sentences of nearly one length (TurboTransformers): the first in order, and those of the next
             ``WINDOW`` batches' worth that are nearest to it in length
rectangular  rows of ``LONGEST`` places, each of several sentences, which a mask keeps apart (TCB section 4.1)
slotted      rows cut into slots as long as the longest sentence that is chosen first; attention sees one slot (4.2)
flat         one row of all places, without padding; attention sees one sentence
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from benchmarks.packed import PackedLinear
from cellrt import Cell, Spans
from cellrt.cells.transformer_stack import TransformerStack

ROWS, LONGEST = 4, 100
PLACES = ROWS * LONGEST
WINDOW = 4

Row = list[int]
"""Sentences of a row, by number, one behind the other."""
Lay = Callable[[Sequence[int], Sequence[int]], tuple[list[Row], int]]
"""Fills a batch: given sentences in order and their lengths (by number), the rows and how long each is."""


def lay_padded(order: Sequence[int], lengths: Sequence[int]) -> tuple[list[Row], int]:
    """Return one sentence a row, in order."""
    chosen: list[int] = []
    longest = 0
    for one in order:
        longest = max(longest, lengths[one])
        if (len(chosen) + 1) * longest > PLACES:
            break
        chosen.append(one)
    return [[one] for one in chosen], max(lengths[one] for one in chosen)


def lay_sorted(order: Sequence[int], lengths: Sequence[int]) -> tuple[list[Row], int]:
    """Return one sentence a row, those of the length of the first."""
    window = order[: WINDOW * PLACES // max(1, sum(lengths[one] for one in order) // len(order))]
    near = sorted(window, key=lambda one: abs(lengths[one] - lengths[order[0]]))
    return lay_padded(near, lengths)


def first_fit(order: Sequence[int], lengths: Sequence[int], count: int, size: int) -> list[Row]:
    """Put sentences into ``count`` rows of ``size`` places, each into the first that has room; else it is left."""
    rows, left = [Row() for _ in range(count)], [size] * count
    for one in order:
        if min(lengths[one], size) > max(left):
            if max(left) < 3:
                break
            continue
        for k in range(count):
            if lengths[one] <= left[k]:
                rows[k].append(one)
                left[k] -= lengths[one]
                break
    return [row for row in rows if row]


def lay_rectangular(order: Sequence[int], lengths: Sequence[int]) -> tuple[list[Row], int]:
    """Return rows of several sentences."""
    return _even(first_fit(order, lengths, ROWS, LONGEST), lengths)


def lay_slotted(order: Sequence[int], lengths: Sequence[int]) -> tuple[list[Row], int]:
    """Return slots as long as the longest of the first half of what fits, as of TCB's utility-dominant set
    (Algorithm 2).
    """
    places, count = 0, 0
    while count < len(order) and places + lengths[order[count]] <= PLACES:
        places += lengths[order[count]]
        count += 1
    size = max(lengths[one] for one in order[: max(1, math.ceil(count / 2))])
    return _even(first_fit(order, lengths, PLACES // size, size), lengths)


def lay_flat(order: Sequence[int], lengths: Sequence[int], places: int = PLACES) -> tuple[list[Row], int]:
    """Return all in one row, which nothing is skipped for."""
    row, taken = Row(), 0
    for one in order:
        if taken + lengths[one] > places:
            break
        row.append(one)
        taken += lengths[one]
    return [row], taken


def _even(rows: list[Row], lengths: Sequence[int]) -> tuple[list[Row], int]:
    return rows, max(sum(lengths[one] for one in row) for row in rows)


LAYOUTS: dict[str, Lay] = {
    "padded": lay_padded,
    "sorted": lay_sorted,
    "rectangular": lay_rectangular,
    "slotted": lay_slotted,
    "flat": lay_flat,
}


class Linear(nn.Module):
    """A layer with its weights packed, as the engine's are."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        weights = torch.cat([layer.weight for layer in layers])
        biases = torch.cat([layer.bias for layer in layers])
        self._packed = PackedLinear(weights, biases)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, outputs]``."""
        return self._packed(x)


class CellEncoder:
    """The cell that cellrt serves, called on flat batches."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __call__(self, rows: Sequence[Row], sentences: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the embedding ``[hidden]`` of each sentence of the one row, by its number."""
        (row,) = rows
        sizes = torch.tensor([len(sentences[one]) for one in row])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int()
        positions = torch.cat([torch.arange(size) for size in sizes.tolist()]).int()
        is_read = torch.zeros(len(positions), dtype=torch.bool)
        is_read[offsets[1:].long() - 1] = True
        spans = Spans(offsets, positions, is_read)
        (made,) = self._cell.run(torch.cat([sentences[one] for one in row]), spans)
        return dict(zip(row, made[is_read]))


class PlainEncoder:
    """A ``TransformerStack`` over batches of rows in plain torch: the mean of each sentence's rows, of length 1."""

    def __init__(self, stack: TransformerStack) -> None:
        self._stack, self._heads = stack, stack.sizes.attention.heads
        self._layers = []
        layers: Any = stack.layers
        for layer in layers:
            own, mlp = layer.attention, layer.mlp
            packed = Linear(own.query, own.key, own.value), Linear(own.out), Linear(mlp.up), Linear(mlp.down)
            self._layers.append((layer, *packed))

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row], sentences: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the embedding ``[hidden]`` of each sentence, by its number."""
        if len(rows) == 1:
            return self._run_flat(rows[0], sentences)
        tokens = pad_sequence([torch.cat([sentences[one] for one in row]) for row in rows], batch_first=True)
        owners = torch.full(tokens.shape, -1)
        places = torch.zeros(tokens.shape, dtype=torch.int64)
        spans: list[tuple[int, int, int, int]] = []
        for k, row in enumerate(rows):
            at = 0
            for one in row:
                end = at + len(sentences[one])
                owners[k, at:end], places[k, at:end] = one, torch.arange(end - at)
                spans.append((one, k, at, end))
                at = end
        mask = (owners[:, :, None] == owners[:, None, :])[:, None]
        x = self._begin(tokens.reshape(-1), places.reshape(-1))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            first, *others = [part.view(*tokens.shape, self._heads, -1).transpose(1, 2) for part in (query, key, value)]
            found: Tensor = scaled_dot_product_attention(first, others[0], others[1], attn_mask=mask)
            return found.transpose(1, 2).reshape(len(query), -1)

        made = self._run(x, attend).view(*tokens.shape, -1)
        return {one: normalize(made[k, at:end].mean(0), dim=0) for one, k, at, end in spans}

    def _run_flat(self, row: Row, sentences: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return one row of sentences, whose attention is called for each."""
        sizes = [len(sentences[one]) for one in row]
        tokens, places = torch.cat([sentences[one] for one in row]), torch.cat([torch.arange(size) for size in sizes])

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            found = []
            for part in zip(*(each.view(len(query), self._heads, -1).split(sizes) for each in (query, key, value))):
                one, its_key, its_value = (each.transpose(0, 1)[None] for each in part)
                found.append(scaled_dot_product_attention(one, its_key, its_value)[0].transpose(0, 1).flatten(1))
            return torch.cat(found)

        made = self._run(self._begin(tokens, places), attend).split(sizes)
        return {one: normalize(part.mean(0), dim=0) for one, part in zip(row, made)}

    def _begin(self, tokens: Tensor, places: Tensor) -> Tensor:
        x: Tensor = self._stack.embedding(tokens) * self._stack.scale + self._stack.positions(places)
        return x if self._stack.norm is None else self._stack.norm(x)

    def _run(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        for layer, qkv, out, up, down in self._layers:
            query, key, value = qkv(x).chunk(3, -1)
            x = layer.attention_norm(x + out(attend(query, key, value)))
            x = layer.mlp_norm(x + down(gelu(up(x))))
        return x
