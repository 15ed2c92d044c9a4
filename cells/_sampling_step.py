"""A whole step of Llama's family with sampling as one compiled call on a CPU: ``_llama_step.py``, and then
``_sampling.py`` in place of the greedy choice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from cellrt import PagedRows, RowSpec, Spans
from cellrt.cells import _sampling as words_at
from cellrt.cells._llama_stack import LAYER_WORDS
from cellrt.cells._llama_step import LlamaStep, has_turns, rows_read, run_stack, takes, task_words
from cellrt.cells._narrow import project_kind
from cellrt.cells._row_kernels import norm_rows
from cellrt.cells._sampling import remember_tokens, sample_rows
from cellrt.cells.llama import Llama
from cellrt.cells.sampling import Asked, SampledToken, SamplingLimits, are_plain, new_tokens
from cellrt.definition.compiled_form import (
    DONE,
    REFUSED,
    CompiledForm,
    TaskFunction,
    array_at,
    nogil_part,
    read_words,
    start_of,
)
from cellrt.definition.span_form import AT, FIRST_TENSOR, SIZES, TENSOR, SpanForm

# The tensors of a task: of ``token`` 1, of ``kv`` and ``history`` 4 each (pages, tables, lengths, positions), of the
# spans 1, of what is asked for 5; offsets, nodes and which rows are read; and the outputs.
HISTORY, NUM_TENSORS = 5, 23
STEPS, ASKED, OFFSETS, NODES, IS_READ, MADE = 4, 5, 10, 11, 12, 13
"""The places behind the first tensor of ``history``."""


@nogil_part
def sample_read(model, sizes, epsilon, x, rows, is_read, task):  # type: ignore[no-untyped-def]
    """Return the last norm, if there is one, and the head of those rows ``x`` ``[rows, hidden]`` that are read, and
    ``sample_rows`` of them.
    """
    hidden = sizes[1]
    _, vocabulary, norm, head, bias, kind = read_words(model, 6)
    read, places = rows_read(x, rows, hidden, is_read)
    count = places.size
    normed, logits = np.empty(count * hidden, np.float32), np.empty(count * vocabulary, np.float32)
    if norm != 0:
        norm_rows(start_of(read), norm, count, hidden, epsilon, start_of(normed))
    else:
        normed[:] = read
    project_kind(kind, start_of(normed), count, hidden, head, bias, vocabulary, start_of(logits))
    sample_rows(start_of(logits), count, vocabulary, start_of(places), task)
    return read.size + normed.size + logits.size + places.size  # what is used here is not freed before


@nogil_part
def _run_step(step, task, layers, sizes, settings, epsilon, sampling):  # type: ignore[no-untyped-def]
    """Run the layers as ``run_stack`` does, append the tokens to their texts, and sample.

    ``sampling`` is as ``sample_rows`` takes it.
    """
    tokens, rows, is_read, model = step[0], step[1], step[2], step[5]
    x = np.empty(rows * sizes[1], np.float32)
    if not run_stack(step, task, layers, sizes, settings, epsilon, x):
        return False
    remember_tokens(tokens, rows, sampling)
    sample_read(model, sizes, epsilon, start_of(x), rows, is_read, sampling)
    return x.size > 0


@nogil_part
def clear_outputs(rows, task):  # type: ignore[no-untyped-def]
    """Write the outputs of rows that are not read: zeros, and no likeliest tokens."""
    array_at(task[words_at.TOKEN], rows, np.int64)[:] = 0
    array_at(task[words_at.LOGPROB], rows, np.float32)[:] = 0
    array_at(task[words_at.STOP], rows, np.uint8)[:] = 0
    most = task[words_at.MOST_LOGPROBS]
    array_at(task[words_at.TOP_TOKEN], rows * most, np.int64)[:] = -1
    array_at(task[words_at.TOP_LOGPROB], rows * most, np.float32)[:] = -np.inf


@nogil_part
def sampling_task(tensors, first, history_size, ends, num_ends):  # type: ignore[no-untyped-def]
    """Return the words that ``sample_rows`` takes from a task's tensors, whose ``history`` begins at ``first``."""
    task = np.zeros(words_at.NUM_WORDS, np.int64)
    for k in range(5):
        task[words_at.SETTINGS + k] = tensors[first + ASKED + k, AT]
    for k in range(5):
        task[words_at.TOKEN + k] = tensors[first + MADE + k, AT]
    task[words_at.STEPS], task[words_at.NODES] = tensors[first + STEPS, AT], tensors[first + NODES, AT]
    task[words_at.PAGES], task[words_at.TABLES] = tensors[first, AT], tensors[first + 1, AT]
    task[words_at.WIDTH], task[words_at.PAGE_SIZE] = tensors[first + 1, SIZES + 1], history_size
    task[words_at.POSITIONS] = tensors[first + 3, AT]
    task[words_at.MOST_STOPS] = tensors[first + ASKED + 2, SIZES + 1]
    task[words_at.MOST_BIASES] = tensors[first + ASKED + 3, SIZES + 1]
    task[words_at.MOST_LOGPROBS] = tensors[first + MADE + 3, SIZES + 1]
    task[words_at.ENDS], task[words_at.NUM_ENDS] = ends, num_ends
    return task


@TaskFunction
def _step_of_task(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``kv``, ``history``, ``spans`` and what is asked for -> ``SampledToken``. ``constants`` are those of
    ``LlamaStep.constants_of``, then a page's rows of the history, ``ends``, ``num_ends``."""
    model, layers, num_layers, sizes, settings, _, turns, num_turns, page_size, page_stride = read_words(constants, 10)
    history_size, ends, num_ends = read_words(constants + 8 * 10, 3)
    epsilon = array_at(constants + 8 * 5, 1, np.float64)[0]
    words = array_at(task + 8 * FIRST_TENSOR, (NUM_TENSORS, TENSOR), np.int64)
    rows, shape = words[0, SIZES], (num_layers, LAYER_WORDS)
    if not has_turns(words[4, AT], rows, num_turns):
        return REFUSED
    own = task_words(words, page_size, page_stride)
    own[1] = words[HISTORY + OFFSETS, AT]
    sampling = sampling_task(words, HISTORY, history_size, ends, num_ends)
    clear_outputs(rows, sampling)
    step = np.array([words[0, AT], rows, words[HISTORY + IS_READ, AT], turns, words[1, AT], model])
    given = array_at(layers, shape, np.int64), array_at(sizes, 6, np.int64), array_at(settings, 9, np.int64)
    return DONE if _run_step(step, own, *given, epsilon, sampling) else REFUSED


class SamplingStep(LlamaStep):
    """The step of one model with sampling."""

    def sample(
        self,
        model: Llama,
        token: Tensor,
        kv: PagedRows,
        history: PagedRows,
        spans: Spans,
        asked: Asked,
        limits: SamplingLimits,
    ) -> SampledToken | None:
        """Return the next tokens; None for what only the modules take or refuse."""
        given = self.given_for(model, token, kv)
        if given is None or not are_plain(asked, history, spans):
            return None
        made = new_tokens(len(token), limits, token.device)
        own = (each for grown in (kv, history) for each in (grown.pages, grown.tables, grown.lengths, grown.positions))
        shared = kv.offsets, history.nodes, kv.is_read
        constants = [*given[0], history.page_size, self.ends.ctypes.data, len(self.ends)]
        is_done = takes(_step_of_task, constants, [token, *own, spans.positions, *asked, *shared, *made])
        return made if is_done else None

    def form(self, model: Llama, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> CompiledForm | None:
        """Return the compiled form of a step with sampling."""
        given = self.constants_of(model, inputs["kv"])
        if given is None:
            return None
        constants = [*given[0], inputs["history"].page_size, self.ends.ctypes.data, len(self.ends)]
        made = SpanForm.of(_step_of_task, inputs, outputs, np.array(constants), (*given, self.ends))
        return made._replace(is_batch_invariant=True)
