"""Linear layers in 16 bits on a processor without instructions for them: sums in float32, and rows keep their bits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from cellrt.cells import _weights, attention
from cellrt.cells.attention import Linear

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "_is_fast_in_torch", lambda dtype: False)


def made(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True) -> tuple[Linear, torch.Tensor]:
    """A layer, and rows for it."""
    torch.manual_seed(0)
    return Linear(inputs, outputs, bias).to(dtype), torch.randn(130, inputs).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (24, 70), (129, 33), (300, 64)])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.inference_mode()
def test_a_product_is_the_exact_one_rounded_once(dtype: torch.dtype, sizes: tuple[int, int], bias: bool) -> None:
    layer, x = made(*sizes, dtype, bias)
    wide, weight = x.double(), layer.weight.double()
    exact = linear(wide, weight, None if layer.bias is None else layer.bias.double())
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * (linear(wide.abs(), weight.abs()) + 1)
    assert layer(x).dtype is dtype
    assert ((layer(x).double() - exact).abs() <= rounding).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    layer, x = made(129, 70, dtype)
    together = layer(x)
    for rows in (slice(0, 1), slice(3, 8), slice(90, 130)):
        assert torch.equal(layer(x[rows]), together[rows])


def test_a_changed_weight_is_packed_anew() -> None:
    layer, x = made(24, 70, torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert torch.equal(layer(x), 2 * before)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradients_of_one_parameter_are_torchs(name: str) -> None:
    layer, x = made(24, 70, torch.bfloat16)
    layer.requires_grad_(False).get_parameter(name).requires_grad_()
    layer(x).sum().backward()
    grad = layer.get_parameter(name).grad
    assert grad is not None and grad.abs().sum() > 0


@torch.inference_mode()
def test_rows_of_the_weight_are_read_from_the_packed_one() -> None:
    layer, _ = made(24, 70, torch.bfloat16)
    numbers = torch.tensor([69, 0, 31, 32, 69])
    assert torch.equal(layer.weight_rows(numbers), layer.weight[numbers])


@torch.inference_mode()
def test_where_torch_has_instructions_the_product_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(24, 70, torch.bfloat16)
    monkeypatch.setattr(_weights, "_is_fast_in_torch", lambda dtype: True)
    monkeypatch.setattr(attention, "half_linear", None)
    assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))
