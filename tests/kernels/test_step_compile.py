"""The largest and the smallest tile of each step: the others are compiled by the slow test_planned_forms.py."""

import importlib
import re
from collections.abc import Iterator

import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_weights import Precision
from cellrt.kernels.tiles import candidates
from tests.kernels.ahead import Compiled, Launch, compile_ahead, compile_everywhere, needs_compiler, recorded_launches

pytestmark = needs_compiler
HIDDEN, ROWS = 1024, 512
STATES = {
    "lstm_step": ("h", "c", "h_out", "c_out"),
    "gru_step": ("h", "h_out"),
    "tree_lstm_step": ("h_left", "h_right", "c_left", "c_right", "h_out", "c_out"),
}
GATES = {"lstm_step": 4, "gru_step": 3, "tree_lstm_step": 5}
LOADS = {"lstm_step": 2, "gru_step": 4, "tree_lstm_step": 3}
"""Loads of a block: the gathered rows, and weights of each section; a GRU's last for both of its sums."""
A100_SHARED_BYTES = 166_912


def launches_of(operation: str, dtype: torch.dtype, precision: Precision, rows: int) -> list[Launch]:
    """The launches of the tiles that the rule may choose for so many rows, with inputs x; tensors are meta."""
    package = importlib.import_module(f"cellrt.kernels.{operation}")
    launcher = importlib.import_module(f"cellrt.kernels.{operation}.triton")
    states = 2 if operation == "tree_lstm_step" else 1
    weight_hh = torch.zeros(GATES[operation] * HIDDEN, states * HIDDEN, dtype=dtype)
    weights = package.pack_weights(weight_hh, weight_ih=weight_hh[:, :HIDDEN])
    span = torch.zeros(2, dtype=torch.int64)
    values, numbers = torch.empty(ROWS, HIDDEN, dtype=dtype, device="meta"), torch.empty(rows, dtype=torch.int64)
    arena = ArenaRows(values, numbers, rows, span)
    arguments = dict.fromkeys((*STATES[operation], "x"), arena)
    with recorded_launches() as launches:
        for tile in candidates(weights, rows, precision, A100_SHARED_BYTES):
            getattr(launcher, operation)(weights, precision=precision, tile=tile, **arguments)
    return launches


KINDS_OF_CORES: list[tuple[torch.dtype, Precision]] = [(torch.bfloat16, "ieee"), (torch.float32, "tf32")]


def largest_tiles() -> Iterator[object]:
    """Each operation with each kind of numbers. The largest of all takes ten seconds and its siblings one to three."""
    for operation in STATES:
        for kind in KINDS_OF_CORES:
            is_longest = (operation, kind[0]) == ("tree_lstm_step", torch.bfloat16)
            marks = [pytest.mark.slow] if is_longest else []
            yield pytest.param(operation, kind, marks=marks, id=f"{kind}-{operation}")


@pytest.mark.parametrize(("operation", "kind"), list(largest_tiles()))
def test_largest_tile_uses_the_tensor_cores(operation: str, kind: tuple[torch.dtype, Precision]) -> None:
    launch = launches_of(operation, *kind, ROWS)[0]
    compiled = compile_ahead(launch, 90)
    assert compiled.stack_bytes == 0
    assert "wgmma.mma_async" in compiled.ptx
    assert stages_in_flight(compiled, LOADS[operation]) == launch.options["num_stages"] - 2 >= 2


@pytest.mark.parametrize("operation", STATES)
def test_x_and_h_go_through_one_pipeline_of_six_stages(operation: str) -> None:
    """Of the smallest tile, the same on devices that have no asynchronous tensor cores."""
    launch = launches_of(operation, torch.bfloat16, "ieee", 16)[-1]
    assert launch.options["num_stages"] == 6
    compiled = compile_ahead(launch, 80)
    assert stages_in_flight(compiled, LOADS[operation]) == 4
    assert compiled.ptx.count("cp.async.wait_group") == 2  # in the loop, and behind it: x and h have no loop each


def stages_in_flight(compiled: Compiled, loads: int) -> int:
    """Blocks of the product that are on their way while one is multiplied and the next is there."""
    waits = [int(number) for number in re.findall(r"cp\.async\.wait_group\s+(\d+);", compiled.ptx)]
    assert max(waits) % loads == 0
    return max(waits) // loads


def test_fewer_rows_never_get_a_larger_tile() -> None:
    sizes = [launches_of("lstm_step", torch.bfloat16, "ieee", rows)[0].arguments["BLOCK_ROWS"] for rows in (1, 40, 512)]
    assert sizes == [16, 64, 128]


@pytest.mark.parametrize("operation", STATES)
def test_smallest_tile_compiles_everywhere(operation: str) -> None:
    (*_, smallest) = launches_of(operation, torch.bfloat16, "ieee", 1)
    for compiled in compile_everywhere([smallest]):
        assert compiled.stack_bytes == 0
