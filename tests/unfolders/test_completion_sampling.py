"""Completion with sampling: each request's tokens are those of its seed alone, whatever the company."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from cellrt.cells.language_models import language_model, layered_language_model
from cellrt.cells.sampling import Sampler, SamplingLimits
from cellrt.definition.define import cell
from cellrt.definition.spec import grows, token
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.serve.forms import form_of
from cellrt.serve.server_settings import Limits
from cellrt.unfolders.completion import complete
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, small_engine, watch_suspensions
from tests.unfolders.language_models import END, VOCABULARY, draw_prompt, small_cell, small_llama
from tests.unfolders.test_completion import suspending_engine

LIMITS = SamplingLimits(biases=3, stops=2, logprobs=4)
THOROUGH = settings(suppress_health_check=list(HealthCheck), max_examples=examples(10), deadline=None)
PAGE_BYTES = 12_288
"""64 pages of keys and values of a row each, or of 4."""


def sampling_model(page_size: int = 4, max_batch_rows: int = 64, make=language_model, **options):
    limits = {"page_size": page_size, "max_batch_rows": max_batch_rows, "max_batch": 8, "sampling": LIMITS}
    return complete("lm", make(small_llama(), END, **limits), **options)


MODELS = {limits: sampling_model(*limits) for limits in ((1, 8), (4, 64), (3, 11))}
LAYERS = sampling_model(3, 11, layered_language_model)
MODEL = MODELS[4, 64]
EVERYTHING = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {3: 1.5, 7: -2.0},
    "min_tokens": 2,
    "stop_tokens": [8],
    "logprobs": 3,
}
ASKED = st.fixed_dictionaries(
    {"seed": st.integers(0, 9)},
    optional={
        "temperature": st.sampled_from([0.0, 0.8, 1.5]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([0.7, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "min_tokens": st.just(1),
        "logit_bias": st.just({5: 2.0}),
        "stop_tokens": st.just([4, 9]),
        "allowed_tokens": st.sampled_from([[3, 5, 9, 11, END], [7]]),
        "logprobs": st.integers(0, 4),
    },
)
REQUEST = st.builds(
    lambda asked, seed, length, steps: {**asked, "prompt": draw_prompt(seed, length), "max_tokens": steps},
    ASKED,
    st.integers(0, 9),
    st.integers(1, 30),
    st.integers(1, 15),
)


@pytest.fixture(scope="module")
def engine():
    with Engine(workers=1, page_bytes=1 << 20, compile="off") as made:
        made.register(MODEL, warm_up=False)
        yield made


def made_of(engine: Engine, **request) -> dict[str, torch.Tensor]:
    request.setdefault("prompt", [5, 9, 3])
    return engine.submit("lm", request).result(WAIT_S)


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


@THOROUGH
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    model=st.sampled_from([*MODELS.values(), LAYERS]),
    workers=st.integers(1, 2),
)
def test_answers_are_bit_for_bit_those_of_the_request_alone(requests, model, workers):
    """Prompts come in pieces; a worker has 64 pages, so that requests are suspended."""
    engine = small_engine(workers, page_bytes=PAGE_BYTES, debug=True, arena_bytes=1 << 17)
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("lm", request) for request in requests]
        for request, future in zip(requests, futures):
            assert_same_bits(future.result(WAIT_S), run_one_by_one(MODEL, request))
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("suspension", ["copy", "recompute"])
def test_requests_that_were_suspended_go_on_with_their_numbers(suspension):
    model = MODELS[1, 8]
    engine = suspending_engine(suspension)
    suspended = watch_suspensions(engine)
    requests = [
        {**EVERYTHING, "ignore_eos": True, "stop_tokens": [], "seed": seed, "prompt": draw_prompt(seed, 20)}
        for seed in range(6)
    ]
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("lm", {**request, "max_tokens": 30}) for request in requests]
        for request, future in zip(requests, futures):
            assert_same_bits(future.result(WAIT_S), run_one_by_one(MODEL, {**request, "max_tokens": 30}))
        assert any(suspended)
        is_measured = engine._processor.tables.settings["page_ns"][0] > 0
        assert is_measured == (suspension == "copy")
    finally:
        close_and_check(engine)


@THOROUGH
@given(
    turns=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), min_size=2, max_size=3),
    sessions=st.integers(1, 4),
    moved=st.integers(0, 2),
)
def test_conversations_go_on_with_all_that_they_were_told(turns, sessions, moved):
    """Penalties read what a session was told before; before turn ``moved`` each is exported, reset and restored."""
    model = sampling_model(3, 11, keep=True)
    engine = small_engine(1, page_bytes=1 << 15, debug=True, arena_bytes=1 << 17)
    states: list[list[torch.Tensor]] = [[] for _ in range(sessions)]
    begins = [torch.zeros(0, dtype=torch.int64) for _ in range(sessions)]
    asked = {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5}
    try:
        engine.register(model, warm_up=False)
        opened = [engine.session("lm", str(k)) for k in range(sessions)]
        for turn, (length, steps) in enumerate(turns):
            if turn == moved:
                for session in opened:
                    exported = session.export()
                    session.reset()
                    session.restore(exported)
            requests = [
                {
                    **asked,
                    "seed": k,
                    "prompt": torch.cat([begin, draw_prompt(10 * turn + k, length)]),
                    "max_tokens": steps,
                }
                for k, begin in enumerate(begins)
            ]
            futures = [session.submit(request) for session, request in zip(opened, requests)]
            for k, (request, future) in enumerate(zip(requests, futures)):
                made = future.result(WAIT_S)
                assert_same_bits(made, run_one_by_one(model, request, states[k]))
                begins[k] = made["token"][-1:]
    finally:
        close_and_check(engine)


def test_a_conversation_goes_on_as_one_request_would():
    """With the same seed, as the numbers are those of places in the text."""
    model, state = sampling_model(keep=True), []
    asked = {"temperature": 1.0, "seed": 4, "ignore_eos": True, "repetition_penalty": 1.3}
    first = run_one_by_one(model, {**asked, "prompt": [1, 2, 3], "max_tokens": 6}, state)
    rest = run_one_by_one(model, {**asked, "prompt": first["token"][-1:], "max_tokens": 5}, state)
    whole = run_one_by_one(model, {**asked, "prompt": [1, 2, 3], "max_tokens": 11})
    assert torch.equal(torch.cat([first["token"], rest["token"]]), whole["token"])


@pytest.mark.parametrize("length", [1, 9])
def test_who_asks_for_nothing_has_the_bits_of_a_greedy_model(engine, length):
    greedy = complete("greedy", small_cell())
    for seed in range(5):
        request = {"prompt": draw_prompt(seed, length), "max_tokens": 12}
        assert_same_bits(made_of(engine, **request), run_one_by_one(greedy, request))


def test_the_modules_give_what_the_one_call_gives(monkeypatch):
    wanted = run_one_by_one(MODEL, {**EVERYTHING, "seed": 3, "prompt": draw_prompt(0, 9)})
    monkeypatch.setattr("cellrt.cells._sampling_step.SamplingStep.sample", lambda *_: None)
    assert_same_bits(run_one_by_one(MODEL, {**EVERYTHING, "seed": 3, "prompt": draw_prompt(0, 9)}), wanted)


def test_the_cell_has_a_form_without_python():
    assert MODEL.cells[0].compiled_form is not None


def test_without_a_seed_each_answer_is_another(engine):
    asked = {"temperature": 5.0, "ignore_eos": True, "max_tokens": 20}
    assert len({tuple(made_of(engine, **asked)["token"].tolist()) for _ in range(3)}) == 3
    assert len({tuple(made_of(engine, **asked, seed=1)["token"].tolist()) for _ in range(3)}) == 1


def test_numbers_of_numpy_are_numbers(engine):
    plain = {"temperature": 0.5, "top_k": 5, "seed": 3, "min_tokens": 2, "logprobs": 2, "ignore_eos": True}
    made = {name: np.array([value])[0] for name, value in plain.items()}
    made |= {"stop_tokens": np.array([1, 2]), "logit_bias": {np.int64(4): np.float32(1.5)}}
    plain |= {"stop_tokens": [1, 2], "logit_bias": {"4": 1.5}}
    assert_same_bits(made_of(engine, **made), made_of(engine, **plain))


def test_the_example_has_all_fields_so_that_they_are_found_in_json():
    sent = {**EVERYTHING, "ignore_eos": True, "seed": 1 << 60, "prompt": [5, 9, 3], "max_tokens": 6, "answered": 2}
    sent["allowed_tokens"] = [3, 5, 8, 9, 11]
    read = form_of(MODEL.example, Limits()).read(json.loads(json.dumps(sent)), "request")
    assert_same_bits(run_one_by_one(MODEL, read), run_one_by_one(MODEL, sent))


def test_an_answer_ends_with_a_stop_token(engine):
    free = made_of(engine, max_tokens=12, ignore_eos=True)["token"].tolist()
    stop = free[5]
    assert (
        made_of(engine, max_tokens=12, ignore_eos=True, stop_tokens=[stop])["token"].tolist()
        == (free[: free.index(stop) + 1])
    )


def test_end_tokens_are_said_and_gone_by_as_asked(engine):
    made = made_of(engine, logit_bias={END: 1000.0}, max_tokens=5)["token"].tolist()
    assert made == [END]
    made = made_of(engine, logit_bias={END: 1000.0}, max_tokens=5, ignore_eos=True)["token"].tolist()
    assert made == [END] * 5
    made = made_of(engine, logit_bias={END: 1000.0}, max_tokens=5, min_tokens=3)["token"].tolist()
    assert len(made) == 4 and made[-1] == END and END not in made[:-1]


@pytest.mark.parametrize("sampling", [False, LIMITS])
@pytest.mark.parametrize("make", [language_model, layered_language_model])
def test_a_model_may_have_several_end_tokens(make, sampling):
    asked = {"prompt": [5, 9, 3], "max_tokens": 12}
    free = run_one_by_one(complete("lm", make(small_llama(), VOCABULARY, page_size=4)), asked)["token"].tolist()
    model = complete("lm", make(small_llama(), [VOCABULARY, free[6], free[4]], page_size=4, sampling=sampling))
    ends = {free[4], free[6]}
    wanted = next(k for k, token in enumerate(free) if token in ends) + 1
    assert run_one_by_one(model, asked)["token"].tolist() == free[:wanted]


def test_likeliest_tokens_are_told_with_their_chances(engine):
    plain = made_of(engine, max_tokens=6, ignore_eos=True)
    told = made_of(engine, max_tokens=6, ignore_eos=True, logprobs=2)
    assert {"top_token", "top_logprob"} == told.keys() - plain.keys()
    assert torch.equal(told["top_token"][:, 0], plain["token"])
    assert torch.equal(told["top_logprob"][:, 0], plain["logprob"])
    assert told["top_token"].shape == (6, LIMITS.logprobs)
    assert told["top_token"][:, 2:].eq(-1).all() and told["top_logprob"][:, 2:].eq(-math.inf).all()
    assert told["top_logprob"][:, :2].diff().le(0).all()


def test_penalties_are_of_the_answer_and_repetition_of_the_prompt_too(engine):
    prompt = [6, 6, 6, 6]
    free = made_of(engine, prompt=prompt, max_tokens=1)["token"].tolist()
    for name in ("presence_penalty", "frequency_penalty"):
        assert made_of(engine, prompt=prompt + free, max_tokens=1, **{name: 50.0})["token"].tolist() == (
            made_of(engine, prompt=prompt + free, max_tokens=1)["token"].tolist()
        )
        made = made_of(engine, prompt=prompt, max_tokens=20, ignore_eos=True, **{name: 50.0})["token"].tolist()
        assert len({*made}) == len(made)
    told = made_of(engine, prompt=prompt, max_tokens=20, ignore_eos=True, repetition_penalty=1e9)["token"].tolist()
    assert made_of(engine, prompt=told, max_tokens=1, repetition_penalty=1e9)["token"].tolist()[0] not in told


def test_a_token_that_has_no_embedding_fails_its_request_alone(engine):
    bad = engine.submit("lm", {"prompt": [1, VOCABULARY], "temperature": 1.0})
    good = made_of(engine, temperature=1.0, seed=2, max_tokens=5)
    with pytest.raises(RequestError, match="expected tokens from 0 to 49, got 50"):
        bad.result(WAIT_S)
    assert_same_bits(good, run_one_by_one(MODEL, {"prompt": [5, 9, 3], "temperature": 1.0, "seed": 2, "max_tokens": 5}))


@pytest.mark.parametrize(
    ("given_", "match"),
    [
        ({"temperature": -0.1}, "expected temperature as a finite number of at least 0, got -0.1"),
        ({"temperature": math.nan}, "expected temperature as a finite number of at least 0, got nan"),
        ({"temperature": "warm"}, "expected temperature as a finite number of at least 0, got 'warm'"),
        ({"top_k": -1}, "expected top_k as an integer of at least 0, got -1"),
        ({"top_k": 1.5}, "expected top_k as an integer of at least 0, got 1.5"),
        ({"top_p": 0}, "expected top_p as a finite number above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "expected top_p as a finite number above 0 and at most 1, got 1.01"),
        ({"min_p": 2}, "expected min_p as a finite number of at least 0 and at most 1, got 2"),
        ({"repetition_penalty": 0}, "expected repetition_penalty as a finite number above 0, got 0"),
        ({"presence_penalty": math.inf}, "expected presence_penalty as a finite number, got inf"),
        ({"frequency_penalty": True}, "expected frequency_penalty as a finite number, got True"),
        ({"logit_bias": [1]}, "expected logit_bias as a dict of at most 3 tokens, got \\[1\\]"),
        ({"logit_bias": dict.fromkeys(range(4), 1)}, "expected logit_bias as a dict of at most 3 tokens, got 4"),
        ({"logit_bias": {50: 1.0}}, "expected tokens from 0 to 49 in logit_bias, got 50"),
        ({"logit_bias": {"x": 1.0}}, "expected tokens from 0 to 49 in logit_bias, got 'x'"),
        ({"logit_bias": {4: math.nan}}, "expected logit_bias of 4 as a finite number"),
        ({"stop_tokens": 4}, "expected stop_tokens as a list of at most 2 tokens, got 4"),
        ({"stop_tokens": [1, 2, 3]}, "expected stop_tokens as a list of at most 2 tokens, got 3"),
        ({"stop_tokens": [-1]}, "expected tokens from 0 to 49 in stop_tokens, got -1"),
        ({"min_tokens": 8, "max_tokens": 7}, "expected min_tokens as an integer from 0 to 7, got 8"),
        ({"ignore_eos": 1}, "expected ignore_eos as a bool, got 1"),
        ({"seed": 1 << 63}, "expected seed as an integer from -9223372036854775808"),
        ({"seed": 0.5}, "expected seed as an integer from"),
        ({"logprobs": 5}, "expected logprobs as an integer from 0 to 4, got 5"),
        ({"allowed_tokens": []}, "expected allowed_tokens with at least one token, got none"),
        ({"allowed_tokens": [0, VOCABULARY]}, f"in allowed_tokens, got {VOCABULARY}"),
        ({"allowed_tokens": [-1]}, "in allowed_tokens, got -1"),
        ({"allowed_tokens": [True]}, "expected allowed_tokens as a list of tokens, or 50 bools"),
        ({"allowed_tokens": [0.5]}, "expected allowed_tokens as a list of tokens"),
        ({"allowed_tokens": [[1], [2, 3]]}, "expected allowed_tokens as a list of tokens"),
        ({"allowed_tokens": 3}, "expected allowed_tokens as a list of tokens"),
        ({"allowed_tokens": torch.ones(3, dtype=torch.bool)}, "expected allowed_tokens as a list of tokens"),
        ({"answered": -1}, "expected answered as an integer from 0"),
        ({"min_tokens": 300, "answered": 3}, "expected min_tokens as an integer from 0 to 259"),
        ({"temprature": 1}, "got \\['temprature'\\] too"),
    ],
)
def test_mistakes_in_requests_are_named(given_, match):
    with pytest.raises(RequestError, match=match):
        run_one_by_one(MODEL, {"prompt": [1], **given_})


def test_a_greedy_model_says_who_samples():
    with pytest.raises(RequestError, match="got \\['temperature'\\] too .*language_model\\(..., sampling=True\\)"):
        run_one_by_one(complete("lm", small_cell()), {"prompt": [1], "temperature": 1.0})


class Own(nn.Module):
    """A decoder of somebody's: the next token is likely one more than the sum of all so far."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler, self.vocabulary = Sampler(VOCABULARY, END, LIMITS), VOCABULARY

    def forward(self, token, sums, history, spans, settings, seed, stops, biases, mask):
        sums.append(token[:, None].float())
        totals = [sums.rows_of(node)[: position + 1].sum() for node, position in zip(sums.nodes, sums.positions)]
        logits = -(torch.stack(totals)[:, None] + 1 - torch.arange(VOCABULARY)).abs() % VOCABULARY
        return self.sampler(logits, token, history, spans, settings, seed, stops, biases, mask)


def test_a_decoder_of_ones_own_samples():
    module = Own()
    inputs = {"token": token, "sums": grows(1, page_size=4), **module.sampler.inputs(page_size=4)}
    model = complete("own", cell(module, inputs, max_batch=4, max_batch_rows=16))
    requests = [{**EVERYTHING, "seed": seed, "prompt": draw_prompt(seed, 7), "max_tokens": 5} for seed in range(5)]
    with Engine(workers=1, page_bytes=1 << 18, compile="off") as engine:
        engine.register(model, warm_up=False)
        futures = [engine.submit("own", request) for request in requests]
        for request, future in zip(requests, futures):
            assert_same_bits(future.result(WAIT_S), run_one_by_one(model, request))


def test_a_module_that_has_no_vocabulary_is_refused():
    module = Own()
    del module.vocabulary
    inputs = {"token": token, "sums": grows(1, page_size=4), **module.sampler.inputs(page_size=4)}
    with pytest.raises(DefinitionError, match="expected a module with an attribute vocabulary"):
        complete("own", cell(module, inputs, max_batch=4))


@pytest.mark.parametrize("page_size, make", [(4, language_model), (3, layered_language_model)])
def test_an_answer_made_a_token_a_request_is_the_answer_made_at_once(page_size, make):
    """Of a session whose requests say how much of the answer there is."""
    model = sampling_model(page_size, 16, make, keep=True)
    asked = {**EVERYTHING, "seed": 4, "min_tokens": 9, "stop_tokens": [8, 11], "presence_penalty": -2.0}
    with Engine(workers=1, page_bytes=1 << 20, compile="off") as engine:
        engine.register(model, warm_up=False)
        prompt = draw_prompt(1, 20)
        whole = engine.submit("lm", {**asked, "prompt": prompt, "max_tokens": 12}).result(WAIT_S)
        made, session = [], engine.session("lm")
        for answered in range(len(whole["token"])):
            request = {**asked, "prompt": prompt, "max_tokens": 1, "answered": answered}
            request["min_tokens"] = min(9, answered + 1)
            made.append(session.submit(request).result(WAIT_S))
            prompt = made[-1]["token"]
    assert_same_bits({name: torch.cat([one[name] for one in made]) for name in whole}, whole)


def test_only_tokens_that_are_allowed_are_chosen(engine):
    allowed = [3, 5, 9, 11]
    flags = torch.zeros(VOCABULARY, dtype=torch.bool)
    flags[allowed] = True
    for asked in ({}, {**EVERYTHING, "seed": 1}, {"temperature": 100.0, "seed": 2}):
        made = made_of(engine, allowed_tokens=allowed, max_tokens=12, **asked)
        assert {*made["token"].tolist()} <= {*allowed}
        for same in (flags, flags.numpy(), np.array(allowed), tuple(allowed)):
            assert_same_bits(made_of(engine, allowed_tokens=same, max_tokens=12, **asked), made)
    everything = made_of(engine, allowed_tokens=list(range(VOCABULARY)), max_tokens=12)
    assert_same_bits(everything, made_of(engine, max_tokens=12))
