"""Loops of several cells, and over a list of cells, as a client writes them: what they compute, and what is refused."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt.errors import RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, close_and_check, small_engine

WIDTH, TOKENS, END = 6, 9, 8


class State(NamedTuple):
    h: Tensor
    c: Tensor


class Said(NamedTuple):
    token: Tensor
    stop: Tensor


class Height(NamedTuple):
    h: Tensor
    stop: Tensor


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> State:
        return State(*self.lstm(x, (h, c)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, TOKENS)

    def forward(self, h: Tensor) -> Said:
        token = self.project(h).argmax(1)
        return Said(token, token == END)


class Layer(nn.Module):
    """A layer of a stack that may end early."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Height:
        h = torch.tanh(self.linear(h))
        return Height(h, h[:, 0] > 0.3)


torch.manual_seed(22)
ROW = (WIDTH,)
EMBEDDING, LOWER, UPPER, HEAD = nn.Embedding(TOKENS, WIDTH), Recurrent(), Recurrent(), Head()
with torch.no_grad():
    EMBEDDING.weight.mul_(3)
    for weight in [*LOWER.parameters(), *UPPER.parameters()]:
        weight.mul_(2)
    HEAD.project.bias.zero_()
STATE = {"x": ROW, "h": ROW, "c": ROW}
EMBED = cellrt.cell(EMBEDDING, {"token": cellrt.token}, name="embed")
FIRST = cellrt.cell(LOWER, STATE, name="lower")
SECOND = cellrt.cell(UPPER, STATE, name="upper")
SAY = cellrt.cell(HEAD, {"h": ROW}, carry={}, name="say")
LAYERS = [Layer() for _ in range(5)]
STACK = [cellrt.cell(layer, {"h": ROW}, name=f"layer {k}") for k, layer in enumerate(LAYERS)]


@cellrt.unfold("writer", example=(0, torch.zeros(WIDTH)), cells=(EMBED, FIRST, SECOND, SAY))
def writer(graph, request):
    """Two layers: the lower begins with a given state, the upper with zeros."""
    token, start = request

    def step(body, state):
        lower = FIRST(x=EMBED(token=state.token).output, h=state.h, c=state.c)
        said = SAY(h=SECOND(x=lower.h).h)
        return {"token": said.token, "stop": said.stop, "h": lower.h, "c": lower.c}

    loop = graph.loop(step, max_steps=12, until="stop", token=token, h=start, c=start)
    return {"tokens": loop.token, "h": loop.last.h}


@cellrt.unfold("stack", example=torch.zeros(WIDTH), cells=STACK)
def stack(graph, x):
    loop = graph.loop(STACK, until="stop", h=x)
    return {"h": loop.last.h, "every": loop.h}


@torch.inference_mode()
def written(token: int, start: Tensor) -> tuple[list[int], Tensor]:
    """What ``writer`` writes, by the modules themselves."""
    said, lower, upper = [token], (start[None], start[None]), (torch.zeros(1, WIDTH), torch.zeros(1, WIDTH))
    while len(said) <= 12 and (len(said) == 1 or said[-1] != END):
        lower = LOWER(EMBEDDING(torch.tensor(said[-1:])), *lower)
        upper = UPPER(lower[0], *upper)
        said.append(int(HEAD(upper[0])[0]))
    return said[1:], lower[0][0]


def served(model: Unfolder, requests: list[object], workers: int = 1, **options: object):
    engine = small_engine(workers, **options)
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit(model.name, request) for request in requests]
        results = [future.result(WAIT_S) for future in futures]
        return results, (engine.timeline().tasks if options.get("trace") else [])
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_of_several_cells_is_what_its_modules_compute_step_by_step(workers):
    requests = [(k % TOKENS, torch.randn(WIDTH, generator=torch.Generator().manual_seed(k))) for k in range(40)]
    results, _ = served(writer, requests, workers)
    wanted = [written(*request) for request in requests]
    assert [result["tokens"].tolist() for result in results] == [tokens for tokens, _ in wanted]
    for result, (_, h) in zip(results, wanted):
        torch.testing.assert_close(result["h"], h, rtol=1e-5, atol=1e-5)
    assert len({len(tokens) for tokens, _ in wanted}) > 2, "some stop, at different steps, and some do not"


def test_requests_at_different_steps_share_tasks():
    requests = [(k % TOKENS, torch.full((WIDTH,), k / 10)) for k in range(20)]
    _, tasks = served(writer, requests, trace=True)
    assert max(task.rows for task in tasks) > 1
    assert {task.cell for task in tasks} == {"embed", "lower", "upper", "say"}


@torch.inference_mode()
def test_a_stack_of_layers_ends_early_for_whom_it_may():
    requests = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(30)]
    results, tasks = served(stack, requests, trace=True)
    depths = []
    for result, h in zip(results, requests):
        rows = []
        for layer in LAYERS:
            h, stops = (value[0] for value in layer(h[None]))
            rows.append(h)
            if stops:
                break
        torch.testing.assert_close(result["h"], h, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["every"], torch.stack(rows), rtol=1e-5, atol=1e-5)
        depths.append(len(rows))
    assert len(set(depths)) > 2
    assert sum(task.rows for task in tasks) == sum(depths), "nobody runs a layer that he does not need"


def test_a_stream_gives_each_step_of_a_loop_of_cells_when_it_is_done():
    engine = small_engine()
    try:
        engine.register(writer, warm_up=False)
        for k in range(8):
            request = (k, torch.full((WIDTH,), k / 10))
            *items, last = engine.stream("writer", request)
            tokens, h = written(*request)
            assert [int(item["tokens"]) for item in items] == tokens
            torch.testing.assert_close(last["h"], h, rtol=1e-5, atol=1e-5)
    finally:
        close_and_check(engine)


@torch.inference_mode()
def test_a_session_keeps_what_a_loop_of_cells_left():
    @cellrt.unfold("going on", example=3, cells=(EMBED, FIRST, SAY))
    def going_on(graph, token):
        before = graph.state(FIRST)

        def step(body, state):
            lower = FIRST(x=EMBED(token=state.token).output, h=state.h, c=state.c)
            return {"token": SAY(h=lower.h).token, "h": lower.h, "c": lower.c}

        loop = graph.loop(step, max_steps=3, token=token, h=before.h, c=before.c)
        graph.keep(before, loop.last)
        return {"tokens": loop.token}

    engine = small_engine(2)
    try:
        engine.register(going_on, warm_up=False)
        with engine.session("going on") as session:
            state, token = (torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)), 3
            for _ in range(4):
                said, wanted = session.submit(token).result(WAIT_S)["tokens"].tolist(), []
                for _ in range(3):
                    state = LOWER(EMBEDDING(torch.tensor([token])), *state)
                    token = int(HEAD(state[0])[0])
                    wanted.append(token)
                assert said == wanted
    finally:
        close_and_check(engine)


def test_a_known_key_gives_the_same_as_unfolding_anew():
    def function(graph, start):
        def step(body, state):
            lower = FIRST(x=EMBED(token=state.token).output, h=state.h, c=state.c)
            return {"token": SAY(h=lower.h).token, "h": lower.h, "c": lower.c}

        loop = graph.loop(step, max_steps=4, token=start["token"], h=start["h"], c=start["h"])
        return {"tokens": loop.token}

    def request(k):
        return {"token": torch.tensor(k % TOKENS), "h": torch.full((WIDTH,), k / 5)}

    model = Unfolder("keyed", function, request(0), key=lambda _: "one graph")
    requests = [request(k) for k in range(20)]
    results, _ = served(model, requests)
    for asked, result in zip(requests, results):
        assert result["tokens"].tolist() == run_one_by_one(model, asked)["tokens"].tolist()


def test_what_a_loop_of_cells_made_is_read_by_others_at_every_step():
    @cellrt.unfold("mean", example=0, cells=(EMBED, FIRST, SECOND, SAY, MEAN))
    def mean(graph, request):
        def step(body, state):
            lower = FIRST(x=EMBED(token=state.token).output)
            said = SAY(h=lower.h)
            return {"token": said.token, "h": lower.h}

        loop = graph.loop(step, max_steps=5, token=request)
        return {"mean": MEAN(rows=loop.h).output, "h": loop.h}

    (result,), _ = served(mean, [3])
    torch.testing.assert_close(result["mean"], result["h"].mean(0))


def mean_rows(rows: cellrt.RaggedRows) -> Tensor:
    counts = rows.offsets.diff()
    sums = torch.zeros(len(counts), WIDTH).index_add(0, torch.repeat_interleave(counts), rows.values)
    return sums / counts[:, None]


MEAN = cellrt.cell(mean_rows, {"rows": cellrt.ragged(WIDTH)}, name="mean")


def embedded(body, state):
    return {"token": SAY(h=EMBED(token=state.token).output).token}


MISTAKES = {
    "no dict": (lambda body, state: EMBED(token=state.token), {"token": 1}, {}, "returns a dict of outputs"),
    "no cell": (lambda body, state: {"token": state.token}, {"token": 1}, {}, "got dict .* of 0 calls"),
    "a number": (
        lambda body, state: {**embedded(body, state), "n": 3},
        {"token": 1},
        {},
        "'n': expected an output of a cell that the step calls, got int 3",
    ),
    "a forgotten state": (
        lambda body, state: {"other": EMBED(token=state.token).output},
        {"token": 1},
        {},
        r"the step returned \['other'\]; the state \['token'\] is missing",
    ),
    "an unknown state": (lambda body, state: {"x": EMBED(token=state.word).output}, {"token": 1}, {}, "not 'word'"),
    "another end": (embedded, {"token": 1}, {"until": "stop"}, "until='stop' must be an output of one number a row"),
    "a wide end": (
        lambda body, state: {"token": state.token, "x": EMBED(token=state.token).output},
        {"token": 1},
        {"until": "x"},
        "until='x' must be an output of one number a row",
    ),
    "another state": (
        lambda body, state: {"a": state.b, "b": SAY(h=EMBED(token=state.a).output).token},
        {"a": 1, "b": 2},
        {},
        "'a': expected an output of a cell, got another state",
    ),
    "a state of another shape": (
        lambda body, state: {"token": EMBED(token=state.token).output},
        {"token": 1},
        {},
        r"'token': it begins as int64\[\], and is float32\[6\] after a step",
    ),
    "a state of two shapes": (
        lambda body, state: {"s": SAY(h=EMBED(token=state.s).output).token, "t": SAY(h=state.s).token},
        {"s": 1},
        {},
        r"cell 'say', node \d+, input 'h': expected float32\[6\], got int64\[\]",
    ),
    "a start of another shape": (
        lambda body, state: {"h": FIRST(x=state.h).h},
        {"h": torch.zeros(2)},
        {},
        r"input 'x': expected float32\[6\], got float32\[2\]",
    ),
    "a state that nobody needs": (
        lambda body, state: {**embedded(body, state), "other": state.other},
        {"token": 1, "other": 2},
        {},
        "'other': it is given, but no cell of the step reads it",
    ),
    "a state that is made but not read": (
        lambda body, state: {**embedded(body, state), "h": FIRST(x=EMBED(token=state.token).output).h},
        {"token": 1, "h": torch.ones(WIDTH)},
        {},
        r"'h': it is given, but no cell of the step reads it as state.h \(a carried input that a call leaves out",
    ),
    "half a state": (
        lambda body, state: {"h": FIRST(x=state.h, h=state.h).h},
        {"h": torch.zeros(WIDTH)},
        {},
        r"input 'c': missing; .* as \['h'\] are given too",
    ),
    "a list of rows from inside": (
        lambda body, state: {"h": MEAN(rows=FIRST(x=state.h).h).output},
        {"h": torch.zeros(WIDTH)},
        {},
        r"expected ragged float32\[6\], got an output of the loop's own step",
    ),
    "kept": (embedded, {"token": 1}, {"keep": True}, r"without keep and carry \(see graph.state"),
    "no steps": (embedded, {"token": 1}, {"max_steps": 0}, r"expected max_steps as an int from 1 to 1048575, got 0"),
    "an empty list": ([], {}, {"max_steps": None}, "expected a list of cells, got list"),
    "cells that differ": (
        [FIRST, STACK[0]],
        {"x": torch.zeros(WIDTH)},
        {"max_steps": None},
        "all must have the same inputs, outputs and carried inputs; number 1 is",
    ),
    "a list and steps": (
        STACK,
        {"h": torch.zeros(WIDTH)},
        {"max_steps": 3},
        "as many steps as it has, and no keep and carry",
    ),
    "half steps": (embedded, {"token": 1}, {"max_steps": 2.5}, r"max_steps as an int from 1 to 1048575, got 2.5"),
}


@pytest.mark.parametrize(("step", "given", "options", "match"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(step, given, options, match):
    model = Unfolder(
        "wrong", lambda graph, _: {"r": graph.loop(step, **{"max_steps": 3, **options}, **given).token}, None
    )
    with pytest.raises(RequestError, match=match):
        run_one_by_one(model, None)


def test_an_output_of_the_step_is_nobodys_outside_of_it():
    kept = []

    def step(body, state):
        kept.append(EMBED(token=state.token))
        return {"token": SAY(h=kept[0].output).token}

    def function(graph, _):
        graph.loop(step, max_steps=2, token=1)
        return SAY(h=kept[0].output)

    with pytest.raises(RequestError, match="what is inside a loop's step is read by cells that the step calls"):
        run_one_by_one(Unfolder("wrong", function, None), None)
