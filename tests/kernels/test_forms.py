"""Which forms of a kernel are compiled: none for where rows lie or how many there are, few for a number's tile.

Keys are those of Triton's own binder, so a launch whose key is not new compiles nothing.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.combine_rows import Combination, combine_rows
from cellrt.kernels.gate_weights import PackedWeights
from cellrt.kernels.gru_step import gru_step
from cellrt.kernels.gru_step import pack_weights as pack_gru
from cellrt.kernels.loop_rows import LoopTask, begin, go_on
from cellrt.kernels.lstm_chain import lstm_chain, make_scratch
from cellrt.kernels.lstm_step import lstm_step
from cellrt.kernels.lstm_step import pack_weights as pack_lstm
from cellrt.kernels.paged_attention import Pages, Spans, append_pages, paged_attention
from cellrt.kernels.project_argmax import project_argmax
from cellrt.kernels.project_logits import project_logits
from cellrt.kernels.projection import Projection
from cellrt.kernels.ragged_attention import Memory, ragged_attention
from cellrt.kernels.sample import Sampling, sample
from cellrt.kernels.score_tokens import score_tokens
from cellrt.kernels.table_rows import table_rows
from cellrt.kernels.tiles import ROW_CLASSES
from cellrt.kernels.tree_lstm_step import pack_weights as pack_tree
from cellrt.kernels.tree_lstm_step import tree_lstm_step
from tests.kernels.ahead import launches_for_the_host, needs_compiler

pytestmark = needs_compiler
HIDDEN = 1024
SHIFTS = (0, 1, 2, 3)
"""Where rows begin in a task's words: every alignment that a launch can tell apart."""
ROWS = [*range(1, 40), *range(60, 70), *range(120, 140), *range(250, 260), *range(500, 520), 777, 1023, 1024]
Launcher = Callable[[int, int], object]


def numbers(count: int, shift: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """So many numbers that begin at a place of words."""
    return torch.zeros(count + shift, dtype=dtype)[shift:]


def arena(count: int, shift: int, size: int = HIDDEN) -> ArenaRows:
    """Rows of a large arena."""
    return ArenaRows(values(4096, size), numbers(count, shift))


@functools.cache
def values(*shape: int) -> Tensor:
    """Memory that nobody touches."""
    return torch.empty(shape, dtype=torch.bfloat16)


@functools.cache
def packed(operation: str) -> PackedWeights:
    """Weights of a step."""
    empty = functools.partial(torch.zeros, dtype=torch.bfloat16)
    if operation == "gru":
        return pack_gru(empty(3 * HIDDEN, HIDDEN), weight_ih=empty(3 * HIDDEN, HIDDEN))
    if operation == "tree":
        return pack_tree(empty(5 * HIDDEN, 2 * HIDDEN), weight_ih=empty(5 * HIDDEN, HIDDEN))
    return pack_lstm(empty(4 * HIDDEN, HIDDEN), weight_ih=empty(4 * HIDDEN, HIDDEN) if operation == "lstm" else None)


def step_lstm(count: int, shift: int) -> None:
    rows = {name: arena(count, shift) for name in ("x", "h", "c", "h_out", "c_out")}
    lstm_step(packed("lstm"), **rows)


def step_gates(count: int, shift: int) -> None:
    rows = {name: arena(count, shift) for name in ("h", "c", "h_out", "c_out")}
    lstm_step(packed("gates"), gates=arena(count, shift, 4 * HIDDEN), **rows)


def step_gru(count: int, shift: int) -> None:
    rows = {name: arena(count, shift) for name in ("x", "h", "h_out")}
    gru_step(packed("gru"), **rows)


def step_tree(count: int, shift: int) -> None:
    names = ("x", "h_left", "h_right", "c_left", "c_right", "h_out", "c_out")
    tree_lstm_step(packed("tree"), **{name: arena(count, shift) for name in names})


def run_chain(count: int, shift: int) -> None:
    rows = {name: arena(count, shift) for name in ("h", "c", "h_out", "c_out")}
    scratch = make_scratch(packed("gates"), count)
    sizes = numbers(1 + count % 5, shift)
    lstm_chain(packed("gates"), sizes, gates=arena(count, shift, 4 * HIDDEN), scratch=scratch, **rows)


def projection() -> Projection:
    return Projection(values(5000, HIDDEN), stop_token=3)


def choose(count: int, shift: int) -> None:
    project_argmax(arena(count, shift), projection(), *made(count, shift))


def made(count: int, shift: int) -> tuple[ArenaRows, ArenaRows]:
    """Where tokens and stops go."""
    return of_numbers(torch.int64, count, shift), of_numbers(torch.bool, count, shift)


def of_numbers(dtype: torch.dtype, count: int, shift: int) -> ArenaRows:
    """Rows of an arena of one number each."""
    return ArenaRows(torch.zeros(4096, dtype=dtype), numbers(count, shift))


def draw(count: int, shift: int) -> None:
    drawn = (of_numbers(torch.int64, count, shift) for _ in range(2))
    token, stop = made(count, shift)
    sample(arena(count, shift, 5000), *drawn, Sampling(3, 0.8, 1 + count % 50, 0.9), token, stop)


def draw_in_order(count: int, shift: int) -> None:
    """As a step of loops does, from logits that were just computed: a row that is one part."""
    logits = torch.empty(count, 1500, dtype=torch.bfloat16)
    project_logits(arena(count, shift), Projection(values(1500, HIDDEN)), logits)
    drawn = (of_numbers(torch.int64, count, shift) for _ in range(2))
    token, stop = made(count, shift)
    sample(logits, *drawn, Sampling(3, 0.8, 2 + count % 50, 0.9), token, stop, of_numbers(torch.int64, count, shift))


def score(count: int, shift: int) -> None:
    """Of greedy choices and of what was drawn."""
    logits, (token, stop) = torch.empty(count, 1500, dtype=torch.bfloat16), made(count, shift)
    score_tokens(logits, token, stop, count % 9, arena(count, shift, 1500))
    score_tokens(logits, token, logprob=of_numbers(torch.float32, count, shift))


def read(count: int, shift: int) -> None:
    """What decoders with attention do: additive scores, by a query in order, and dot scores, by rows of an arena."""
    offsets, weight = numbers(count + 1, shift), values(HIDDEN, HIDDEN)
    rows, keys = torch.empty(count % 9, HIDDEN, dtype=torch.bfloat16), torch.empty(count % 9, 512, dtype=torch.bfloat16)
    ragged_attention(torch.empty(count, 512, dtype=torch.bfloat16), Memory(rows, offsets, keys, values(512)))
    context = ragged_attention(arena(count, shift), Memory(rows, offsets))
    combine_rows(context, arena(count, shift), Combination(weight, weight), arena(count, shift), context)


def pages(count: int, shift: int) -> tuple[Pages, Spans]:
    of = functools.partial(numbers, dtype=torch.int32)
    keys = values(64, 16, 4, 64)
    tables = of(count * 32, shift).view(count, 32)
    return Pages(keys, keys, tables, of(count, shift)), Spans(of(count + 1, shift), of(count, shift))


def attend(count: int, shift: int) -> None:
    where, spans = pages(count, shift)
    paged_attention(values(count, 8, 64), where, spans)


def append(count: int, shift: int) -> None:
    where, spans = pages(count, shift)
    rows = values(count, 4, 64)
    append_pages(where, spans, rows, rows)


def loop(count: int, shift: int) -> None:
    """Of any number of inputs and outputs, with flags and stops or without."""
    words, flags = numbers(16 * count + 40, shift), torch.zeros(8, dtype=torch.bool)
    task = LoopTask(words, count, count % 3, count % 5, shift, shift, shift - 1, count % 2 - 1)
    found = begin(task, flags, flags)
    go_on(task, found, count % 7, flags, flags)


LAUNCHERS: dict[str, Launcher] = {
    "lstm": step_lstm,
    "lstm of gates": step_gates,
    "gru": step_gru,
    "tree": step_tree,
    "chain": run_chain,
    "argmax": choose,
    "sample": draw,
    "sample in order": draw_in_order,
    "score": score,
    "read and combine": read,
    "attention": attend,
    "append": append,
    "loop": loop,
    "table": lambda count, shift: table_rows(of_numbers(torch.int64, count, shift), count),
}


def keys(launcher: Launcher, rows: list[int], shifts: tuple[int, ...] = SHIFTS) -> set[str]:
    """What launches with so many rows, at any of these places, are compiled for."""
    with launches_for_the_host() as launches:
        for count in rows:
            for shift in shifts:
                launcher(count, shift)
    return {launch.key for launch in launches}


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("count", [1, 16, 37, 512])
def test_nothing_is_compiled_for_where_rows_lie(name: str, count: int) -> None:
    launcher = LAUNCHERS[name]
    assert keys(launcher, [count]) == keys(launcher, [count], shifts=(0,))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_one_launch_for_each_class_of_rows_builds_all_forms(name: str) -> None:
    launcher = LAUNCHERS[name]
    assert keys(launcher, ROWS, shifts=(0,)) <= keys(launcher, list(ROW_CLASSES), shifts=(0,))
