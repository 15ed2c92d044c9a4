"""All layers of Llama's family as one compiled call on a CPU: what is between the embedding and the last norm.

The parts are those that its modules call (``packed.py``, ``_row_kernels.py``, ``_paged_attention.py``), in the same
order and with the same bits; what is saved is Python, some 0.2 ms a layer, and the interpreter lock, which it does not
hold. With weights of 16 bits only queries, keys and values are rounded to these, where modules round every result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cellrt.cells._attention_tile import read_row, write_row
from cellrt.cells._narrow import project_kind
from cellrt.cells._paged_attention import append, attend
from cellrt.cells._row_kernels import add_rows, gate_rows, norm_rows, turn_rows
from cellrt.cells._weights import Derived, is_fusable, pack_half_with_bias, pack_with_bias
from cellrt.cells.paged_attention import LayerPages, Mask, Pages, Spans, settings_of, task_of
from cellrt.cells.transformer import Heads
from cellrt.definition.compiled_form import is_settled, nogil, nogil_part, start_of
from cellrt.kernels.paged_attention.pages import check, check_appended
from cellrt.products.packed import FLOAT_BYTES, new_room, packed_numbers
from cellrt.products.vectors import FLOAT32

LINEARS = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
NORMS = ("attention_norm", "mlp_norm", "attention.query_norm", "attention.key_norm")
NOTHING: dict[str, Any] = {"weight": None}
"""The parameters of a norm that is not there."""
LAYER_WORDS = 2 * len(LINEARS) + len(NORMS)
"""Addresses of a layer: of each linear layer packed weight and bias, and of each norm, 0 where there is none."""


@nogil_part
def run_layers(layers, sizes, epsilon, x, rows, positions, turns, settings, task, places):  # type: ignore[no-untyped-def]
    """Change rows ``x`` ``[rows, hidden]`` as all layers do, and write their keys and values to the pages.

    ``layers`` has the words of each layer, ``sizes`` int64 ``[count, hidden, inner, heads, kv_heads, head_dim]``;
    ``turns`` is as ``fill_turns`` makes it, ``settings`` and ``task`` are as ``attend`` takes them, and ``places`` has
    the addresses of the keys and values of each layer's pages ``[count, 2]``. Linear layers have the pages' kind of
    numbers; norms and rows are float32.
    """
    kind, one = settings[3], np.float32(1)
    count, hidden, inner, heads, kv_heads, head_dim = sizes
    wide, narrow = heads * head_dim, kv_heads * head_dim
    widths = np.array([hidden, wide, wide, narrow, narrow, inner, inner])
    room = np.empty(rows * widths.sum(), np.float32)
    starts = start_of(room) + FLOAT_BYTES * rows * (np.cumsum(widths) - widths)
    normed, query, read, key, value, gate, up = (
        starts[0], starts[1], starts[2], starts[3], starts[4], starts[5], starts[6]
    )  # fmt: skip
    task[3], task[4], task[5], task[6] = query, read, key, value
    for layer in range(count):
        own = layers[layer]
        norm_rows(x, own[14], rows, hidden, epsilon, normed)
        project_kind(kind, normed, rows, hidden, own[0], own[1], wide, query)
        project_kind(kind, normed, rows, hidden, own[2], own[3], narrow, key)
        project_kind(kind, normed, rows, hidden, own[4], own[5], narrow, value)
        if own[16] != 0:
            norm_rows(query, own[16], rows * heads, head_dim, epsilon, query)
            norm_rows(key, own[17], rows * kv_heads, head_dim, epsilon, key)
        turn_rows(query, positions, rows, heads, head_dim // 2, turns, query)
        turn_rows(key, positions, rows, kv_heads, head_dim // 2, turns, key)
        if kind != FLOAT32:
            write_row(kind, query, query, rows * wide, one)
            write_row(kind, key, key, rows * narrow, one)
            write_row(kind, value, value, rows * narrow, one)
        task[7], task[8] = places[layer, 0], places[layer, 1]
        append(start_of(settings), start_of(task))
        attend(start_of(settings), start_of(task))
        if kind != FLOAT32:
            read_row(kind, read, query, rows * wide, one)
        project_kind(kind, read if kind == FLOAT32 else query, rows, wide, own[6], own[7], hidden, normed)
        add_rows(x, normed, rows, hidden)
        norm_rows(x, own[15], rows, hidden, epsilon, normed)
        project_kind(kind, normed, rows, hidden, own[8], own[9], inner, gate)
        project_kind(kind, normed, rows, hidden, own[10], own[11], inner, up)
        gate_rows(gate, up, rows, inner, gate)
        project_kind(kind, gate, rows, inner, own[12], own[13], hidden, normed)
        add_rows(x, normed, rows, hidden)
    return room.size  # what is used here is not freed before


@nogil
def _run_layers_alone(layers, sizes, epsilon, x, rows, positions, turns, settings, task, places):  # type: ignore[no-untyped-def]
    """Call ``run_layers`` from Python."""
    return run_layers(layers, sizes, epsilon, x, rows, positions, turns, settings, task, places)


class LayerWeights:
    """The packed weights of a model's layers. Copies and pickles start empty."""

    def __init__(self) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._packed = Derived(self._pack)
        self._last: tuple[NDArray[np.int64], list[Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def of(self, layers: nn.ModuleList) -> tuple[NDArray[np.int64], list[Any]]:
        """Return the words of each layer, and what they point to."""
        if self._last is None or not is_settled(layers):  # to look at hundreds of weights takes a while
            self._slots = self._slots or [slot for layer in layers for slot in _slots_of(layer)]
            self._last = self._packed.of(*[own[name] for own, name in self._slots])
        return self._last

    def _pack(self, *weights: Tensor | None) -> tuple[NDArray[np.int64], list[Any]]:
        each = len(self._slots) // (2 * len(LINEARS) + len(NORMS))
        words, kept = np.zeros((each, LAYER_WORDS), np.int64), list[Any](weights)
        linears = [weight for weight in weights if weight is not None and weight.dim() == 2]
        pack = pack_with_bias if linears[0].dtype is torch.float32 else pack_half_with_bias
        sizes = [packed_numbers(weight) * weight.element_size() // FLOAT_BYTES for weight in linears]
        parts, rooms = iter(weights), iter(new_room(sum(sizes)).split(sizes))  # in the order in which they are read
        for layer in range(each):
            for place in range(len(LINEARS)):
                weight, bias = next(parts), next(parts)
                if weight is None:
                    raise TypeError("a linear layer without a weight")
                packed, added = pack(weight, bias, next(rooms))
                kept += [packed, added]
                words[layer, 2 * place : 2 * place + 2] = packed.address, added.data_ptr()
            for place in range(2 * len(LINEARS), LAYER_WORDS):
                if (norm := next(parts)) is not None:
                    kept.append(norm.detach().float())
                    words[layer, place] = kept[-1].data_ptr()
        return words, kept


def _slots_of(layer: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the places of the layer's parameters, in the order of its words: a dict of parameters and a name in it."""
    slots: list[tuple[dict[str, Any], str]] = []
    for name in LINEARS:
        own = layer.get_submodule(name)._parameters
        slots += [(own, "weight"), (own, "bias")]
    for name in NORMS:
        part, _, last = name.rpartition(".")
        norm = getattr(layer.get_submodule(part), last)
        slots.append((NOTHING if norm is None else norm._parameters, "weight"))
    return slots


def has_one_call(x: Tensor, spans: Spans, pages: Sequence[Pages]) -> bool:
    """Return whether the layers can be one compiled call: float32 for inference on a CPU, with one table of pages for
    all.
    """
    first = pages[0]
    if not is_fusable(x, first.keys, first.values) or not len(x) or spans.positions.dtype is not torch.int32:
        return False
    if isinstance(pages, LayerPages):
        return True
    strides = first.keys.stride()
    shared = (own.tables is first.tables and own.keys.stride() == own.values.stride() == strides for own in pages)
    return all(shared) and first.starts is None


class LayerSizes(NamedTuple):
    """The sizes that all layers share."""

    heads: Heads
    inner: int
    epsilon: float
    window: int


def run_all(
    words: NDArray[np.int64], sizes: LayerSizes, turns: Tensor, x: Tensor, spans: Spans, pages: Sequence[Pages]
) -> Tensor:
    """Return the rows ``[rows, hidden]`` behind the last layer; ``x``, which it changes, are those before the first.

    ``words`` are those of ``LayerWeights``, ``turns`` the cosines and sines of all positions that the rows have.
    """
    heads, mask, first = sizes.heads, Mask(True, sizes.window), pages[0]
    rows, size = len(x), heads.size
    key = x.new_empty(rows, heads.num_kv_heads, size)
    check(x.new_empty(rows, heads.heads, size), first, spans, mask)
    check_appended(first, spans, key, key)
    settings = settings_of(heads.heads, first, mask, size**-0.5 if heads.scale is None else heads.scale)
    if isinstance(pages, LayerPages):
        places = pages.addresses()
    else:
        places = np.array([(own.keys.data_ptr(), own.values.data_ptr()) for own in pages])
    numbers = np.array([len(pages), heads.hidden, sizes.inner, heads.heads, heads.num_kv_heads, size])
    at = x.data_ptr(), rows, spans.positions.data_ptr(), turns.data_ptr()
    _run_layers_alone(words, numbers, sizes.epsilon, *at, settings, task_of(first, spans), places)
    return x
