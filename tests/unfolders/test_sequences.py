"""Chains through the engine against torch's own modules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cellrt
from cellrt import unfolders
from cellrt.cells import LSTMCell
from cellrt.errors import DefinitionError
from tests.effort import examples
from tests.engine.helpers import small_engine

WAIT_S = 60


def serve(model: cellrt.Unfolder, requests: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The results of requests that are in flight together."""
    with small_engine(arena_bytes=1 << 20) as engine:
        engine.register(model, warm_up=False)
        return [future.result(WAIT_S) for future in engine.submit_many(model.name, requests)]


def assert_equals_torch(module: nn.Module, found: dict[str, torch.Tensor], x: torch.Tensor, tolerance: float) -> None:
    x = x[None] if module.batch_first else x[:, None]
    with torch.inference_mode():
        output, states = module(x)
    states = states if isinstance(states, tuple) else (states,)
    expected = {"output": output.reshape(x.numel() // x.shape[-1], -1)}
    expected.update({name: state[:, 0] for name, state in zip(("h_n", "c_n"), states)})
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=f"{name} differs")


@settings(deadline=None, max_examples=examples(12))
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU]),
    layers=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 17)),
    options=st.fixed_dictionaries({name: st.booleans() for name in ("bias", "batch_first", "bidirectional")}),
    split_input=st.booleans(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_any_torch_module_equals_its_chain(kind, layers, sizes, options, split_input, lengths, seed):
    torch.manual_seed(seed)
    module = kind(*sizes, layers, **options)
    requests = [torch.randn(length, sizes[0]) for length in lengths]
    model = unfolders.chain("layers", unfolders.from_torch(module, split_input=split_input))
    for request, found in zip(requests, serve(model, requests)):
        assert_equals_torch(module, found, request, 1e-5)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_tokens_equal_embedding_and_torch(kind, fold):
    table, module = nn.Embedding(11, 6), kind(6, 9, 2, bidirectional=True)
    model = unfolders.chain("words", unfolders.from_torch(module, embedding=table, fold=fold))
    for tokens, found in zip(requests := [torch.arange(7), torch.tensor([3])], serve(model, requests)):
        assert_equals_torch(module, found, table(tokens), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split_input", [True, False])
def test_half_precision_is_close_to_torch(dtype, split_input):
    module = nn.LSTM(6, 9, 2, bidirectional=True).to(dtype)
    x = torch.randn(5, 6).to(dtype)
    model = unfolders.chain("half", unfolders.from_torch(module, split_input=split_input))
    assert_equals_torch(module, serve(model, [x])[0], x, 2e-2)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_torch_cells_run_step_by_step(kind):
    reference, x = kind(6, 9), torch.randn(4, 6)
    (found,) = serve(unfolders.chain("steps", reference), [x])
    state = None
    for row in x:
        state = reference(row[None], state)
    last = state[0] if isinstance(state, tuple) else state
    torch.testing.assert_close(found["h_n"], last.detach())
    torch.testing.assert_close(found["output"][-1:], last.detach())


@pytest.mark.parametrize("reads", [1, 2])
def test_a_head_reads_both_directions_at_every_step(reads):
    module, weight = nn.LSTM(6, 9, bidirectional=True), torch.randn(3, 18)

    def of_one(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": x @ weight.T}

    def of_two(left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": torch.cat((left, right), 1) @ weight.T}

    head = cellrt.cell(of_one, {"x": (18,)}) if reads == 1 else cellrt.cell(of_two, {"left": (9,), "right": (9,)})
    x = torch.randn(5, 6)
    (found,) = serve(unfolders.chain("tagger", module, head=head, states=True), [x])
    with torch.inference_mode():
        output, (h, _) = module(x)
    torch.testing.assert_close(found["scores"], output @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["h_n"], h, rtol=1e-5, atol=1e-5)


def test_a_session_continues_where_its_last_request_ended():
    module, x = nn.LSTM(6, 9, 2), torch.randn(7, 6)
    with small_engine() as engine:
        engine.register(unfolders.chain("stream", module, keep=True))
        session = engine.session("stream", "client")
        parts = [session.submit(part).result(WAIT_S)["output"] for part in x.split((3, 1, 3))]
    torch.testing.assert_close(torch.cat(parts), module(x)[0].detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(DefinitionError, match="cannot be continued"):
        unfolders.chain("stream", nn.LSTM(6, 9, bidirectional=True), keep=True)


def test_later_training_does_not_reach_the_cells():
    module, x = nn.LSTM(3, 5), torch.randn(4, 3)
    expected = module(x)[0].detach()
    model = unfolders.chain("frozen", module)
    with torch.no_grad():
        module.weight_hh_l0.zero_()
    torch.testing.assert_close(serve(model, [x])[0]["output"], expected)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LSTM(4, 5, proj_size=2), "proj_size"),
        (nn.RNN(4, 5), "expected LSTM, GRU, LSTMCell or GRUCell of torch.nn, not RNN"),
        (nn.Linear(4, 5), "not Linear"),
    ],
)
def test_other_modules_are_refused(module, message):
    with pytest.raises(DefinitionError, match=message):
        unfolders.from_torch(module)


def test_layers_that_do_not_fit_are_refused():
    small = cellrt.cell(LSTMCell(4, 5), {"x": (4,), "h": (5,), "c": (5,)})
    with pytest.raises(DefinitionError, match="below it are"):
        unfolders.Stack((unfolders.Layer(small), unfolders.Layer(small)))
    with pytest.raises(DefinitionError, match="reads rows of 4"):
        unfolders.from_torch(nn.LSTM(4, 5), embedding=nn.Embedding(7, 6))
    head = cellrt.cell(lambda left, right: left + right, {"left": (5,), "right": (5,)})
    with pytest.raises(DefinitionError, match="the head reads 2"):
        unfolders.chain("tagger", small, head=head)
    wide = cellrt.cell(nn.Linear(6, 2), {"input": (6,)})
    with pytest.raises(DefinitionError, match=r"head 'Linear' reads {'input': 'float32\[6\]'}.* make float32\[5\]"):
        unfolders.chain("tagger", small, head=wide)
    with pytest.raises(DefinitionError, match="one dtype, but LSTM has torch.float32, Embedding has torch.bfloat16"):
        unfolders.from_torch(nn.LSTM(4, 5), embedding=nn.Embedding(7, 4).bfloat16())
