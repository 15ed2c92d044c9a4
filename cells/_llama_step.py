"""A whole step of Llama's family as one compiled call on a CPU: from tokens to the likeliest next ones.

The parts are those that ``Llama`` and ``likeliest`` call, in the same order and with the same bits. What is saved is
the Python between them, which is in no cache once a model's weights have gone through all, and the interpreter lock,
which clients of the same process have meanwhile. With weights of 16 bits the modules round more (``_llama_stack.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cellrt import PagedRows, RowSpec
from cellrt.cells._attention_tile import read_row
from cellrt.cells._llama_stack import LAYER_WORDS, run_layers
from cellrt.cells._narrow import project_kind
from cellrt.cells._recurrence import all_below
from cellrt.cells._row_kernels import choose_likeliest, norm_rows
from cellrt.cells._weights import is_fusable, is_fusable_half, is_packed, is_token
from cellrt.cells.attention import Linear
from cellrt.cells.llama import Llama, LlamaLayers
from cellrt.cells.paged_attention import KINDS, Mask, Pages, settings_of
from cellrt.cells.row_layers import RMSNorm
from cellrt.cells.sampling import ends_of
from cellrt.definition.compiled_form import (
    DONE,
    REFUSED,
    CompiledForm,
    TaskFunction,
    array_at,
    is_settled,
    nogil_part,
    read_word,
    read_words,
    start_of,
)
from cellrt.definition.span_form import AT, FIRST_TENSOR, SIZES, TENSOR, SpanForm
from cellrt.products.packed import FLOAT_BYTES, copy
from cellrt.products.vectors import FLOAT32

MOST_POSITIONS = 1 << 13
"""Rotary positions that a form has; a task with later ones runs through the modules, which have any."""
NUM_TENSORS = 11
"""``token``; of ``kv`` pages, tables, lengths, positions; offsets, nodes, which are read; and the outputs."""


@nogil_part
def choose_tokens(x, rows, hidden, norm, epsilon, kind, head, bias, vocabulary, tokens, logprobs):  # type: ignore[no-untyped-def]
    """Return the last norm, the head and the choice: the likeliest token, int64, of each row ``x`` ``[rows, hidden]``,
    and its log-probability. The head has this kind of numbers.
    """
    normed, logits = np.empty(rows * hidden, np.float32), np.empty(rows * vocabulary, np.float32)
    norm_rows(x, norm, rows, hidden, epsilon, start_of(normed))
    project_kind(kind, start_of(normed), rows, hidden, head, bias, vocabulary, start_of(logits))
    choose_likeliest(start_of(logits), rows, vocabulary, tokens, logprobs)
    return normed.size + logits.size  # what is used here is not freed before


@nogil_part
def rows_read(x, rows, hidden, is_read):  # type: ignore[no-untyped-def]
    """Return the rows of ``x`` ``[rows, hidden]`` that are read, and their places."""
    wanted, count = array_at(is_read, rows, np.uint8), 0
    for row in range(rows):
        count += wanted[row]
    read, places, at = np.empty(count * hidden, np.float32), np.empty(count, np.int64), 0
    for row in range(rows):
        if wanted[row]:
            copy(start_of(read) + at * hidden * FLOAT_BYTES, x + row * hidden * FLOAT_BYTES, hidden)
            places[at] = row
            at += 1
    return read, places


@nogil_part
def _choose(model, sizes, epsilon, x, rows, is_read, made):  # type: ignore[no-untyped-def]
    """``choose_tokens`` of those rows ``x`` ``[rows, hidden]`` that are read.

    ``made`` has the addresses of tokens, log-probabilities and stop flags; of other rows the first two are 0.
    """
    hidden = sizes[1]
    _, vocabulary, norm, head, bias, kind, ends, num_ends = read_words(model, 8)
    token, logprob = array_at(made[0], rows, np.int64), array_at(made[1], rows, np.float32)
    read, places = rows_read(x, rows, hidden, is_read)
    best, chance = np.empty(places.size, np.int64), np.empty(places.size, np.float32)
    to = start_of(best), start_of(chance)
    choose_tokens(start_of(read), places.size, hidden, norm, epsilon, kind, head, bias, vocabulary, to[0], to[1])
    token[:], logprob[:] = 0, 0
    for at in range(places.size):
        token[places[at]], logprob[places[at]] = best[at], chance[at]
    mark_ends(made[0], rows, ends, num_ends, made[2])
    return read.size  # what is used here is not freed before


@nogil_part
def mark_ends(tokens, rows, ends, num_ends, stop):  # type: ignore[no-untyped-def]
    """Write to the bytes ``stop`` whether each token is one of the int64 ``ends``."""
    token, flags = array_at(tokens, rows, np.int64), array_at(stop, rows, np.uint8)
    ending = array_at(ends, num_ends, np.int64)
    flags[:] = 0
    for row in range(rows):
        for end in ending:
            if token[row] == end:
                flags[row] = 1


@nogil_part
def look_up(table, token, hidden, kind, width, target):  # type: ignore[no-untyped-def]
    """Write a token's row ``[hidden]``, as float32, of a table of this kind of numbers, or with ``width`` above 0 of a
    packed one with panels so wide.
    """
    size, one = FLOAT_BYTES if kind == FLOAT32 else FLOAT_BYTES // 2, np.float32(1)
    if width == 0:
        read_row(kind, table + token * hidden * size, target, hidden, one)
        return
    first = table + (token // width * hidden * width + token % width) * size
    for k in range(hidden):
        read_row(kind, first + k * width * size, target + k * FLOAT_BYTES, 1, one)


@nogil_part
def run_stack(step, task, layers, sizes, settings, epsilon, x):  # type: ignore[no-untyped-def]
    """Write to ``x`` ``[rows * hidden]`` what the last layer makes; False if there is a token that has no embedding,
    and then nothing was done.

    ``step`` begins with ``tokens, rows, is_read, turns, keys, model``; ``layers``, ``sizes``, ``settings`` and ``task``
    are as ``run_layers`` takes them.
    """
    tokens, rows, _, turns, keys, model = step[0], step[1], step[2], step[3], step[4], step[5]
    hidden, table, vocabulary = sizes[1], read_word(model, 0), read_word(model, 1)
    kind, layer_bytes, value_bytes, width = settings[3], read_word(model, 8), read_word(model, 9), read_word(model, 10)
    if not all_below(tokens, rows, vocabulary):
        return False
    for row in range(rows):
        look_up(table, read_word(tokens, row), hidden, kind, width, start_of(x) + row * hidden * FLOAT_BYTES)
    places = np.empty((sizes[0], 2), np.int64)
    for layer in range(sizes[0]):
        places[layer, 0] = keys + layer * layer_bytes
        places[layer, 1] = places[layer, 0] + value_bytes
    run_layers(layers, sizes, epsilon, start_of(x), rows, task[2], turns, settings, task, places)
    return True


@nogil_part
def _run_step(step, task, layers, sizes, settings, epsilon):  # type: ignore[no-untyped-def]
    """Run the layers as ``run_stack`` does, and choose the likeliest tokens."""
    rows, is_read, model = step[1], step[2], step[5]
    x = np.empty(rows * sizes[1], np.float32)
    if not run_stack(step, task, layers, sizes, settings, epsilon, x):
        return False
    _choose(model, sizes, epsilon, start_of(x), rows, is_read, step[6:9])
    return x.size > 0


@nogil_part
def has_turns(positions, rows, num_turns):  # type: ignore[no-untyped-def]
    """Return whether a table of this many positions' turns has those of all rows."""
    highest = 0
    for position in array_at(positions, rows, np.int32):
        highest = max(highest, position)
    return highest < num_turns


@nogil_part
def task_words(tensors, page_size, page_stride):  # type: ignore[no-untyped-def]
    """Return the ``task`` of ``run_layers`` from a task's tensors: addresses and sizes of rows, ``kv``, offsets and so
    on.
    """
    own = np.zeros(15, np.int64)
    own[0], own[1], own[2] = tensors[2, SIZES], tensors[5, AT], tensors[4, AT]
    own[9], own[10], own[11] = page_size, page_stride, tensors[2, AT]
    own[12], own[13] = tensors[2, SIZES + 1], tensors[3, AT]
    return own


@TaskFunction
def _step_of_task(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``kv`` -> ``token``, ``logprob``, ``stop``. ``constants`` are as ``constants_of`` lays them out."""
    model, layers, num_layers, sizes, settings, _, turns, num_turns, page_size, page_stride = read_words(constants, 10)
    epsilon = array_at(constants + 8 * 5, 1, np.float64)[0]
    words = array_at(task + 8 * FIRST_TENSOR, (NUM_TENSORS, TENSOR), np.int64)
    rows, shape = words[0, SIZES], (num_layers, LAYER_WORDS)
    if not has_turns(words[4, AT], rows, num_turns):
        return REFUSED
    made = words[8, AT], words[9, AT], words[10, AT]
    step = np.array([words[0, AT], rows, words[7, AT], turns, words[1, AT], model, made[0], made[1], made[2]])
    given = array_at(layers, shape, np.int64), array_at(sizes, 6, np.int64), array_at(settings, 9, np.int64)
    return DONE if _run_step(step, task_words(words, page_size, page_stride), *given, epsilon) else REFUSED


def takes(function: TaskFunction, constants: Sequence[int], tensors: Sequence[Tensor]) -> bool:
    """Call a form's function with a task of these tensors, of which it asks where they lie and their first two sizes;
    return whether it took it."""
    given, words = np.array(constants), np.zeros(FIRST_TENSOR + TENSOR * len(tensors), np.int64)
    told = words[FIRST_TENSOR:].reshape(-1, TENSOR)
    told[:, AT] = [each.data_ptr() for each in tensors]
    told[:, SIZES : SIZES + 2] = [(*each.shape[:2], 1)[:2] for each in tensors]
    return function.call(given.ctypes.data, words.ctypes.data) == DONE


class _Words(NamedTuple):
    """The arguments of a step that stay the same from step to step.

    Attributes:
        model: ``embedding, vocabulary, norm, head, bias, kind, ends, num_ends, layer_bytes, value_bytes, width``:
            addresses and numbers, the kind of the numbers of linear layers, how far a layer's keys, and its values, lie
            behind the first layer's keys, and the width of the embedding's panels: one that is the head, too, is read
            from the packed head, so that it need not be in memory; 0 of another.
        model_at: where these words are.
        layers, sizes, settings: as ``run_layers`` takes them.
        turns: the tables of the layers' rotary positions.
        page: the shape of a page.
        keeps: what addresses point to.
    """

    model: NDArray[np.int64]
    model_at: int
    layers: NDArray[np.int64]
    sizes: NDArray[np.int64]
    settings: NDArray[np.int64]
    turns: Callable[[int], Tensor]
    page: tuple[int, ...]
    keeps: object

    def constants(self, num_positions: int, epsilon: float) -> tuple[list[int], object]:
        """Return the words of a form for this many positions at least, and what they point to."""
        turns, bits = self.turns(num_positions - 1), int(np.float64(epsilon).view(np.int64))
        made = [self.model_at, self.layers.ctypes.data, len(self.layers), self.sizes.ctypes.data]
        made += [self.settings.ctypes.data, bits, turns.data_ptr(), len(turns), self.page[2], math.prod(self.page)]
        return made, (self, turns)


class LlamaStep:
    """The step of one model, with the weights as the call reads them. Copies and pickles start empty."""

    def __init__(self, end_token: int | Sequence[int]) -> None:
        self.ends = np.array(ends_of(end_token), np.int64)
        self._last: _Words | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ends.tolist(),)

    def run(self, model: Llama, token: Tensor, kv: PagedRows) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return next tokens int64, their log-probabilities float32, and whether they end the text, ``[rows]``
        each; or None for what only the modules take or refuse. Of rows that are not read, tokens and
        log-probabilities are 0.
        """
        given, rows = self.given_for(model, token, kv), token.shape[0]
        if given is None:
            return None
        made = torch.empty_like(token), torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.bool)
        own = kv.pages, kv.tables, kv.lengths, kv.positions
        is_done = takes(_step_of_task, given[0], [token, *own, kv.offsets, kv.nodes, kv.is_read, *made])
        return made if is_done else None

    def given_for(self, model: Llama, token: Tensor, kv: PagedRows) -> tuple[list[int], object] | None:
        """Return ``constants_of`` for one step, whatever its positions are; None where it cannot be one call."""
        if type(model) is not Llama or not is_token(token) or kv.page_dim != 2:
            return None
        if not is_fusable(kv.pages) and not is_fusable_half(kv.pages, kv.pages):
            return None
        words = self._words_of(model, kv.pages)
        if words is None or not _fits(token, kv):
            return None
        return words.constants(kv.tables.shape[1] * words.page[2], model.sizes.epsilon)

    def form(self, model: Llama, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> CompiledForm | None:
        """Return the compiled form of a step, which what ``run`` leaves to the modules has none of."""
        given = self.constants_of(model, inputs["kv"])
        if given is None:
            return None
        made = SpanForm.of(_step_of_task, inputs, outputs, np.array(given[0]), given[1])
        return made._replace(is_batch_invariant=True)

    def constants_of(self, model: Llama, kv: RowSpec) -> tuple[list[int], object] | None:
        """Return the constants of a form, and what they point to; None where a step cannot be one call."""
        stored = kv.stored
        if not is_packed(stored.dtype):
            return None
        words = self._words_of(model, torch.empty(1, *stored.shape, dtype=stored.dtype, device="cpu"))
        if words is None:
            return None
        return words.constants(MOST_POSITIONS, model.sizes.epsilon)

    def _words_of(self, model: Llama, pages: Tensor) -> _Words | None:
        """Return the words of a model, made once for these pages; None where a step cannot be one call."""
        last = self._last
        if last is not None and last.page == pages.shape[1:] and is_settled(model):
            return last
        sizes, heads = model.sizes, model.sizes.attention
        page_size = pages.shape[3] if pages.dim() == 6 else 0
        page = sizes.layers, 2, page_size, heads.num_kv_heads, heads.size
        if pages.shape[1:] != page or not _is_plain(model, pages.dtype):
            return None
        layers, kept = model.layers.weights.of(model.layers)
        kind, head, table = KINDS[pages.dtype], model.head, model.embedding.weight
        packed, added = (head._packed if kind == FLOAT32 else head._packed_half).of(head.weight, head.bias)
        norm = model.norm.weight.detach().float()
        is_head = table.data_ptr() == head.weight.data_ptr() and table.shape == head.weight.shape
        where = norm.data_ptr(), packed.address, added.data_ptr(), kind, self.ends.ctypes.data, len(self.ends)
        strides = pages.element_size() * pages.stride(1), pages.element_size() * pages.stride(2)
        width = packed.values.shape[2] if is_head else 0
        words = np.array([packed.address if is_head else table.data_ptr(), len(table), *where, *strides, width])
        numbers = sizes.layers, heads.hidden, sizes.inner, heads.heads, heads.num_kv_heads, heads.size
        scale = heads.size**-0.5 if heads.scale is None else heads.scale
        nowhere = pages.new_empty(0)
        first = Pages(pages[:1, 0, 0], pages[:1, 0, 1], nowhere, nowhere)
        settings = settings_of(heads.heads, first, Mask(True, sizes.window), scale)
        layer: Any = model.layers[0]
        keeps, turns = (kept, packed, added, table, norm, self.ends), layer.attention.rotary.turns_up_to
        self._last = _Words(words, words.ctypes.data, layers, np.array(numbers), settings, turns, page, keeps)
        return self._last


def _is_plain(model: Any, dtype: torch.dtype) -> bool:
    """Return whether a model's modules are the family's own, without hooks, and their weights have this dtype."""
    parts = model.embedding, model.layers, model.norm, model.head
    if tuple(map(type, parts)) != (nn.Embedding, LlamaLayers, RMSNorm, Linear):
        return False
    if model.embedding.max_norm is not None or not model.embedding.weight.is_contiguous():
        return False
    if any(weight.dtype is not dtype or not weight.is_cpu for weight in model.parameters()):
        return False
    return not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def _fits(token: Tensor, kv: PagedRows) -> bool:
    """Return whether the rows that a step is given go together; a module says what is wrong."""
    pages, tables, lengths, offsets, _, positions, is_read, _ = kv
    (rows,), (nodes, _) = token.shape, tables.shape
    if not pages.is_contiguous() or not rows or lengths.shape != (nodes,) or offsets.shape != (nodes + 1,):
        return False
    if positions.shape != (rows,) or is_read.shape != (rows,) or is_read.dtype is not torch.bool:
        return False
    for numbers in (tables, lengths, offsets, positions):
        if numbers.dtype is not torch.int32 or not numbers.is_cpu or not numbers.is_contiguous():
            return False
    return token.is_contiguous() and is_read.is_contiguous()
