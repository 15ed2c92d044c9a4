"""The oracle itself, against torch and against equations written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cellrt.definition.define import cell
from cellrt.errors import CellError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder, unfold
from tests.engine.models import NOT_FINITE, RAISE, WIDTH, WRONG_SHAPE, chain_model, make_cells
from tests.engine.zoo import TOKENS, make_zoo

ZOO = make_zoo(8)


def test_a_chain_is_an_lstm():
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 5)
    step = nn.LSTMCell(3, 5)
    step.load_state_dict({name.removesuffix("_l0"): value for name, value in lstm.state_dict().items()})

    def forward(x, h, c):
        h, c = step(x, (h, c))
        return {"h": h, "c": c}

    made = cell(forward, {"x": (3,), "h": (5,), "c": (5,)})

    @unfold("lstm", example=torch.zeros(2, 3))
    def model(graph, x):
        forwards, backwards = graph.chain(made, x=x), graph.chain(made, x=x, reverse=True)
        return {"h": forwards.h, "c": forwards.last.c, "first": backwards.last.h, "backwards": backwards.h}

    x = torch.randn(7, 3)
    with torch.no_grad():
        h, (_, c) = lstm(x)
        reverse, _ = lstm(x.flip(0))
    result = run_one_by_one(model, x)
    torch.testing.assert_close(result["h"], h)
    torch.testing.assert_close(result["c"], c[0])
    torch.testing.assert_close(result["backwards"], reverse.flip(0))
    torch.testing.assert_close(result["first"], reverse[-1])


def test_a_tree_is_its_recursion():
    parents = [4, 4, 5, 5, 6, 6, -1]
    x = torch.randn(4, 4)

    @unfold("tree", example=None)
    def model(graph, _):
        return {"h": graph.tree(parents, leaf=ZOO.leaf, inner=ZOO.join, leaf_inputs={"x": x}).h}

    def h_of(node: int) -> torch.Tensor:
        children = [k for k, parent in enumerate(parents) if parent == node]
        if not children:
            return torch.tanh(x[node])
        return torch.tanh(h_of(children[0]) - 0.5 * h_of(children[1]))

    torch.testing.assert_close(run_one_by_one(model, None)["h"], h_of(6))


@pytest.mark.parametrize("max_steps", [2, 40])
def test_a_loop_stops_by_itself_or_at_its_limit(max_steps):
    @unfold("loop", example=1)
    def model(graph, token):
        loop = graph.loop(ZOO.decoder, max_steps=max_steps, until="stop", token=token, mood=torch.ones(4))
        return {"tokens": loop.token, "last": loop.last.token, "embedded": ZOO.embed(token=loop.last.token)}

    tokens = [1]
    while len(tokens) <= max_steps and (len(tokens) == 1 or tokens[-1]):
        tokens.append((tokens[-1] * 7 + 3) % TOKENS)
    result = run_one_by_one(model, 1)
    assert result["tokens"].tolist() == tokens[1:]
    assert result["last"].item() == tokens[-1]
    torch.testing.assert_close(result["embedded"], ZOO.embed.run(torch.tensor(tokens[-1:]))[0][0])


def test_a_ragged_input_may_be_empty():
    @unfold("ragged", example=None)
    def model(graph, _):
        none = ZOO.child_sum(h=[], c=[])
        return {"none": none.c, "one": ZOO.child_sum(h=[none.h], c=[torch.ones(4)]).c}

    result = run_one_by_one(model, None)
    assert result["none"].tolist() == [0.0] * 4
    assert result["one"].tolist() != [0.0] * 4


@pytest.mark.parametrize("fault", [RAISE, WRONG_SHAPE, NOT_FINITE])
def test_what_a_cell_does_wrong_is_a_cell_error(fault):
    model = chain_model("chain", make_cells()[0])
    row = torch.tensor([[fault, 0.0]])
    with pytest.raises(CellError, match="add"):
        run_one_by_one(model, torch.cat([torch.zeros(2, WIDTH), row]))


def test_a_wrong_request_is_a_request_error():
    model = Unfolder("wrong", lambda graph, x: ZOO.fork(x=x), torch.zeros(4))
    with pytest.raises(RequestError, match="fork"):
        run_one_by_one(model, torch.zeros(3))
