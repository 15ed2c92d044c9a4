import pytest
import torch
from torch import Tensor

from cellrt.kernels.tiles import Tile
from cellrt.kernels.tree_lstm_step import pack_weights, reference, tree_lstm_step
from tests.kernels.step_cases import Arenas, assert_same, in_span, like
from tests.kernels.tolerances import KINDS, Kind

SMALL = Tile(rows=16, units=8, depth=16, warps=4, stages=2)
LARGE = Tile(rows=32, units=32, depth=32, warps=4, stages=3)
STATES = ("h_left", "h_right", "c_left", "c_right")


def check(
    device: str,
    kind: Kind,
    *,
    rows: int,
    hidden: int,
    inputs: int = 0,
    tile: Tile | None = SMALL,
    unwritten: int = 0,
    most: int = 0,
) -> None:
    """The kernel (of the rule's tile, if ``tile`` is None) writes what the reference writes, and nothing else; with
    ``most``, as a span says."""
    from cellrt.kernels.tree_lstm_step import triton

    dtype, precision = kind
    arenas = Arenas(device, dtype)
    weight_hh = arenas.random(5 * hidden, 2 * hidden, scale=hidden**-0.5)
    weight_ih = arenas.random(5 * hidden, inputs, scale=inputs**-0.5) if inputs else None
    bias = arenas.random(5 * hidden)
    x = arenas.inputs(rows, inputs) if inputs else None
    states = {name: arenas.inputs(rows, hidden) for name in STATES}
    h_out, c_out = (arenas.outputs(rows, hidden, unwritten) for _ in range(2))
    expected_h, expected_c = like(h_out), like(c_out)
    reference.tree_lstm_step(weight_hh, bias, h_out=expected_h, c_out=expected_c, weight_ih=weight_ih, x=x, **states)
    weights = pack_weights(weight_hh, bias, weight_ih)
    others = {"h_out": h_out, "c_out": c_out, "x": x}
    if most:
        states, others = in_span(most, 3, states), in_span(most, 5, others)
    if tile is None:
        tree_lstm_step(weights, precision=precision, **states, **others)
    else:
        triton.tree_lstm_step(weights, precision=precision, tile=tile, **states, **others)
    assert_same(h_out, expected_h, kind, 2 * hidden + inputs)
    assert_same(c_out, expected_c, kind, 2 * hidden + inputs)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernel_equals_reference_in_every_type(device: str, kind: Kind) -> None:
    check(device, kind, rows=17, hidden=32, unwritten=3)


@pytest.mark.parametrize(("rows", "hidden", "inputs"), [(1, 32, 32), (16, 37, 0), (33, 70, 19), (5, 130, 3)])
def test_odd_sizes_with_inputs(device: str, rows: int, hidden: int, inputs: int) -> None:
    check(device, (torch.float32, "ieee"), rows=rows, hidden=hidden, inputs=inputs)


def test_tile_larger_than_everything(device: str) -> None:
    check(device, (torch.float32, "ieee"), rows=7, hidden=24, inputs=8, tile=LARGE)


@pytest.mark.parametrize(("rows", "most"), [(1, 1), (5, 16), (17, 60), (0, 20)])
def test_the_device_says_how_many_rows_there_are(device: str, rows: int, most: int) -> None:
    check(device, (torch.float32, "ieee"), rows=rows, hidden=20, inputs=9, most=most)


@pytest.mark.slow
def test_full_batch(device: str) -> None:
    check(device, (torch.float32, "ieee"), rows=512, hidden=96, tile=LARGE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("hidden", [256, 1000])
def test_chosen_tile_equals_reference_on_a_device(kind: Kind, rows: int, hidden: int) -> None:
    check("cuda", kind, rows=rows, hidden=hidden, inputs=64, tile=None)


def one_node(weight: Tensor, bias: Tensor, children: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Section 3.2 of Tai et al., gate by gate, for one node; ``children`` are h_left, h_right, c_left, c_right."""
    h_left, h_right, c_left, c_right = children
    hidden = len(h_left)
    sums = []
    for gate in range(5):
        block = weight[gate * hidden : (gate + 1) * hidden]
        both = block[:, :hidden] @ h_left + block[:, hidden:] @ h_right
        sums.append(both + bias[gate * hidden : (gate + 1) * hidden])
    i, f_left, f_right, o = (1 / (1 + torch.exp(-value)) for value in sums[:4])
    c = i * torch.tanh(sums[4]) + f_left * c_left + f_right * c_right
    return o * torch.tanh(c), c


def test_reference_follows_the_paper_and_serves_a_cpu() -> None:
    arenas = Arenas("cpu", torch.float32)
    weight, bias = arenas.random(35, 14), arenas.random(35)
    states = {name: arenas.inputs(6, 7) for name in STATES}
    h_out, c_out = arenas.outputs(6, 7), arenas.outputs(6, 7)
    tree_lstm_step(pack_weights(weight, bias), h_out=h_out, c_out=c_out, **states)
    for row in range(6):
        h, c = one_node(weight, bias, [states[name].gather()[row] for name in STATES])
        torch.testing.assert_close(h_out.gather()[row], h)
        torch.testing.assert_close(c_out.gather()[row], c)


def test_wrong_weights_are_refused() -> None:
    arenas = Arenas("cpu", torch.float32)
    with pytest.raises(ValueError, match=r"weight_hh must be \[5 \* hidden, 2 \* hidden\]"):
        pack_weights(arenas.random(20, 4))
