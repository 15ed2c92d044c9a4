"""A cell is its module in evaluation mode, whatever mode the module is in; the module is left alone."""

import pytest
import torch
from torch import nn

from cellrt.cells import EmbeddingGRUDecoder
from cellrt.definition.define import cell
from cellrt.unfolders import from_torch


class Dropping(nn.Module):
    """Would drop most of its numbers, and normalise them by their batch, in training mode."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.9)
        self.norm.running_mean.fill_(2.0)

    def forward(self, x):
        return nn.functional.dropout(self.dropout(self.norm(x)), 0.9, self.training)


def test_a_module_in_training_mode_serves_as_in_evaluation_mode():
    module, x = Dropping().train(), torch.randn(6, 4)
    made = cell(module, {"x": (4,)})
    found = made.run(x)[0]
    assert module.training
    assert module.dropout.training
    assert torch.equal(module.norm.running_mean, torch.full((4,), 2.0))
    assert not any(weight.requires_grad for weight in made.module.parameters())
    torch.testing.assert_close(found, module.eval()(x).detach())


def test_a_module_that_is_trained_on_leaves_the_cell_as_it_was():
    module, x = nn.Linear(3, 2), torch.ones(1, 3)
    made = cell(module, {"input": (3,)})
    before = made.run(x)[0].clone()
    module(x).sum().backward()
    with torch.no_grad():
        module.weight -= module.weight.grad
    assert torch.equal(made.run(x)[0], before)
    assert not torch.equal(module(x).detach(), before)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_from_torch_do_not_drop_between_them(kind):
    module, x = kind(3, 4, 2, dropout=0.9).train(), torch.randn(1, 3)
    run = x
    for layer in from_torch(module).layers:
        states = [torch.zeros(1, 4) for _ in layer.ahead.carry]
        run = layer.ahead.run(run, *states)[0]
    torch.testing.assert_close(run, module.eval()(x)[0].detach())


def test_a_decoder_from_torch_does_not_drop_between_its_layers():
    table, module, projection = nn.Embedding(9, 3), nn.GRU(3, 4, 2, dropout=0.9).train(), nn.Linear(4, 9)
    decoder = EmbeddingGRUDecoder.from_torch(table, module, projection, 1, return_logits=True).train()
    made = cell(decoder, decoder.input_specs())
    found = dict(zip(made.outputs, made.run(torch.tensor([5]), torch.zeros(1, 2, 4))))
    expected = projection(module.eval()(table(torch.tensor([5])))[0])
    torch.testing.assert_close(found["logits"], expected.detach(), rtol=1e-5, atol=1e-5)
