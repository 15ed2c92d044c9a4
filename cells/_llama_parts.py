"""The parts of Llama's family that are cells of their own, as compiled forms: the embedding, a layer, the head.

Each has the bits of its module, in float32 on a CPU; what is not just so has no form (None).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from cellrt import RowSpec
from cellrt.cells._llama_stack import LAYER_WORDS, run_layers
from cellrt.cells._llama_step import MOST_POSITIONS, choose_tokens, has_turns, mark_ends, task_words
from cellrt.cells._recurrence import all_below
from cellrt.cells._weights import are_float32_on_cpu
from cellrt.cells.attention import Linear
from cellrt.cells.llama import LlamaLayers, LlamaSizes
from cellrt.cells.paged_attention import Mask, Pages, settings_of
from cellrt.cells.row_layers import RMSNorm
from cellrt.definition.compiled_form import (
    DONE,
    POSITIONS,
    REFUSED,
    CompiledForm,
    TaskFunction,
    array_at,
    port_address,
    read_word,
    read_words,
)
from cellrt.definition.span_form import AT, FIRST_TENSOR, SIZES, TENSOR, SpanForm
from cellrt.products.packed import FLOAT_BYTES, copy
from cellrt.products.vectors import FLOAT32

LAYER_TENSORS = 9
"""``x``; of ``kv`` pages, tables, lengths, positions; offsets, nodes, which are read; and the output."""
Rows = dict[str, RowSpec]


@TaskFunction
def _embed(constants, task):  # type: ignore[no-untyped-def]
    """``token`` -> ``x``."""
    table, vocabulary, hidden = read_words(constants, 3)
    rows, token, x = read_word(task, POSITIONS), port_address(task, 0), port_address(task, 1)
    if not all_below(token, rows, vocabulary):
        return REFUSED
    for row in range(rows):
        source = table + read_word(token, row) * hidden * FLOAT_BYTES
        copy(x + row * hidden * FLOAT_BYTES, source, hidden)
    return DONE


def embedding_form(embedding: nn.Embedding, inputs: Rows, outputs: Rows) -> CompiledForm | None:
    """Return the compiled form of an embedding alone, or None."""
    table = embedding.weight
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or is_listened_to(embedding):
        return None
    if not are_float32_on_cpu(table) or not table.is_contiguous():
        return None
    words = np.array([table.data_ptr(), *table.shape])
    return CompiledForm(_embed, inputs, outputs, words, table, is_batch_invariant=True)


@TaskFunction
def _run_layer(constants, task):  # type: ignore[no-untyped-def]
    """``x``, ``kv`` -> ``x``. ``constants`` are as ``layer_form`` lays them out."""
    layer, sizes, settings, _, turns, num_turns, page_size, page_stride = read_words(constants, 8)
    epsilon = array_at(constants + 8 * 3, 1, np.float64)[0]
    words, numbers = array_at(task + 8 * FIRST_TENSOR, (LAYER_TENSORS, TENSOR), np.int64), array_at(sizes, 6, np.int64)
    rows, positions, keys, x = words[0, SIZES], words[4, AT], words[1, AT], words[8, AT]
    if not has_turns(positions, rows, num_turns):
        return REFUSED
    copy(x, words[0, AT], rows * numbers[1])
    places = np.empty((1, 2), np.int64)
    places[0, 0], places[0, 1] = keys, keys + page_stride // 2 * FLOAT_BYTES
    own, given = task_words(words, page_size, page_stride), array_at(settings, 9, np.int64)
    run_layers(
        array_at(layer, (1, LAYER_WORDS), np.int64), numbers, epsilon, x, rows, positions, turns, given, own, places
    )
    return DONE


def layer_form(layers: LlamaLayers, sizes: LlamaSizes, inputs: Rows, outputs: Rows) -> SpanForm | None:
    """Return the compiled form of one layer, or None."""
    heads, stored, first = sizes.attention, inputs["kv"].stored, layers[0]
    if type(layers) is not LlamaLayers or is_listened_to(layers) or not are_float32_on_cpu(*layers.parameters()):
        return None
    weights, kept = layers.weights.of(layers)
    numbers = np.array([1, heads.hidden, sizes.inner, heads.heads, heads.num_kv_heads, heads.size])
    page, nothing = (torch.empty(*shape, dtype=torch.float32, device="cpu") for shape in ((1, *stored.shape), (0,)))
    pages = Pages(page[:, 0], page[:, 1], nothing, nothing)
    scale = heads.size**-0.5 if heads.scale is None else heads.scale
    settings = settings_of(heads.heads, pages, Mask(True, sizes.window), scale)
    turns = _rotary_of(first).turns_up_to(MOST_POSITIONS - 1)
    words = [weights.ctypes.data, numbers.ctypes.data, settings.ctypes.data, bits_of(sizes.epsilon)]
    words += [turns.data_ptr(), len(turns), page.shape[2], page.numel()]
    keeps = kept, weights, numbers, settings, turns
    made = SpanForm.of(_run_layer, inputs, outputs, np.array(words), keeps)
    return made._replace(is_batch_invariant=True)


@TaskFunction
def _choose(constants, task):  # type: ignore[no-untyped-def]
    """``x`` -> ``token``, ``logprob``, ``stop``. ``constants`` are as ``head_form`` lays them out."""
    hidden, norm, _, head, bias, vocabulary, ends, num_ends = read_words(constants, 8)
    epsilon = array_at(constants + 8 * 2, 1, np.float64)[0]
    rows, token = read_word(task, POSITIONS), port_address(task, 1)
    x, logprob = port_address(task, 0), port_address(task, 2)
    choose_tokens(x, rows, hidden, norm, epsilon, FLOAT32, head, bias, vocabulary, token, logprob)
    mark_ends(token, rows, ends, num_ends, port_address(task, 3))
    return DONE


def head_form(norm: RMSNorm, head: Linear, ends: Sequence[int], inputs: Rows, outputs: Rows) -> CompiledForm | None:
    """Return the compiled form of the last norm and the head, or None."""
    if type(norm) is not RMSNorm or type(head) is not Linear or is_listened_to(norm) or is_listened_to(head):
        return None
    if norm.eps is None or not are_float32_on_cpu(norm.weight, head.weight, head.bias):
        return None
    packed, added = head._packed.of(head.weight, head.bias)
    words = [packed.depth, norm.weight.data_ptr(), bits_of(norm.eps), packed.address, added.data_ptr()]
    end_tokens = np.array(ends, np.int64)
    constants = np.array([*words, packed.units, end_tokens.ctypes.data, len(end_tokens)])
    keeps = packed, added, norm.weight, end_tokens
    return CompiledForm(_choose, inputs, outputs, constants, keeps, is_batch_invariant=True)


def bits_of(number: float) -> int:
    """Return the bits of a float64 as an integer."""
    return int(np.float64(number).view(np.int64))


def _rotary_of(layer: Any) -> Any:
    return layer.attention.rotary


def is_listened_to(module: nn.Module) -> bool:
    """Return whether a module, or one inside it, has hooks."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
