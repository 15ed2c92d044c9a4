"""Bridges against torch's own layers."""

import pytest
import torch
from torch import nn

from cellrt.cells import Bridge
from cellrt.errors import DefinitionError
from tests.cells.gated import assert_close, normal


def test_states_without_a_layer_are_put_side_by_side():
    bridge = Bridge({"h": ["h_l0", "h_l0_reverse"], "c": [["c_l0", "c_l0_reverse"], ["h_l0", "c_l0"]]})
    assert bridge.names == ("h_l0", "h_l0_reverse", "c_l0", "c_l0_reverse")
    given = [normal(4, 3) for _ in range(4)]
    h, h_reverse, c, c_reverse = given
    made = bridge(*given)
    assert torch.equal(made["h"], torch.cat([h, h_reverse], 1))
    assert torch.equal(made["c"], torch.stack([torch.cat([c, c_reverse], 1), torch.cat([h, c], 1)], 1))


def test_a_layer_and_an_activation_make_a_state():
    linear, others = nn.Linear(6, 5), [nn.Linear(3, 7), nn.Linear(3, 7)]
    sources = {"h": ["h_l0", "h_l0_reverse"], "c": [["h_l0"], ["h_l0_reverse"]]}
    bridge = Bridge(sources, {"h": linear, "c": others}, nn.Tanh())
    h, reverse = normal(4, 3), normal(4, 3)
    made = bridge(h, reverse)
    assert_close(made["h"], torch.tanh(linear(torch.cat([h, reverse], 1))))
    assert_close(made["c"], torch.stack([torch.tanh(others[0](h)), torch.tanh(others[1](reverse))], 1))


def test_one_layer_may_serve_all_of_the_decoders_layers():
    linear, states = nn.Linear(3, 5), [normal(4, 3), normal(4, 3)]
    made = Bridge({"h": [["h_l0"], ["h_l1"]]}, {"h": linear})(*states)
    assert_close(made["h"], torch.stack([linear(state) for state in states], 1))


@pytest.mark.parametrize("sources", [{"h": "h_l0"}, {"h": []}, {"h": [[]]}, {"h": [["h_l0"], "h_l1"]}], ids=str)
def test_sources_that_are_not_lists_of_names_are_refused(sources):
    with pytest.raises(DefinitionError, match="expected for 'h' names of the encoder's states, such as"):
        Bridge(sources)


def test_layers_that_do_not_belong_to_a_state_are_refused():
    with pytest.raises(DefinitionError, match="a linear layer for 'c', but sources for \\['h'\\]"):
        Bridge({"h": ["h_l0"]}, {"c": nn.Linear(3, 5)})
    with pytest.raises(DefinitionError, match="expected for 'h' an nn.Linear, or 2 of them"):
        Bridge({"h": [["h_l0"], ["h_l1"]]}, {"h": [nn.Linear(3, 5)]})
