"""The decoders without attention and the sampling one, against torch's modules stepped by hand."""

import pytest
import torch
from torch import nn

from cellrt.cells import AttentionGRUDecoder, EmbeddingGRUDecoder, EmbeddingLSTMDecoder, Sample, SamplingDecoder
from cellrt.definition.define import cell
from cellrt.definition.spec import ragged, rows
from cellrt.errors import DefinitionError
from tests.cells.attention_oracle import ragged_of
from tests.cells.gated import RUNS, assert_close, normal

KINDS = [EmbeddingLSTMDecoder, EmbeddingGRUDecoder]
LAYERS = {EmbeddingLSTMDecoder: nn.LSTM, EmbeddingGRUDecoder: nn.GRU}
STATES = {EmbeddingLSTMDecoder: ("h", "c"), EmbeddingGRUDecoder: ("h",)}


def torch_step(recurrent, table, token, states):
    """One step of torch's layers from states ``[rows, layers, size]``: the output of the top, and the states after."""
    before = tuple(state.transpose(0, 1).contiguous() for state in states)
    top, after = recurrent(table(token)[None], before if len(before) > 1 else before[0])
    after = after if isinstance(after, tuple) else (after,)
    return top[0], [state.transpose(0, 1) for state in after]


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_decoder_feeds_its_tokens_back(kind, num_layers, fold, batch_sizes):
    table, recurrent, projection = nn.Embedding(35, 20), LAYERS[kind](20, 33, num_layers), nn.Linear(33, 35)
    decoder = kind.from_torch(table, recurrent, projection, end_token=3, fold=fold)
    rows, names = batch_sizes[0], STATES[kind]
    token = torch.randint(35, (rows,))
    states = [normal(rows, 33) if num_layers == 1 else normal(rows, num_layers, 33) for _ in names]
    after = decoder.steps(batch_sizes, token=token, **dict(zip(names, states)))
    expected = [state.view(rows, num_layers, 33) for state in states]
    start = 0
    for rows in batch_sizes:
        top, expected = torch_step(recurrent, table, token[:rows], [state[:rows] for state in expected])
        here = slice(start, start + rows)
        token = after["token"][here]
        logits = projection(top)
        # Among logits equal within the tolerance any choice is right.
        assert_close(logits.gather(1, token[:, None])[:, 0], logits.max(dim=1).values, 1e-4)
        for name, state in zip(names, expected):
            assert_close(after[name][here].reshape(rows, -1), state.reshape(rows, -1))
        start += rows
    assert torch.equal(after["stop"], after["token"] == 3)


@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_logprobs_are_those_of_torch(kind, num_layers, dtype, is_inference):
    table, recurrent, projection = nn.Embedding(11, 6), LAYERS[kind](6, 8, num_layers), nn.Linear(8, 11)
    for module in (table, recurrent, projection):
        module.to(dtype)
    decoder = kind.from_torch(table, recurrent, projection, 3, return_logits=True, return_logprobs=True)
    token, shape = torch.arange(7), (7, 8) if num_layers == 1 else (7, 2, 8)
    states = [normal(*shape).to(dtype) for _ in STATES[kind]]
    with torch.inference_mode(is_inference):
        after = decoder(token, *states)
        top, _ = torch_step(recurrent, table, token, [state.view(7, num_layers, 8) for state in states])
        logits = projection(top)
        chances = logits.double().log_softmax(dim=1)
    tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-5
    assert after["logprob"].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert_close(after["logits"].detach(), logits.detach(), tolerance)
    assert_close(after["logprob"].double().detach(), chances.gather(1, after["token"][:, None])[:, 0], tolerance)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_steps_return_the_logits_of_each_step(kind):
    decoder = kind(11, 6, 8, end_token=3, return_logits=True, return_logprobs=True)
    names, sizes = STATES[kind], [5, 3, 1]
    before = {"token": torch.arange(5), **{name: normal(5, 8) for name in names}}
    packed = decoder.steps(sizes, **before)
    for size, *found in zip(sizes, *(packed[name].split(sizes) for name in ("token", "logits", "logprob", *names))):
        after = decoder(**{name: value[:size] for name, value in before.items()})
        for name, value in zip(("token", "logits", "logprob", *names), found):
            assert_close(value, after[name])
        before = {name: after[name] for name in ("token", *names)}


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_decoder_without_logits_has_a_compiled_form(kind):
    for options in ({}, {"return_logits": True}, {"return_logprobs": True}):
        decoder = kind(11, 6, 8, end_token=3, **options)
        made = cell(decoder, decoder.input_specs())
        assert (made.compiled_form is None) == bool(options)
        assert ("logits" in made.outputs, "logprob" in made.outputs) == tuple(
            option in options for option in ("return_logits", "return_logprobs")
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_half_precision_is_close_to_single(kind, dtype):
    decoder = kind(35, 20, 33, end_token=3)
    states = [normal(6, 33) for _ in STATES[kind]]
    token = torch.arange(6)
    expected = decoder(token, *states)
    actual = decoder.to(dtype)(token, *(state.to(dtype) for state in states))
    assert actual["h"].dtype is dtype
    assert_close(actual["h"].float(), expected["h"], 2e-2)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_sampling_uses_the_decoders_logits(kind):
    decoder, sample = kind(11, 6, 8, end_token=3), Sample(3, temperature=0.7)
    sampling = SamplingDecoder(decoder, sample)
    states = [normal(5, 8) for _ in STATES[kind]]
    token, seed, step = torch.arange(5), torch.tensor([9, 9, 1, 2, 3]), torch.tensor([0, 1, 0, 5, 0])
    after = sampling(token, seed, step, *states)
    greedy = decoder(token, *states)
    assert torch.equal(after["h"], greedy["h"])
    expected = sample(nn.functional.linear(greedy["h"], decoder.projection.weight, decoder.projection.bias), seed, step)
    assert torch.equal(after["token"], expected.token)
    assert torch.equal(after["step"], step + 1)


@torch.inference_mode()
def test_drawn_tokens_have_the_models_own_logprobs():
    decoder = AttentionGRUDecoder(11, 6, 8, end_token=3, return_logits=True, return_logprobs=True)
    sampling = SamplingDecoder(decoder, Sample(3, temperature=5.0, top_k=2))
    memory = ragged_of([normal(count, 8) for count in (3, 1, 4)])
    given = {"token": torch.arange(3), "h": normal(3, 8), "memory": memory}
    after = sampling(**given, seed=torch.tensor([9, 1, 2]), step=torch.zeros(3, dtype=torch.int64))
    greedy = decoder(**given)
    assert_close(after["logits"], greedy["logits"])
    assert_close(after["logprob"], greedy["logits"].log_softmax(1).gather(1, after["token"][:, None])[:, 0])
    assert sampling.input_specs().keys() == {*decoder.input_specs(), "seed", "step"}


PARTS = {"table": nn.Embedding(9, 4), "module": nn.GRU(4, 5), "projection": nn.Linear(5, 9), "end_token": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": nn.LSTMCell(4, 5)}, "expected GRUCell or GRU, not LSTMCell"),
        ({"module": nn.GRU(4, 5, bidirectional=True)}, "EmbeddingGRUDecoder: a decoder has a single direction"),
        ({"module": nn.GRU(3, 5)}, "EmbeddingGRUDecoder: the module reads rows of 3, the embedding has"),
        ({"projection": nn.Linear(5, 8)}, "EmbeddingGRUDecoder: expected a projection from 5 to 9, got Linear"),
        ({"projection": nn.Linear(5, 9).bfloat16()}, "one dtype, but GRU has torch.float32, Linear has torch.bfloat16"),
        ({"projection": nn.Embedding(9, 5)}, "expected Linear, got Embedding"),
        ({"table": nn.Embedding(9, 4, max_norm=1.0)}, "max_norm"),
        ({"end_token": 9}, "an end_token below 9, or -1 for none, got 9"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(DefinitionError, match=message):
        EmbeddingGRUDecoder.from_torch(**PARTS | changes)


def test_other_parts_are_refused():
    with pytest.raises(DefinitionError, match="proj_size"):
        EmbeddingLSTMDecoder.from_torch(nn.Embedding(9, 4), nn.LSTM(4, 5, proj_size=2), nn.Linear(5, 9), 1)
    with pytest.raises(DefinitionError, match="num_layers of at least 1, got 0"):
        EmbeddingLSTMDecoder(9, 4, 5, end_token=1, num_layers=0)
    with pytest.raises(DefinitionError, match="ends at token"):
        SamplingDecoder(EmbeddingLSTMDecoder(9, 4, 5, end_token=1), Sample(end_token=2))
    with pytest.raises(DefinitionError, match="expected a decoder of cellrt.cells, got GRUCell"):
        SamplingDecoder(nn.GRUCell(4, 5), Sample(end_token=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"h": (2, 7)}, r"expected h as rows of float32\[2, 8\], got float32\[2, 7\]"),
        ({"h": (3, 8)}, r"expected h as rows of float32\[2, 8\], got float32\[3, 8\]"),
        ({"h": rows(2, 8, dtype=torch.bfloat16)}, r"expected h as rows of float32\[2, 8\], got bfloat16\[2, 8\]"),
        ({"memory": ragged(7)}, r"expected memory as ragged rows of 8, got \(7,\)"),
        ({"memory": (8,)}, r"expected memory as ragged rows of 8, got Tensor"),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit_are_refused_when_the_cell_is_made(changes, message):
    decoder = AttentionGRUDecoder(11, 6, 8, end_token=3, num_layers=2)
    with pytest.raises(DefinitionError, match=f"cell 'AttentionGRUDecoder' .*AttentionGRUDecoder: {message}"):
        cell(decoder, {**decoder.input_specs(), **changes})
