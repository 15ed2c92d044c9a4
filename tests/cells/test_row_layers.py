"""Layers that work row by row: equal to torch's, and a row's bits are the same alone and in any batch."""

import pytest
import torch
from torch.nn.functional import log_softmax, silu

from cellrt.cells.attention import Linear
from cellrt.cells.positions import RotaryPositions
from cellrt.cells.row_layers import RMSNorm, gate_with_silu, likeliest
from cellrt.cells.transformer import GatedMLP

WIDTHS = [1, 7, 8, 24, 50, 576]
ROWS = 67


def check(compiled, rows):
    """``compiled`` gives each row, alone and beside others, the same bits; and with gradients on what torch gives."""
    with torch.inference_mode():
        whole = compiled(rows)
        for size in (1, 2, 3, 30, 66):
            pieces = torch.cat([compiled(piece) for piece in rows.split(size)])
            assert torch.equal(pieces, whole)
    torch.testing.assert_close(whole, compiled(rows).detach(), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_rows(width, bias):
    torch.manual_seed(0)
    check(Linear(width, 45, bias), torch.randn(ROWS, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_rows(width):
    torch.manual_seed(0)
    norm = RMSNorm(width, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    check(norm, torch.randn(ROWS, width))
    check(norm, torch.randn(ROWS, 3, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_gated_rows(width):
    torch.manual_seed(0)
    check(lambda rows: gate_with_silu(rows, 2 * rows.flip(1)), 5 * torch.randn(ROWS, width))
    check(GatedMLP(width, 50), torch.randn(ROWS, width))


def test_gates_of_extreme_numbers_are_those_of_torch():
    gate = torch.tensor([[0.0, -0.0, 90.0, -90.0, 1e30, -1e30, float("nan"), float("inf")]])
    with torch.inference_mode():
        torch.testing.assert_close(
            gate_with_silu(gate, torch.ones(1, 8)), silu(gate), equal_nan=True, atol=3e-5, rtol=1e-6
        )


@pytest.mark.parametrize("size", [2, 6, 16, 64])
def test_turned_heads_whatever_the_positions(size):
    rotary = RotaryPositions(size, 500.0)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(ROWS, 3, size, generator=generator)
    positions = torch.randint(0, 3000, (ROWS,), generator=generator, dtype=torch.int32)
    with torch.inference_mode():
        query, key = rotary(heads, 2 * heads, positions)
        for row in range(ROWS):
            place = slice(row, row + 1)
            for whole, alone in zip((query, key), rotary(heads[place], 2 * heads[place], positions[place])):
                assert torch.equal(whole[place], alone)
        other = RotaryPositions(size, 500.0)  # which has not met later positions
        assert torch.equal(other(heads[:1], heads[:1], positions[:1])[0], query[:1])
    torch.testing.assert_close(query, rotary(heads, heads, positions)[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 8, 40, 1003])
def test_the_likeliest_token_and_its_logprob(width):
    torch.manual_seed(0)
    logits = 4 * torch.randn(ROWS, width)
    wanted = log_softmax(logits.double(), 1).max(1)
    with torch.inference_mode():
        token, logprob = likeliest(logits)
        alone = [likeliest(row) for row in logits.split(1)]
    assert token.tolist() == wanted.indices.tolist()
    torch.testing.assert_close(logprob.double(), wanted.values, atol=1e-5, rtol=1e-6)
    assert torch.equal(torch.cat([each[0] for each in alone]), token)
    assert torch.equal(torch.cat([each[1] for each in alone]), logprob)


def test_of_equal_logits_the_first_is_chosen_and_of_none_that_is_a_number_nothing_breaks():
    nan = float("nan")
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [nan, nan, nan, nan], [nan, 1.0, nan, 1.0]])
    with torch.inference_mode():
        token, logprob = likeliest(logits)
    assert token[0] == 1
    assert token[2] == 1
    assert logprob[1:].isnan().all()
