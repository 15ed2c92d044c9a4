import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.lstm_step import lstm_step, pack_weights, reference
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
    tile: Tile = SMALL,
    unwritten: int = 0,
    most: int = 0,
) -> None:
    """The kernel writes what the reference writes, and nothing else; with ``most``, as a span says."""
    from cellrt.kernels.lstm_step import triton

    dtype, precision = kind
    arenas = Arenas(device, dtype)
    weight_hh = arenas.random(4 * hidden, hidden, scale=hidden**-0.5)
    weight_ih = arenas.random(4 * hidden, inputs, scale=inputs**-0.5) if inputs else None
    bias_hh, bias_ih = arenas.random(4 * hidden), arenas.random(4 * hidden)
    x = arenas.inputs(rows, inputs) if inputs else None
    gates = arenas.inputs(rows, 4 * hidden) if has_gates else None
    h, c = arenas.inputs(rows, hidden), arenas.inputs(rows, hidden)
    h_out, c_out = (arenas.outputs(rows, hidden, unwritten) for _ in range(2))
    expected_h, expected_c = like(h_out), like(c_out)
    reference.lstm_step(
        weight_hh,
        bias_hh.float() + bias_ih.float(),
        h=h,
        c=c,
        h_out=expected_h,
        c_out=expected_c,
        weight_ih=weight_ih,
        x=x,
        gates=gates,
    )
    weights = pack_weights(weight_hh, bias_hh, weight_ih, bias_ih)
    states, others = {"h": h, "c": c}, {"h_out": h_out, "c_out": c_out, "x": x, "gates": gates}
    if most:
        states, others = in_span(most, 3, states), in_span(most, 5, others)
    triton.lstm_step(weights, **states, **others, precision=precision, tile=tile)
    assert_same(h_out, expected_h, kind, hidden + inputs)
    assert_same(c_out, expected_c, kind, hidden + inputs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernel_equals_reference_in_every_type(device: str, kind: Kind) -> None:
    check(device, kind, rows=17, hidden=32, has_gates=True, unwritten=3)


@pytest.mark.parametrize(("rows", "hidden", "inputs"), [(1, 32, 32), (16, 37, 0), (33, 70, 19), (5, 3, 130)])
def test_odd_sizes_with_inputs(device: str, rows: int, hidden: int, inputs: int) -> None:
    check(device, (torch.float32, "ieee"), rows=rows, hidden=hidden, inputs=inputs)


def test_tile_larger_than_everything(device: str) -> None:
    check(device, (torch.float32, "ieee"), rows=7, hidden=24, inputs=8, has_gates=False, tile=LARGE)


def test_no_row_written_where_all_are_negative(device: str) -> None:
    check(device, (torch.float32, "ieee"), rows=9, hidden=16, has_gates=True, unwritten=9)


def test_tokens_name_rows_of_a_folded_table(device: str) -> None:
    """Tokens are int64, and several rows may have the same one."""
    from cellrt.kernels.lstm_step import triton

    arenas = Arenas(device, torch.float32)
    weights = pack_weights(weight := arenas.random(64, 16))
    gates = ArenaRows(arenas.random(9, 64), torch.tensor([8, 0, 8, 3], device=device))
    h, c, h_out, c_out = arenas.inputs(4, 16), arenas.inputs(4, 16), arenas.outputs(4, 16), arenas.outputs(4, 16)
    expected_h, expected_c = like(h_out), like(c_out)
    bias = torch.zeros(64, device=device)
    reference.lstm_step(weight, bias, h=h, c=c, h_out=expected_h, c_out=expected_c, gates=gates)
    triton.lstm_step(weights, h=h, c=c, h_out=h_out, c_out=c_out, gates=gates, precision="ieee", tile=SMALL)
    assert_same(h_out, expected_h, (torch.float32, "ieee"), 16)
    assert_same(c_out, expected_c, (torch.float32, "ieee"), 16)


@pytest.mark.parametrize(("rows", "most"), [(1, 1), (5, 16), (17, 60), (0, 20)])
def test_the_device_says_how_many_rows_there_are(device: str, rows: int, most: int) -> None:
    check(device, (torch.float32, "ieee"), rows=rows, hidden=20, inputs=9, has_gates=True, most=most)


@pytest.mark.slow
def test_full_batch(device: str) -> None:
    check(device, (torch.float32, "ieee"), rows=512, hidden=96, has_gates=True, tile=LARGE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 64, 512])
@pytest.mark.parametrize("hidden", [256, 1000, 1024])
def test_chosen_tile_equals_reference_on_a_device(kind: Kind, rows: int, hidden: int) -> None:
    dtype, precision = kind
    arenas = Arenas("cuda", dtype)
    weight = arenas.random(4 * hidden, hidden, scale=hidden**-0.5)
    bias = arenas.random(4 * hidden)
    gates, h, c = (arenas.inputs(rows, size) for size in (4 * hidden, hidden, hidden))
    h_out, c_out = (arenas.outputs(rows, hidden) for _ in range(2))
    expected_h, expected_c = like(h_out), like(c_out)
    reference.lstm_step(weight, bias, h=h, c=c, h_out=expected_h, c_out=expected_c, gates=gates)
    lstm_step(pack_weights(weight, bias), h=h, c=c, h_out=h_out, c_out=c_out, gates=gates, precision=precision)
    assert_same(h_out, expected_h, kind, hidden)
    assert_same(c_out, expected_c, kind, hidden)


def test_reference_equals_torch_and_serves_a_cpu() -> None:
    cell = torch.nn.LSTMCell(5, 11)
    arenas = Arenas("cpu", torch.float32)
    x, h, c = (arenas.inputs(6, size) for size in (5, 11, 11))
    h_out, c_out = arenas.outputs(6, 11), arenas.outputs(6, 11)
    weights = pack_weights(cell.weight_hh, cell.bias_hh, cell.weight_ih, cell.bias_ih)
    with torch.no_grad():
        lstm_step(weights, h=h, c=c, h_out=h_out, c_out=c_out, x=x)
        expected_h, expected_c = cell(x.gather(), (h.gather(), c.gather()))
    torch.testing.assert_close(h_out.gather(), expected_h)
    torch.testing.assert_close(c_out.gather(), expected_c)


def test_wrong_shapes_are_named() -> None:
    arenas = Arenas("cpu", torch.float32)
    weights = pack_weights(arenas.random(16, 4))
    h = arenas.inputs(3, 4)
    with pytest.raises(ValueError, match="c must be rows of 4"):
        lstm_step(weights, h=h, c=arenas.inputs(3, 5), h_out=h, c_out=h)
    with pytest.raises(ValueError, match="c must name 3 rows"):
        lstm_step(weights, h=h, c=arenas.inputs(2, 4), h_out=h, c_out=h)
    with pytest.raises(ValueError, match="gates must be rows of 16"):
        lstm_step(weights, h=h, c=h, h_out=h, c_out=h, gates=h)
    with pytest.raises(ValueError, match="x is needed exactly"):
        lstm_step(weights, h=h, c=h, h_out=h, c_out=h, x=h)
    with pytest.raises(ValueError, match="the rows of h must be"):
        lstm_step(weights, h=ArenaRows(h.values, h.rows.float()), c=h, h_out=h, c_out=h)
    with pytest.raises(ValueError, match="weight_hh must be"):
        pack_weights(arenas.random(16, 5))
