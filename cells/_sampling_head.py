"""The head of a language model that samples, and what remembers the tokens of its prompts, cells of their own, as
compiled calls on a CPU.

They have the bits of their modules, the head in float32; what is not just so has no form (None).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from cellrt import RowSpec, grows, rows, token
from cellrt.cells import _sampling as words_at
from cellrt.cells._llama_parts import bits_of, is_listened_to
from cellrt.cells._sampling import remember_tokens
from cellrt.cells._sampling_step import IS_READ, clear_outputs, sample_read, sampling_task
from cellrt.cells._weights import are_float32_on_cpu
from cellrt.cells.attention import Linear
from cellrt.cells.row_layers import RMSNorm
from cellrt.cells.sampling import SamplingLimits, sampling_inputs, sampling_outputs
from cellrt.definition.compiled_form import DONE, CompiledForm, TaskFunction, array_at, read_word, read_words
from cellrt.definition.span_form import AT, FIRST_TENSOR, SIZES, TENSOR, SpanForm
from cellrt.products.vectors import FLOAT32

HISTORY, NUM_TENSORS = 2, 20
"""The tensors of a task: ``x``, ``token``, and from ``history`` on those of ``_sampling_step.py``."""
MEMORY_TENSORS = 9
"""``token``; of ``history`` pages, tables, lengths, positions; offsets, nodes, which are read; and the output."""


@TaskFunction
def _sample(constants, task):  # type: ignore[no-untyped-def]
    """``x``, ``token``, ``history``, ``spans`` and what is asked for -> ``SampledToken``. ``constants`` are as
    ``sampling_head_form`` lays them out."""
    model, hidden, _, page_size, ends, num_ends = read_words(constants, 6)
    epsilon = array_at(constants + 8 * 2, 1, np.float64)[0]
    words = array_at(task + 8 * FIRST_TENSOR, (NUM_TENSORS, TENSOR), np.int64)
    count, sampling = words[1, SIZES], sampling_task(words, HISTORY, page_size, ends, num_ends)
    clear_outputs(count, sampling)
    remember_tokens(words[1, AT], count, sampling)
    is_read = words[HISTORY + IS_READ, AT]
    sample_read(model, np.array([0, hidden]), epsilon, words[0, AT], count, is_read, sampling)
    return DONE


def sampling_head_form(
    norm: nn.Module | None, head: nn.Module, ends: Sequence[int], limits: SamplingLimits, page_size: int
) -> CompiledForm | None:
    """Return the compiled form of the last norm, if there is one, and the head with sampling, or None."""
    if type(head) is not Linear or is_listened_to(head) or not are_float32_on_cpu(head.weight, head.bias):
        return None
    weight: Any = None
    epsilon = 0.0
    if norm is not None:
        if type(norm) is not RMSNorm or is_listened_to(norm) or norm.eps is None or not are_float32_on_cpu(norm.weight):
            return None
        weight, epsilon = norm.weight, norm.eps
    packed, added = head._packed.of(head.weight, head.bias)
    norm_at = 0 if weight is None else weight.data_ptr()
    model = np.array([0, packed.units, norm_at, packed.address, added.data_ptr(), FLOAT32])
    end_tokens = np.array(ends, np.int64)
    words = [model.ctypes.data, packed.depth, bits_of(epsilon), page_size, end_tokens.ctypes.data, len(end_tokens)]
    inputs: Mapping[str, RowSpec] = {
        "x": rows(packed.depth), "token": token, **sampling_inputs(limits, page_size, packed.units),
    }  # fmt: skip
    keeps = packed, added, weight, model, end_tokens
    made = SpanForm.of(_sample, inputs, sampling_outputs(limits), np.array(words), keeps)
    return made._replace(is_batch_invariant=True)


@TaskFunction
def _remember(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``history`` -> the same tokens. ``constants`` has the rows of a page."""
    words = array_at(task + 8 * FIRST_TENSOR, (MEMORY_TENSORS, TENSOR), np.int64)
    count, memory = words[0, SIZES], np.zeros(words_at.NUM_WORDS, np.int64)
    memory[words_at.PAGES], memory[words_at.TABLES] = words[1, AT], words[2, AT]
    memory[words_at.WIDTH] = words[2, SIZES + 1]
    memory[words_at.PAGE_SIZE], memory[words_at.POSITIONS] = read_word(constants, 0), words[4, AT]
    memory[words_at.NODES] = words[6, AT]
    remember_tokens(words[0, AT], count, memory)
    array_at(words[8, AT], count, np.int64)[:] = array_at(words[0, AT], count, np.int64)
    return DONE


def memory_form(page_size: int) -> CompiledForm:
    """Return the compiled form of a module that appends tokens to texts and returns them."""
    inputs = {"token": token, "history": grows(dtype=torch.int32, page_size=page_size)}
    made = SpanForm.of(_remember, inputs, {"output": token}, np.array([page_size]), None)
    return made._replace(is_batch_invariant=True)
