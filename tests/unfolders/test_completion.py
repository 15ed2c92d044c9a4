"""Completion by a small random Llama: each text is that of its request alone, bit for bit, whatever the company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.errors import CancelledError, DefinitionError, RequestError, RequestTooLargeError
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders.completion import complete
from tests.cells.toy_pages import generate
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, error_of, small_engine, watch_suspensions
from tests.engine.mixed_tasks import tasks_of_pieces_and_steps
from tests.unfolders.language_models import END, SIZES, draw_prompt, small_cell, small_layers, small_llama, until_end

CELLS = {limits: small_cell(*limits) for limits in ((1, 8), (4, 64), (3, 11))}
LAYERS = {limits: small_layers(*limits) for limits in CELLS}
"""By page size and most rows of a task: the model as one cell, and as one a layer."""
MODELS = st.sampled_from([*CELLS.values(), *LAYERS.values()])
PAGE_BYTES = 12_288
"""64 pages of a row each (of a layer 128), and the least, 64, of larger ones."""
REQUEST = st.tuples(st.integers(0, 99), st.integers(1, 40), st.integers(1, 20))
THOROUGH = settings(suppress_health_check=list(HealthCheck), max_examples=examples(6), deadline=None)


def asked(seed: int, length: int, steps: int) -> dict[str, object]:
    return {"prompt": draw_prompt(seed, length), "max_tokens": steps}


def suspending_engine(suspension: str) -> Engine:
    settings = SchedulerSettings(suspension=suspension)
    return small_engine(1, page_bytes=PAGE_BYTES, debug=True, arena_bytes=1 << 19, settings=settings)


def assert_same_bits(actual, expected):
    assert actual["token"].tolist() == expected["token"].tolist()
    assert torch.equal(actual["logprob"], expected["logprob"])


@torch.inference_mode()
def test_tokens_are_those_of_a_plain_loop():
    model, prompts = complete("lm", CELLS[4, 64]), [draw_prompt(seed, 3 + seed) for seed in range(8)]
    wanted = generate(small_llama(), [prompt.tolist() for prompt in prompts], 12)
    found = [run_one_by_one(model, {"prompt": prompt, "max_tokens": 12})["token"].tolist() for prompt in prompts]
    assert found == [until_end(tokens) for tokens in wanted]
    assert any(tokens[-1] == END for tokens in found)
    assert len({tuple(tokens) for tokens in found}) > 4


@THOROUGH
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=12),
    cells=MODELS,
    workers=st.integers(1, 2),
    waits=st.lists(st.integers(0, 11), max_size=3),
    cancelled=st.sets(st.integers(0, 11), max_size=3),
)
def test_texts_and_logprobs_are_bit_for_bit_those_of_the_request_alone(requests, cells, workers, waits, cancelled):
    """64 pages at a worker: requests have to share them. Where one of ``waits`` is reached, its answer is awaited."""
    model = complete("lm", cells)
    engine = small_engine(workers, page_bytes=PAGE_BYTES, debug=True, arena_bytes=1 << 19)
    try:
        engine.register(model, warm_up=False)
        futures = []
        for k, drawn in enumerate(requests):
            try:
                futures.append(engine.submit("lm", asked(*drawn)))
            except RequestTooLargeError:
                futures.append(None)
                continue
            if k in cancelled:
                futures[k].cancel()
            if k in waits:
                error_of(futures[k])
        for k, (drawn, future) in enumerate(zip(requests, futures)):
            if future is None:
                continue
            error = error_of(future)
            if k in cancelled and isinstance(error, CancelledError):
                continue
            assert error is None, error
            assert_same_bits(future.result(), run_one_by_one(model, asked(*drawn)))
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("suspension", ["copy", "recompute"])
@pytest.mark.parametrize("cells", [CELLS[1, 8], LAYERS[1, 8]], ids=["one cell", "layers"])
def test_requests_that_were_suspended_give_the_same_bits(cells, suspension):
    model = complete("lm", cells)
    engine = suspending_engine(suspension)
    suspended = watch_suspensions(engine)
    requests = [asked(seed, 20, 30) for seed in range(10)]
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("lm", request) for request in requests]
        for request, future in zip(requests, futures):
            assert_same_bits(future.result(WAIT_S), run_one_by_one(model, request))
        assert any(suspended)
        is_measured = engine._processor.tables.settings["page_ns"][0] > 0
        assert is_measured == (suspension == "copy" or cells is LAYERS[1, 8])  # of layers pages are always copied
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("length", [1, 20])
def test_a_stream_has_each_token_once_though_the_request_dropped_its_pages(length):
    model = complete("lm", CELLS[1, 8])
    engine = suspending_engine("recompute")
    suspended = watch_suspensions(engine)
    requests = [asked(seed, length, 40) for seed in range(10)]
    try:
        engine.register(model, warm_up=False)
        streams = [engine.stream("lm", request) for request in requests]
        for request, stream in zip(requests, streams):
            told = [int(step["token"]) for step in stream]
            assert told == run_one_by_one(model, request)["token"].tolist()
        assert any(suspended)
    finally:
        close_and_check(engine)


@THOROUGH
@given(
    turns=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), min_size=2, max_size=4),
    sessions=st.integers(1, 6),
    cells=MODELS,
    workers=st.integers(1, 2),
    moved=st.integers(0, 3),
)
def test_conversations_go_on_bit_for_bit_where_they_were(turns, sessions, cells, workers, moved):
    """All sessions take their turns at once; before turn ``moved`` each is exported, reset and restored. One worker has
    64 pages for all of them (of two, tests/engine/test_pages_two_workers.py says what is wrong)."""
    model = complete("lm", cells, keep=True)
    engine = small_engine(workers, page_bytes=PAGE_BYTES if workers == 1 else 1 << 18, debug=True, arena_bytes=1 << 19)
    states: list[list[torch.Tensor]] = [[] for _ in range(sessions)]
    begins = [torch.zeros(0, dtype=torch.int64) for _ in range(sessions)]
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
                {"prompt": torch.cat([begin, draw_prompt(10 * turn + k, length)]), "max_tokens": steps}
                for k, begin in enumerate(begins)
            ]
            futures = [session.submit(request) for session, request in zip(opened, requests)]
            for k, (request, future) in enumerate(zip(requests, futures)):
                made = future.result(WAIT_S)
                assert_same_bits(made, run_one_by_one(model, request, states[k]))
                begins[k] = made["token"][-1:]
    finally:
        close_and_check(engine)


def test_a_conversation_is_the_text_that_one_request_would_read():
    """Of two turns with the last token made at the beginning of the second, and of the whole text at once."""
    model = complete("lm", CELLS[4, 64], keep=True)
    state: list[torch.Tensor] = []
    first, second = draw_prompt(1, 9), draw_prompt(2, 5)
    made = run_one_by_one(model, {"prompt": first, "max_tokens": 6}, state)["token"]
    rest = run_one_by_one(model, {"prompt": torch.cat([made[-1:], second]), "max_tokens": 6}, state)
    whole = run_one_by_one(model, {"prompt": torch.cat([first, made, second]), "max_tokens": 6})
    assert_same_bits(rest, whole)


def test_layers_give_the_bits_of_the_whole():
    for limits, whole in CELLS.items():
        for seed in range(6):
            request = asked(seed, 1 + 5 * seed, 7)
            wanted = run_one_by_one(complete("lm", whole), request)
            assert_same_bits(run_one_by_one(complete("lm", LAYERS[limits]), request), wanted)


def test_prompt_pieces_and_single_steps_share_tasks():
    engine = small_engine(1, trace=True)
    try:
        engine.register(complete("lm", CELLS[3, 11]), warm_up=False)
        futures = [engine.submit("lm", asked(seed, 40, 20)) for seed in range(6)]
        for future in futures:
            future.result(WAIT_S)
        tasks = engine.timeline().tasks
    finally:
        close_and_check(engine)
    assert max(task.rows for task in tasks) == 11
    assert tasks_of_pieces_and_steps(tasks, 40)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (torch.zeros(0, dtype=torch.int64), "at least one token"),
        ({"max_tokens": 3}, "at least one token"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens from 1 to 256"),
        ({"prompt": [1], "max_tokens": 257}, "max_tokens from 1 to 256"),
        ({"prompt": [1], "stop": 2}, "got \\['stop'\\] too"),
    ],
)
def test_mistakes_in_requests_are_named(request_, match):
    with pytest.raises(RequestError, match=match):
        run_one_by_one(complete("lm", CELLS[4, 64]), request_)


def test_a_cell_that_is_no_language_model_is_refused():
    other = cell(lambda token: token, {"token": (SIZES.hidden,)}, name="other")
    with pytest.raises(DefinitionError, match="expected a cell with inputs token and one growing state"):
        complete("lm", other)
