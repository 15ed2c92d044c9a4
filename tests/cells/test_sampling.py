"""The next token as each row asks for it: by the oracle, by transformers' processors, and by the distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.cells import sampling
from cellrt.cells._sampling import uniform_number
from cellrt.cells.output import uniform as uniform_of_rows
from cellrt.cells.row_layers import likeliest
from cellrt.cells.sampling import SamplingLimits, ends_of
from cellrt.errors import DefinitionError
from tests.cells.sampling_oracle import END, LIMITS, Wanted, changed_logits, probabilities, run, tokens_at, uniform
from tests.effort import examples

VOCABULARY = 40
WAYS = ["compiled", "plain"]
TOKENS = st.integers(0, VOCABULARY - 1)
WANTED = st.builds(
    Wanted,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 39, 40, 90]),
    top_p=st.sampled_from([1.0, 0.999, 0.8, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, 0.4, -1.0]),
    frequency=st.sampled_from([0.0, 0.3, -0.2]),
    min_tokens=st.integers(0, 4),
    ignores_end=st.booleans(),
    logprobs=st.integers(0, LIMITS.logprobs),
    stops=st.lists(TOKENS, max_size=LIMITS.stops),
    biases=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 0.5, 2.0]), max_size=LIMITS.biases),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    text=st.lists(TOKENS, min_size=1, max_size=9),
    allowed=st.none() | st.lists(TOKENS, min_size=1, max_size=30),
).flatmap(lambda each: st.builds(replace, st.just(each), made=st.integers(0, len(each.text) - 1)))


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(sampling, "is_fusable", lambda *_: False)
    return request.param


def drawn_logits(rows: int, width: int = VOCABULARY, *, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def assert_chosen(made, logits, wanted):
    """Each row's outputs are the oracle's."""
    own = logits.double().log_softmax(1)
    for row, each in enumerate(wanted):
        token = int(made.token[row])
        if each.temperature:
            shares = probabilities(logits[row].tolist(), each)
            assert token in tokens_at(shares, uniform(each.seed, len(each.text) - 1)), (each, token)
        else:
            changed = changed_logits(logits[row].tolist(), each)
            assert changed[token] >= max(changed) - 1e-5
        assert float(made.logprob[row]) == pytest.approx(float(own[row, token]), abs=2e-6)
        assert bool(made.stop[row]) == (token in each.stops or (token == END and not each.ignores_end))
        best = own[row].topk(each.logprobs)
        count = each.logprobs
        assert made.top_token[row].tolist() == [*best.indices.tolist(), *[-1] * (LIMITS.logprobs - count)]
        torch.testing.assert_close(made.top_logprob[row, :count].double(), best.values, atol=2e-6, rtol=0)
        assert made.top_logprob[row, count:].eq(-math.inf).all()


@torch.inference_mode()
@settings(max_examples=examples(60), deadline=None)
@given(wanted=st.lists(WANTED, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_rows_of_one_task_are_each_as_it_asks(wanted, seed):
    logits = drawn_logits(len(wanted), seed=seed)
    compiled = run(logits.clone(), wanted)
    assert_chosen(compiled, logits, wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "is_fusable", lambda *_: False)
        assert_chosen(run(logits, wanted), logits, wanted)
    for row, each in enumerate(wanted):
        alone = run(logits[row : row + 1].clone(), [each])
        assert all(torch.equal(one[0], among[row]) for one, among in zip(alone, compiled))


@torch.inference_mode()
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 50},
        {"top_k": 1900},
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.001},
        {"min_p": 0.02},
        {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
    ],
)
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_many_tokens_are_chosen_as_few_are(asked, spread, way):
    """So many that blocks and strides of them are gone through, and some behind the last whole ones."""
    width, count = 2 * 1024 + 77, 40
    logits = drawn_logits(1, width, spread=spread).expand(count, -1).contiguous()
    wanted = [Wanted(temperature=0.8, seed=seed, **asked) for seed in range(count)]
    shares = probabilities(logits[0].tolist(), wanted[0])
    made = run(logits, wanted).token.tolist()
    assert all(token in tokens_at(shares, uniform(seed, 0)) for seed, token in enumerate(made))
    assert len({*made}) > count // 4


@torch.inference_mode()
@pytest.mark.parametrize(
    "asked",
    [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.5}, {"top_p": 0.8, "temperature": 2.0}],
)
def test_samples_are_distributed_as_the_softmax_says(asked, way):
    count, wanted = 4000, Wanted(**{"temperature": 1.0, **asked})
    logits = drawn_logits(1, 12, spread=1.0)
    made = run(logits.expand(count, -1).contiguous(), [replace(wanted, seed=seed) for seed in range(count)]).token
    expected = torch.tensor(probabilities(logits[0].tolist(), wanted)) * count
    found, kept = made.bincount(minlength=12), expected > 0
    assert not found[~kept].any()
    chi_square = float(((found - expected) ** 2 / expected)[kept].sum())
    assert chi_square < 40  # of at most 11 degrees of freedom: once in 28,000 at random


def processors(each: Wanted):
    """Those of transformers, in the order in which it has them."""
    named = pytest.importorskip("transformers.generation.logits_process", reason="needs transformers")
    prompt = len(each.text) - each.made
    found = [
        each.biases and named.SequenceBiasLogitsProcessor({(token,): bias for token, bias in each.biases.items()}),
        each.repetition != 1 and named.RepetitionPenaltyLogitsProcessor(each.repetition),
        each.min_tokens and named.MinNewTokensLengthLogitsProcessor(prompt, each.min_tokens, END, device="cpu"),
        each.temperature != 1 and named.TemperatureLogitsWarper(each.temperature),
        each.top_k and named.TopKLogitsWarper(each.top_k),
        each.top_p < 1 and named.TopPLogitsWarper(each.top_p),
        each.min_p and named.MinPLogitsWarper(each.min_p),
    ]
    return named.LogitsProcessorList([processor for processor in found if processor])


@torch.inference_mode()
@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"repetition": 1.7},
        {"repetition": 0.6},
        {"min_tokens": 3},
        {"biases": {5: 4.0, END: -3.0}},
        {"biases": {5: 1.0}, "repetition": 1.2, "temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_tokens_are_those_of_transformers(asked):
    text = [7, 1, 7, END, 9]
    wanted = [Wanted(**{"temperature": 1.0, "text": text, "made": 2, "seed": seed, **asked}) for seed in range(60)]
    logits = drawn_logits(len(wanted), spread=1.5)
    made = run(logits.clone(), wanted).token.tolist()
    scores = processors(wanted[0])(torch.tensor([text] * len(wanted)), logits)
    for row, shares in enumerate(scores.double().softmax(1).tolist()):
        assert made[row] in tokens_at(shares, uniform(row, len(text) - 1))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.8, "top_k": 9, "repetition": 1.3}, {"logprobs": 3}])
def test_logits_of_16_bits_are_chosen_from_by_compiled_code(dtype, asked, monkeypatch):
    wanted = [Wanted(seed=seed, text=[3, 7, 7], made=1, **asked) for seed in range(20)]
    logits = drawn_logits(len(wanted)).to(dtype)
    expected = run(logits.float(), wanted)
    monkeypatch.setattr(sampling, "_sample_plainly", None)
    assert all(map(torch.equal, run(logits.clone(), wanted), expected))


@torch.inference_mode()
def test_who_asks_for_nothing_has_the_bits_of_greedy_choice():
    logits = drawn_logits(5, 1000)
    made, (token, logprob) = run(logits.clone(), [Wanted()] * 5), likeliest(logits)
    assert torch.equal(made.token, token) and torch.equal(made.logprob, logprob)


@torch.inference_mode()
def test_logits_are_afterwards_what_they_were():
    logits = drawn_logits(1)
    before, text = logits.clone(), [3, 4, 4]
    wanted = Wanted(
        1.0, repetition=1.5, presence=1.0, biases={3: 1.0, 4: 2.0}, stops=[3], min_tokens=5, text=text, made=1
    )
    run(logits, [wanted])
    assert torch.equal(logits, before)


@torch.inference_mode()
def test_rows_without_logits_say_nothing(way):
    made = run(drawn_logits(2), [Wanted(1.0, logprobs=2, stops=[0])] * 3, chosen=[0, 2])
    assert (made.token[1], made.logprob[1], made.stop[1]) == (0, 0, False)
    assert made.top_token[1].eq(-1).all() and made.top_token[2, :2].ge(0).all()


@torch.inference_mode()
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_make_some_token(bad, way):
    logits = torch.full((3, VOCABULARY), bad)
    made = run(logits, [Wanted(), Wanted(1.0), Wanted(1.0, top_k=4, top_p=0.5, min_p=0.1, logprobs=5)])
    assert made.token.ge(0).all() and made.token.lt(VOCABULARY).all()


@torch.inference_mode()
def test_a_row_that_may_say_nothing_says_the_likeliest(way):
    logits = drawn_logits(2, 4)
    wanted = Wanted(biases={}, stops=[0, 1, 3], min_tokens=2)
    assert run(logits.clone(), [wanted, replace(wanted, temperature=1.0)]).token.tolist() == logits.argmax(1).tolist()


@torch.inference_mode()
def test_no_device_is_asked_for_numbers():
    """On meta tensors there are none."""
    wanted = [Wanted(0.8, top_k=3, top_p=0.9, min_p=0.1, repetition=1.2, stops=[1], biases={3: 1.0}, min_tokens=1)] * 3
    made = run(drawn_logits(3), wanted, device="meta")
    assert all(each.is_meta and len(each) == 3 for each in made)


def test_random_numbers_are_those_of_the_other_cells():
    for seed, step in ((0, 0), (-1, 5), ((1 << 63) - 1, 1 << 30), (-(1 << 63), 17)):
        expected = float(uniform_of_rows(torch.tensor([seed]), torch.tensor([step])))
        assert uniform_number(np.int64(seed), np.int64(step)) == uniform(seed, step) == expected


@pytest.mark.parametrize("given_", [[], "two", [1.5], [True]])
def test_end_tokens_that_are_none_are_named(given_):
    with pytest.raises(DefinitionError, match="end_token: expected a token, or a list of at least one"):
        ends_of(given_)


def test_limits_that_are_none_are_named():
    with pytest.raises(DefinitionError, match="expected stops as an integer of at least 1, got 0"):
        SamplingLimits(stops=0)
