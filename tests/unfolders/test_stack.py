"""A stack in an unfolder of one's own, against torch's modules."""

import pytest
import torch
from torch import nn

import cellrt
from cellrt import unfolders
from tests.engine.helpers import small_engine
from tests.unfolders.test_sequences import serve


@pytest.mark.parametrize("is_both", [True, False], ids=["both directions", "one direction"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_its_outputs_and_last_states_are_torchs(kind, is_both):
    words, module = nn.Embedding(11, 6), kind(6, 9, 2, bidirectional=is_both)
    stack = unfolders.from_torch(module, embedding=words)

    @cellrt.unfold("own", example=[1, 2])
    def own(graph, tokens):
        run = stack(graph, tokens)
        return {"all": stack.output(graph, run), "first": run.steps[0], "h": run.states("h"), "last": run.last[-1].h}

    size = 9 * (1 + is_both)
    assert stack.output_spec() == cellrt.rows(size)
    for tokens, found in zip(requests := [[3, 1, 4, 1], [5]], serve(own, requests)):
        with torch.inference_mode():
            output, states = module(words(torch.tensor(tokens)))
        h = states[0] if isinstance(states, tuple) else states
        torch.testing.assert_close(found["all"], output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["first"], output[:, :9], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["h"], h, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["last"], h[-1], rtol=1e-5, atol=1e-5)


def test_a_stack_runs_over_the_steps_of_another():
    lower, upper = nn.GRU(3, 4), nn.GRU(8, 5)
    first, second = (unfolders.from_torch(module) for module in (lower, upper))

    def double(h):
        return {"both": torch.cat([h, -h], dim=-1)}

    between = cellrt.cell(double, {"h": (4,)})

    @cellrt.unfold("two", example=torch.zeros(2, 3))
    def two(graph, x):
        rows = first.output(graph, first(graph, x))
        return {"output": second.output(graph, second(graph, graph.chain(between, h=rows).both))}

    x = torch.randn(6, 3)
    with torch.inference_mode():
        middle = lower(x)[0]
        expected = upper(torch.cat([middle, -middle], dim=-1))[0]
    torch.testing.assert_close(serve(two, [x])[0]["output"], expected, rtol=1e-5, atol=1e-5)


def test_one_in_a_session_goes_on_where_the_last_request_ended():
    module, x = nn.LSTM(3, 4, 2), torch.randn(7, 3)
    stack = unfolders.from_torch(module)

    @cellrt.unfold("stream", example=torch.zeros(2, 3))
    def stream(graph, x):
        return {"output": stack(graph, x, keep=True).steps[0]}

    with small_engine() as engine:
        engine.register(stream)
        session = engine.session("stream", "client")
        parts = [session.submit(part).result(60)["output"] for part in x.split((3, 4))]
    torch.testing.assert_close(torch.cat(parts), module(x)[0].detach(), rtol=1e-5, atol=1e-5)
