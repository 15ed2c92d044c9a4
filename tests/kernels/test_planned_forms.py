"""Every form that is planned for a device fits into its shared memory, and spills nothing: all are compiled here.

A form is what the planners take for some type, size, number of rows and kind of inputs. Hidden sizes of 1024 are whole
blocks of every depth, of 1000 none.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from cellrt.kernels import gru_step, lstm_step, tree_lstm_step
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.lstm_chain.plan import ChainPlan, persistent_plan, rows_plan
from cellrt.kernels.lstm_chain.scratch import make_scratch
from cellrt.kernels.tiles import ROW_CLASSES, Tile, candidates
from tests.kernels.ahead import Launch, compile_ahead, needs_compiler, recorded_launches
from tests.kernels.tolerances import KINDS, Kind

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.timeout(900)]


class Limits(NamedTuple):
    """Of a device: its processors and a program's bytes of shared memory (CUDA C programming guide, table 30)."""

    processors: int
    shared_bytes: int


DEVICES = {80: Limits(108, 166_912), 90: Limits(132, 232_448), 100: Limits(148, 232_448)}
"""A100, H100 and B200, by architecture."""
PACKS = {"lstm_step": lstm_step.pack_weights, "gru_step": gru_step.pack_weights}
GATES = {"lstm_step": 4, "gru_step": 3, "tree_lstm_step": 5}
STATES = {
    "lstm_step": ("h", "c", "h_out", "c_out"),
    "gru_step": ("h", "h_out"),
    "tree_lstm_step": ("h_left", "h_right", "c_left", "c_right", "h_out", "c_out"),
}


SPAN = torch.zeros(2, dtype=torch.int64)


def rows_of(dtype: torch.dtype, size: int, span: torch.Tensor | None = SPAN, count: int = 64) -> ArenaRows:
    """As the runtime has them: in int64, and in a step, how many there are is in a span."""
    values = torch.empty(count, size, dtype=dtype, device="meta")
    return ArenaRows(values, torch.empty(count, dtype=torch.int64), count, span)


def step_weights(operation: str, dtype: torch.dtype, hidden: int, has_inputs: bool) -> PackedWeights:
    """Zeros; with inputs, as many as the hidden size."""
    states = 2 if operation == "tree_lstm_step" else 1
    weight = torch.zeros(GATES[operation] * hidden, states * hidden, dtype=dtype)
    weight_ih = weight[:, :hidden] if has_inputs else None
    if operation == "tree_lstm_step":
        return tree_lstm_step.pack_weights(weight, weight_ih=weight_ih)
    return PACKS[operation](weight, weight_ih=weight_ih)


def planned_tiles(weights: PackedWeights, precision: Precision, shared_bytes: int) -> list[Tile]:
    """The tiles of all classes of rows, each once."""
    return list(
        dict.fromkeys(tile for rows in ROW_CLASSES for tile in candidates(weights, rows, precision, shared_bytes))
    )


def step_launches(operation: str, kind: Kind, hidden: int, inputs: str, limits: Limits) -> list[Launch]:
    """The launches of a step that may happen on a device; ``inputs`` are "x", "gates", both or none."""
    from cellrt.kernels.gru_step import triton as gru
    from cellrt.kernels.lstm_step import triton as lstm
    from cellrt.kernels.tree_lstm_step import triton as tree

    launch = {"lstm_step": lstm.lstm_step, "gru_step": gru.gru_step, "tree_lstm_step": tree.tree_lstm_step}[operation]
    dtype, precision = kind
    weights = step_weights(operation, dtype, hidden, "x" in inputs)
    given = {name: rows_of(dtype, hidden) for name in STATES[operation]}
    for name in inputs.split():
        given[name] = rows_of(dtype, GATES[operation] * hidden if name == "gates" else hidden)
    with recorded_launches() as launches:
        for tile in planned_tiles(weights, precision, limits.shared_bytes):
            launch(weights, precision=precision, tile=tile, **given)
    return launches


def chain_plans(weights: PackedWeights, precision: Precision, limits: Limits) -> Iterator[ChainPlan]:
    """Both forms of a chain, where they are planned."""
    yield rows_plan(weights, precision, limits.shared_bytes)
    if (plan := persistent_plan(weights, 64, precision, *limits)) is not None:
        yield plan


def chain_launches(kind: Kind, hidden: int, limits: Limits) -> list[Launch]:
    """The launches of a chain that may happen on a device."""
    from cellrt.kernels.lstm_chain import triton

    dtype, precision = kind
    weights = step_weights("lstm_step", dtype, hidden, False)
    given = {name: rows_of(dtype, hidden, None) for name in STATES["lstm_step"]}
    sizes, gates = torch.empty(4, dtype=torch.int64), rows_of(dtype, 4 * hidden, None)
    scratch = make_scratch(weights, 64)
    with recorded_launches() as launches:
        for plan in chain_plans(weights, precision, limits):
            triton.lstm_chain(weights, sizes, gates=gates, scratch=scratch, precision=precision, plan=plan, **given)
    return launches


def check(launches: list[Launch], architecture: int) -> None:
    """All of them are compiled; what does not fit or spills is named."""
    wrong = []
    for launch in launches:
        compiled = compile_ahead(launch, architecture)
        if compiled.stack_bytes or compiled.shared_bytes > DEVICES[architecture].shared_bytes:
            sizes = {name: value for name, value in launch.arguments.items() if name.startswith("BLOCK")}
            used = f"{compiled.stack_bytes} bytes of stack, {compiled.shared_bytes} shared"
            wrong.append(f"{compiled.name} {sizes} {launch.options}: {used}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("hidden", [1024, 1000])
@pytest.mark.parametrize(
    ("operation", "inputs"),
    [
        *(("lstm_step", "x"), ("lstm_step", "gates"), ("gru_step", "x"), ("gru_step", "gates")),
        *(("lstm_step", "x gates"), ("gru_step", "x gates")),
        *(("tree_lstm_step", "x"), ("tree_lstm_step", "")),
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_steps_fit(kind: Kind, operation: str, inputs: str, hidden: int, architecture: int) -> None:
    check(step_launches(operation, kind, hidden, inputs, DEVICES[architecture]), architecture)


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("hidden", [128, 256, 384, 500, 512, 768, 1000, 1024])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_chains_fit(kind: Kind, hidden: int, architecture: int) -> None:
    check(chain_launches(kind, hidden, DEVICES[architecture]), architecture)
