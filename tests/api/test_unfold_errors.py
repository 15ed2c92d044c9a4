"""Every mistake an unfolder can make is told at registration and at a request, and no other request notices."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from cellrt.definition.define import cell
from cellrt.definition.spec import ragged
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError, RequestError, RequestTooLargeError, UnknownModelError, http_status
from tests.api.mistakes import MISTAKES, OTHER, ROW, STEP, TOKEN, good
from tests.api.models import SIZE, counter, model
from tests.engine.helpers import small_engine


@pytest.fixture(scope="module", autouse=True)
def other_graph() -> None:
    engine = small_engine(arena_bytes=1 << 20)

    def keep(graph, request):
        OTHER[:] = [STEP(x=ROW), graph.chain(STEP, x=[ROW, ROW])]
        return OTHER[0]

    engine.register(model(keep), warm_up=False)
    engine.close()


@pytest.fixture(scope="module")
def served():
    """An engine with a model that does what the request says."""
    with small_engine(max_nodes=100, arena_bytes=1 << 20) as engine:
        engine.register(model(lambda graph, write: write(graph), good), warm_up=False)
        yield engine
        engine.check()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_told_at_registration(served: Engine, mistake: str) -> None:
    write, message = MISTAKES[mistake]
    with pytest.raises(DefinitionError, match=rf"example request does not unfold: model 'wrong': .*{message}"):
        served.register(model(lambda graph, request: write(graph), name="wrong"), warm_up=False)
    with pytest.raises(UnknownModelError, match="'wrong' is not registered; registered are \\['m'\\]"):
        served.submit("wrong", None)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_told_at_the_request_and_to_no_other(served: Engine, mistake: str) -> None:
    write, message = MISTAKES[mistake]
    before = served.submit("m", good)
    with pytest.raises(RequestError, match=rf"model 'm': .*{message}"):
        served.submit("m", write)
    with pytest.raises(RequestError, match=message):
        served.submit_many("m", [good, write])
    after = served.submit("m", good)
    torch.testing.assert_close(before.result(30), after.result(30))


def test_a_cell_that_the_example_did_not_use() -> None:
    late = counter()

    def function(graph, uses_both):
        if uses_both:
            late(number=1, limit=1, step=1)
        return STEP(x=ROW)

    with small_engine(arena_bytes=1 << 20) as engine:
        engine.register(model(function, False, "without"), warm_up=False)
        with pytest.raises(RequestError, match=r"cell 'count_up' is not one of the model's.*cells=\[...\]"):
            engine.submit("without", True)
        engine.register(model(function, False, "with", cells=(late,)), warm_up=False)
        engine.submit("with", True).result(30)
        engine.check()


def test_a_request_with_too_many_nodes_is_too_large(served: Engine) -> None:
    message = r"model 'm': cell 'Embedded': the graph has 101 nodes, at most 100"
    with pytest.raises(RequestTooLargeError, match=message) as told:
        served.submit("m", lambda graph: graph.chain(TOKEN, token=[1] * 101).last)
    assert http_status(told.value) == 413


def test_an_example_that_would_never_fit() -> None:
    with (
        small_engine(arena_bytes=1 << 10) as engine,
        pytest.raises(DefinitionError, match="the example request does not fit: model 'm': the request needs"),
    ):
        engine.register(model(lambda graph, x: {"h": graph.chain(STEP, x=x).h}, torch.ones(5000, SIZE)), warm_up=False)


def test_a_request_that_would_never_fit() -> None:
    with small_engine(arena_bytes=1 << 10) as engine:
        engine.register(model(lambda graph, x: {"h": graph.chain(STEP, x=x).h}, torch.ones(2, SIZE)), warm_up=False)
        with pytest.raises(RequestError, match="model 'm': the request needs"):
            engine.submit("m", torch.ones(5000, SIZE))
        engine.submit("m", torch.ones(3, SIZE)).result(30)
        engine.check()


def test_a_cell_called_outside_an_unfolder() -> None:
    with pytest.raises(DefinitionError, match=r"cell 'Recurrent' was called outside an unfolder; use cell.run"):
        STEP(x=ROW)


def test_a_graph_that_is_used_after_its_unfolder_returned() -> None:
    kept: list[Any] = []

    def function(graph, x):
        kept.append(graph)
        return {"h": graph.chain(STEP, x=x).h}

    with small_engine(arena_bytes=1 << 20) as engine:
        engine.register(model(function, torch.ones(2, SIZE)), warm_up=False)
    for write in (lambda graph: graph.call(STEP, x=ROW), lambda graph: graph.constant(1.0)):
        with pytest.raises(RequestError, match="the graph was used after its unfolder returned"):
            write(kept[0])


def test_a_state_that_is_kept_after_its_unfolder_returned() -> None:
    kept: list[Any] = []

    def function(graph, x):
        state = graph.state(STEP)
        kept.append((graph, state, STEP(x=x[0], **vars(state))))
        graph.keep(*kept[-1][1:])
        return {"h": kept[-1][2].h}

    with small_engine(arena_bytes=1 << 20) as engine:
        engine.register(model(function, torch.ones(2, SIZE)), warm_up=False)
    graph, *its = kept[-1]
    with pytest.raises(RequestError, match="the graph was used after its unfolder returned"):
        graph.keep(*its)


def test_rows_for_which_there_is_no_memory_name_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("cellrt.worker.arenas.Arenas.allocate", allocate)
    with (
        small_engine(arena_bytes=1 << 20) as engine,
        pytest.raises(
            DefinitionError, match=r"cells \['Recurrent', .*\]: there is no memory for .* GB of rows float32"
        ),
    ):
        engine.register(model(lambda graph, write: write(graph), good), warm_up=False)
    summed = cell(lambda rows: {"out": rows.offsets.diff()[:, None].float()}, {"rows": ragged(7)}, name="summed")
    with small_engine() as engine, pytest.raises(DefinitionError, match=r"cells \['summed'\]: there is no memory"):
        engine.register(model(lambda graph, rows: {"out": graph.call(summed, rows=rows).out}, torch.ones(1, 7)))


def test_an_example_is_unfolded_once() -> None:
    unfolded: list[object] = []

    def function(graph, x):
        unfolded.append(x)
        return {"h": graph.chain(STEP, x=x).h}

    with small_engine(arena_bytes=1 << 20) as engine:
        engine.register(model(function, torch.ones(2, SIZE)), warm_up=False)
        assert len(unfolded) == 1


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_model_needs_a_name(name: Any) -> None:
    with pytest.raises(DefinitionError, match="expected a name"):
        model(good, name=name)


def test_what_is_no_model_and_what_is_there_already(served: Engine) -> None:
    with pytest.raises(DefinitionError, match="expected what @cellrt.unfold makes, got function"):
        served.register(good)
    with pytest.raises(DefinitionError, match="a model 'm' is registered already"):
        served.register(model(lambda graph, write: write(graph), good))


def forgets(graph, words):
    for word in words:
        state = STEP(x=word)
    return {"h": state.h}


def forgets_by_zeros(graph, words):
    for word in words:
        state = STEP(x=word, h=graph.zeros(STEP).h)
    return {"h": state.h}


@pytest.mark.parametrize("function", [forgets, forgets_by_zeros])
def test_a_state_that_every_call_forgets_is_told_once(function: Any) -> None:
    with small_engine(arena_bytes=1 << 20) as engine:
        with pytest.warns(
            RuntimeWarning, match=r"cell 'Recurrent' is called several times.* without its state \['h'\]"
        ) as told:
            engine.register(model(function, torch.zeros(3, SIZE)), warm_up=False)
        assert [each.filename for each in told] == [__file__]
        engine.register(model(function, torch.zeros(3, SIZE), "again"), warm_up=False)


@pytest.mark.parametrize(
    ("kind", "hint"),
    [(nn.GRUCell, r"'input': 4, 'hx': 4"), (nn.RNNCell, r"'input': 4, 'hx': 4"), (nn.LSTMCell, r"cells\.LSTMCell")],
)
def test_a_recurrent_cell_of_torch_without_its_state_is_told_once(kind: type[nn.Module], hint: str) -> None:
    step = cell(kind(SIZE, SIZE), {"input": SIZE})
    name = next(iter(step.outputs))

    def chain(graph, words):
        return {"h": getattr(graph.chain(step, input=words), name)}

    what = f"has the one input 'input', so each step .* with zeros; .*{hint}"
    with small_engine(arena_bytes=1 << 20) as engine:
        with pytest.warns(RuntimeWarning, match=what) as told:
            engine.register(model(chain, torch.zeros(3, SIZE)), warm_up=False)
        assert [each.filename for each in told] == [__file__]
        engine.register(model(chain, torch.zeros(3, SIZE), "again"), warm_up=False)


def policy(obs: torch.Tensor, h: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns its state as the second of a plain tuple: that is output1, and not carried."""
    return obs + context, torch.tanh(obs + h)


START = torch.zeros(SIZE)


@pytest.mark.parametrize(
    ("inputs", "results", "told"),
    [
        (("h", "context"), ("output0",), ["{'h': 'output1'}"]),
        (("h", "context"), ("output0", "output1"), []),  # somebody reads it: it may be what it seems
    ],
)
def test_a_state_that_is_given_and_never_carried_is_told_once(inputs: Any, results: Any, told: Any) -> None:
    step = cell(policy, {"obs": SIZE, "h": SIZE, "context": SIZE})

    def chain(graph, obs):
        steps = graph.chain(step, obs=obs, **dict.fromkeys(inputs, START))
        return {name: getattr(steps, name) for name in results}

    with small_engine(arena_bytes=1 << 20) as engine, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        engine.register(model(chain, torch.zeros(3, SIZE)), warm_up=False)
        engine.register(model(chain, torch.zeros(3, SIZE), "again"), warm_up=False)
    assert [str(each.message).partition("carry=")[2].removesuffix(")") for each in heard] == told
    assert all(each.filename == __file__ for each in heard)


def carries(graph, words):
    state = STEP(x=words[0])
    for word in words[1:]:
        state = STEP(x=word, h=state.h)
    return {"h": state.h}


BEGINNINGS = {
    "a state that is given": carries,
    "one call": lambda graph, words: {"h": STEP(x=words[0]).h},
    "a batch of chains": lambda graph, words: {"h": [STEP(x=word).h for word in words]},
    "results of their own": lambda graph, words: {f"{k}": STEP(x=word).h for k, word in enumerate(words)},
    "leaves": lambda graph, words: {"h": STEP(x=words[2], h=STEP(x=STEP(x=words[0]).h, h=STEP(x=words[1]).h).h).h},
    "read at each step of a chain": lambda graph, words: {
        "h": graph.chain(STEP, x=[STEP(x=word).h for word in words]).h
    },
    "chains of one cell": lambda graph, words: {"h": [graph.chain(STEP, x=words).last.h for _ in range(2)][1]},
    "a loop beside": lambda graph, words: {
        "h": [STEP(x=words[0]), graph.loop(STEP, max_steps=2, x=words[0]).last][1].h
    },
}


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_beginning_with_zeros_is_no_mistake_where_it_is_used(kind: str) -> None:
    with small_engine(arena_bytes=1 << 20) as engine:
        engine.register(model(BEGINNINGS[kind], torch.zeros(3, SIZE)), warm_up=False)
