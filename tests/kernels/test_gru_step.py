import pytest
import torch

from cellrt.kernels.gru_step import gru_step, pack_weights, reference
from cellrt.kernels.tiles import Tile
from tests.kernels.step_cases import Arenas, assert_same, in_span, like
from tests.kernels.tolerances import KINDS, Kind

SMALL = Tile(rows=16, units=8, depth=16, warps=4, stages=2)
LARGE = Tile(rows=32, units=32, depth=32, warps=4, stages=3)


def check(
    device: str,
    kind: Kind,
    *,
    rows: int,
    hidden: int,
    inputs: int = 0,
    has_gates: bool = False,
    tile: Tile | None = SMALL,
    unwritten: int = 0,
    most: int = 0,
) -> None:
    """The kernel (of the rule's tile, if ``tile`` is None) writes what the reference writes, and nothing else; with
    ``most``, as a span says."""
    from cellrt.kernels.gru_step import triton

    dtype, precision = kind
    arenas = Arenas(device, dtype)
    weight_hh = arenas.random(3 * hidden, hidden, scale=hidden**-0.5)
    weight_ih = arenas.random(3 * hidden, inputs, scale=inputs**-0.5) if inputs else None
    bias_hh, bias_ih = arenas.random(3 * hidden), arenas.random(3 * hidden)
    x = arenas.inputs(rows, inputs) if inputs else None
    gates = arenas.inputs(rows, 3 * hidden) if has_gates else None
    h, h_out = arenas.inputs(rows, hidden), arenas.outputs(rows, hidden, unwritten)
    expected = like(h_out)
    reference.gru_step(weight_hh, bias_hh, bias_ih, h=h, h_out=expected, weight_ih=weight_ih, x=x, gates=gates)
    weights = pack_weights(weight_hh, bias_hh, weight_ih, bias_ih)
    states, others = {"h": h}, {"h_out": h_out, "x": x, "gates": gates}
    if most:
        states, others = in_span(most, 3, states), in_span(most, 5, others)
    if tile is None:
        gru_step(weights, **states, **others, precision=precision)
    else:
        triton.gru_step(weights, **states, **others, precision=precision, tile=tile)
    assert_same(h_out, expected, kind, hidden + inputs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernel_equals_reference_in_every_type(device: str, kind: Kind) -> None:
    check(device, kind, rows=17, hidden=32, has_gates=True, unwritten=3)


@pytest.mark.parametrize(("rows", "hidden", "inputs"), [(1, 32, 32), (16, 37, 0), (33, 70, 19), (5, 3, 130)])
def test_odd_sizes_with_inputs(device: str, rows: int, hidden: int, inputs: int) -> None:
    check(device, (torch.float32, "ieee"), rows=rows, hidden=hidden, inputs=inputs)


def test_tile_larger_than_everything(device: str) -> None:
    check(device, (torch.float32, "ieee"), rows=7, hidden=24, inputs=8, tile=LARGE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("rows", "most"), [(1, 1), (5, 16), (17, 60), (0, 20)])
def test_the_device_says_how_many_rows_there_are(device: str, rows: int, most: int) -> None:
    check(device, (torch.float32, "ieee"), rows=rows, hidden=20, inputs=9, has_gates=True, most=most)


@pytest.mark.slow
def test_full_batch(device: str) -> None:
    check(device, (torch.float32, "ieee"), rows=512, hidden=96, has_gates=True, tile=LARGE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("hidden", [256, 1000])
def test_chosen_tile_equals_reference_on_a_device(kind: Kind, rows: int, hidden: int) -> None:
    check("cuda", kind, rows=rows, hidden=hidden, inputs=64, tile=None)


def test_reference_equals_torch_and_serves_a_cpu() -> None:
    cell = torch.nn.GRUCell(5, 11)
    arenas = Arenas("cpu", torch.float32)
    x, h, h_out = arenas.inputs(6, 5), arenas.inputs(6, 11), arenas.outputs(6, 11)
    weights = pack_weights(cell.weight_hh, cell.bias_hh, cell.weight_ih, cell.bias_ih)
    with torch.no_grad():
        gru_step(weights, h=h, h_out=h_out, x=x)
        expected = cell(x.gather(), h.gather())
    torch.testing.assert_close(h_out.gather(), expected)


def test_wrong_shapes_are_named() -> None:
    arenas = Arenas("cpu", torch.float32)
    weights = pack_weights(arenas.random(12, 4))
    h = arenas.inputs(3, 4)
    with pytest.raises(ValueError, match="gates must be rows of 12"):
        gru_step(weights, h=h, h_out=h, gates=h)
    with pytest.raises(ValueError, match="precision must be one of"):
        gru_step(weights, h=h, h_out=h, precision="half")  # type: ignore[arg-type]
