"""``unfold(..., key=...)``: a request of a known key is not unfolded again, and what it records is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellrt.definition.define import cell
from cellrt.definition.spec import ragged, rows
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.graph import Graph
from cellrt.graph.known import Alike, KnownGraphs
from cellrt.graph.slots import check_key
from cellrt.graph.unfolder import Unfolder, unfold

STEP = cell(lambda x, h: {"h": x + h}, {"x": (2,), "h": (2,)})
COUNT = cell(lambda n, s: {"s": n + s}, {"n": rows(dtype=torch.int64), "s": rows(dtype=torch.int64)})


class Bound:
    """A binding without an engine."""

    max_nodes = 1000

    def __init__(self) -> None:
        self.kinds: dict[object, int] = {}

    def cell_type(self, made: Any) -> int:
        return 0 if made is STEP else 1

    def kind(self, spec: Any) -> int:
        return self.kinds.setdefault((spec.shape, spec.dtype), len(self.kinds))

    def constant_row(self, kind: int, content: bytes) -> int:
        return -1


class Keeping(Bound):
    """One that keeps constants, as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[object, int] = {}

    def constant_row(self, kind: int, content: bytes) -> int:
        return self.constants.setdefault((kind, content), len(self.constants))


class Counting:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.count = function, 0

    def __call__(self, graph: Graph, request: Any) -> object:
        self.count += 1
        return self.function(graph, request)


def pair(graph: Graph, request: dict[str, Any]) -> dict[str, object]:
    """Two chains, and one row for all steps of a third."""
    top = graph.chain(STEP, x=request["x"], h=request["start"])
    return {"h": top.last.h, "s": graph.chain(COUNT, n=request["words"][0]).s}


def key_of(request: dict[str, Any]) -> object:
    return len(request["x"]), len(request["words"][0]), *request


def request_of(length: int, words: Sequence[int], value: float, form: str) -> dict[str, Any]:
    x = torch.full((length, 2), value, dtype=torch.float32)
    made: Any = {"tensor": x, "array": x.numpy(), "list": list(x), "nested": x.tolist()}[form]
    return {"x": made, "start": torch.tensor([float(value), 1.0]), "words": (list(words),)}


def same(alike: Sequence[Alike], expected: Sequence[Any]) -> None:
    """Every request's record is in there once, with its own tensors."""
    found: dict[int, Any] = {}
    for recorded, places in alike:
        for number, place in enumerate(places):
            externals = [
                (kind, values.reshape(len(places), -1, *values.shape[1:])[number])
                for kind, values in recorded.externals
            ]
            assert place not in found
            found[place] = recorded._replace(externals=externals)
    assert sorted(found) == list(range(len(expected)))
    for place, wanted in enumerate(expected):
        one = found[place]
        assert one._replace(externals=[]) == wanted._replace(externals=[])
        assert len(one.externals) == len(wanted.externals)
        for (kind, values), (known, bits) in zip(one.externals, wanted.externals):
            assert kind == known
            assert values.dtype == bits.dtype
            np.testing.assert_array_equal(values, bits)


REQUEST = st.builds(
    request_of,
    st.integers(1, 3),
    st.lists(st.integers(-5, 5), min_size=1, max_size=3),
    st.floats(-4, 4, width=32),
    st.sampled_from(["tensor", "array", "list", "nested"]),
)


@given(batches=st.lists(st.lists(REQUEST, max_size=6), max_size=6))
def test_what_is_recorded_is_what_unfolding_each_request_records(batches):
    binding, unfolder = Bound(), Unfolder("pair", pair, request_of(2, [1], 0.0, "tensor"), key=key_of)
    known = KnownGraphs(unfolder)
    for batch in batches:
        same(known.record(binding, batch), [unfolder.record(binding, request) for request in batch])


def test_a_known_key_is_hardly_ever_unfolded():
    counting = Counting(pair)
    unfolder = Unfolder("pair", counting, request_of(2, [1], 0.0, "tensor"), key=key_of)
    known, binding = KnownGraphs(unfolder), Bound()
    for value in range(1000):
        known.record(binding, [request_of(2, [value], value, "tensor")])
    assert counting.count < 16
    known.record(binding, [request_of(2, [value], value, "tensor") for value in range(10_000)])
    assert counting.count < 20


def test_requests_of_a_key_that_have_different_graphs_are_found_out(caplog):
    def function(graph: Graph, request: Any) -> object:
        return {"s": graph.chain(COUNT, n=request).s if request[0] > 0 else graph.chain(COUNT, n=request).last.s}

    unfolder = Unfolder("wrong", function, [1, 2], key=len)
    known, binding = KnownGraphs(unfolder), Bound()
    for _ in range(3):
        known.record(binding, [[1, 2]])
    with pytest.raises(RequestError, match=r"model 'wrong': the key 2 is that of requests with different graphs"):
        for _ in range(4):
            known.record(binding, [[-1, 2]])
    assert "from now on each request of that key is unfolded" in caplog.text
    for request in ([1, 2], [-1, 2]) * 9:  # from then on each is unfolded
        (alike,) = known.record(binding, [request])
        assert alike.recorded.results == unfolder.record(binding, request).results


@pytest.mark.parametrize(
    ("function", "key", "match"),
    [
        (lambda graph, x: {"h": graph.chain(STEP, x=x * 2).last.h}, len, r"input 'x' reads something else"),
        (lambda graph, x: {"h": STEP(x=x[0]).h}, len, r"input 'x' reads something else"),
        (lambda graph, x: {"h": graph.chain(STEP, x=x).last.h}, lambda x: [1], "TypeError of the example: unhashable"),
        (lambda graph, x: {"h": graph.chain(STEP, x=x).last.h}, lambda x: x["y"], "its key raised"),
    ],
    ids=["computed", "a part", "unhashable", "raises"],
)
def test_a_key_that_cannot_be_kept_is_refused_at_registration(function, key, match):
    unfolder, binding = Unfolder("m", function, torch.zeros(2, 2), key=key), Bound()
    with pytest.raises(DefinitionError, match=match):
        check_key(unfolder, binding, unfolder.record(binding, unfolder.example))


CONSTANTS = {
    "as it is": lambda graph, request: graph.constant(request["start"]),
    "computed": lambda graph, request: graph.constant(request["start"] * 2),
    "a number": lambda graph, request: graph.constant([request["scale"], 0.0], STEP.inputs["h"]),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_that_is_made_of_the_request_is_not_known_by_its_key(kind):
    def function(graph: Graph, request: Any) -> object:
        return {"h": graph.chain(STEP, x=request["x"], h=CONSTANTS[kind](graph, request)).last.h}

    def request(value: float) -> dict[str, Any]:
        return {"x": torch.zeros(1, 2), "start": torch.full((2,), value), "scale": value}

    unfolder, binding = Unfolder("m", function, request(0.0), key=lambda one: len(one["x"])), Keeping()
    with pytest.raises(DefinitionError, match="its key is the same for the example and for one with other numbers"):
        check_key(unfolder, binding, unfolder.record(binding, unfolder.example))
    known = KnownGraphs(unfolder)
    for value in (0.0, 0.0, 0.0, 5.0, 6.0, 0.0):
        same(known.record(binding, [request(value)]), [unfolder.record(binding, request(value))])


def test_what_is_empty_is_checked_for_each_request():
    total = cell(lambda x, h: {"y": x + h.values.sum()}, {"x": (2,), "h": ragged(3)}, name="total")

    def function(graph: Graph, request: Any) -> object:
        return {"y": total(x=request["x"], h=request["h"]).y}

    def request(h: object) -> dict[str, Any]:
        return {"x": torch.zeros(2), "h": h}

    unfolder, binding = Unfolder("m", function, request(torch.zeros(0, 3)), key=lambda one: len(one["h"])), Bound()
    known = KnownGraphs(unfolder)
    for _ in range(3):
        known.record(binding, [request(torch.zeros(0, 3))])
    for wrong in (torch.zeros(0, 5), "", {}):
        with pytest.raises(RequestError, match="cell 'total', node 0, input 'h'"):
            known.record(binding, [request(wrong)])


def test_requests_with_empty_parts_are_known_by_their_key():
    """Such as lists of the nodes that come before each, of which the first has none."""
    total = cell(lambda x, h: {"h": x + h.values.sum(0)}, {"x": (2,), "h": ragged(2)}, name="total")

    @Counting
    def function(graph: Graph, request: dict[str, Any]) -> object:
        made: list[Any] = []
        for x, before in zip(request["x"], request["before"]):
            made.append(total(x=x, h=[made[node] for node in before]).h)
        return {"h": made[-1]}

    def request(seed: int, before: list[list[int]]) -> dict[str, Any]:
        torch.manual_seed(seed)
        return {"x": list(torch.randn(len(before), 2)), "before": before}

    unfolder = Unfolder("dag", function, request(0, [[], [0]]), key=lambda one: str(one["before"]))
    known, binding = KnownGraphs(unfolder), Bound()
    diamond = [[], [0], [0], [1, 2]]
    for seed in range(3):
        known.record(binding, [request(seed, diamond)])
    before = function.count
    for seed in range(20, 24):
        (found,) = known.record(binding, [request(seed, diamond)])
        same([found], [unfolder.record(binding, request(seed, diamond))])
    assert function.count <= before + 4 + 1  # those that are compared with, and one that looks whether the key is right


def test_a_number_of_the_request_is_read_anew_each_time():
    """Python has one object for all small numbers, so where one comes from cannot be told."""

    def function(graph: Graph, request: dict[str, Any]) -> object:
        return {"s": graph.chain(COUNT, n=request["words"], s=request["seed"]).last.s}

    unfolder = Unfolder("seeded", function, {"words": [1], "seed": torch.tensor(1)}, key=lambda one: len(one["words"]))
    known, binding = KnownGraphs(unfolder), Bound()
    for seed in (0, 0, 0, 1, 2, 2):
        request = {"words": [0, 1], "seed": seed}
        same(known.record(binding, [request]), [unfolder.record(binding, request)])


def test_a_wrong_request_of_a_known_key_gets_the_error_of_its_unfolding():
    unfolder, binding = Unfolder("pair", pair, request_of(2, [1], 0.0, "tensor"), key=key_of), Bound()
    known = KnownGraphs(unfolder)
    for _ in range(3):
        known.record(binding, [request_of(2, [1], 0.0, "tensor")])
    good = request_of(2, [1], 0.0, "tensor")
    for wrong in (
        {**good, "x": torch.zeros(2, 3)},
        {**good, "x": torch.zeros(2, 2, dtype=torch.int64)},
        {**good, "words": ([0.5],)},
        {**good, "start": None},
        [1, 2, 3],
    ):
        with pytest.raises(RequestError) as expected:
            unfolder.record(binding, wrong)
        for batch in ([wrong], [good, wrong]):
            with pytest.raises(RequestError) as raised:
                known.record(binding, batch)
            which = "" if len(batch) == 1 else "request 2 of 2 (index 1): "
            assert str(raised.value) == which + str(expected.value)


def test_a_key_must_be_a_function():
    with pytest.raises(DefinitionError, match="expected a function of a request as key, got 3"):
        unfold("m", example=[1], key=3)  # type: ignore[arg-type]


class Words(NamedTuple):
    """A request with names."""

    steps: int
    words: list[int]


def counted(graph: Graph, request: Words) -> dict[str, object]:
    """As many words as there are, from a number on."""
    return {"s": graph.chain(COUNT, n=request.words, s=request.steps).s}


def lengths(request: Words) -> tuple[int, int]:
    return len(request.words), request.steps


def test_a_request_may_have_names_and_numbers_that_its_key_has():
    calls = Counting(counted)
    unfolder, binding = Unfolder("counted", calls, Words(4, [1, 2, 3]), key=lengths), Bound()
    check_key(unfolder, binding, unfolder.record(binding, unfolder.example))
    known, plain = KnownGraphs(unfolder), Unfolder("counted", counted, Words(4, [1, 2, 3]))
    for word in range(6):
        calls.count = 0
        for request in (Words(3, [word, 8, 9]), Words(4, [word, 7, 6])):
            same(known.record(binding, [request]), [plain.record(binding, request)])
        assert word != 5 or not calls.count
    many = [Words(steps, [steps, 1, 2]) for steps in (3, 4, 3, 3)]
    together = {tuple(alike.indices): alike for alike in known.record(binding, many)}
    assert set(together) == {(0, 2, 3), (1,)}
    for places, alike in together.items():
        each = [plain.record(binding, many[place]).externals for place in places]
        for k, (kind, found) in enumerate(alike.recorded.externals):
            assert kind == each[0][k][0] and np.array_equal(found, np.concatenate([its[k][1] for its in each]))


@pytest.mark.parametrize("steps", [3, 2])
def test_a_number_that_only_equals_one_of_the_key_is_read_anew_each_time(steps):
    unfolder, binding = Unfolder("counted", counted, Words(3, [1, 2, 3]), key=lambda one: len(one.words)), Bound()
    known = KnownGraphs(unfolder)
    for first in (steps, steps, steps, 7, steps, 8):
        request = Words(first, [0] * steps)
        same(known.record(binding, [request]), [unfolder.record(binding, request)])
    with pytest.raises(DefinitionError, match="and numbers that the key has; cell 'COUNT|<lambda>'.* something else"):
        check_key(unfolder, binding, unfolder.record(binding, unfolder.example))


def test_a_key_that_takes_plain_numbers_alone_is_no_error_of_a_request():
    known, binding = (
        KnownGraphs(Unfolder("counted", counted, Words(3, [1]), key=lambda one: {int: 1}[type(one.steps)])),
        Bound(),
    )
    for _ in range(3):
        (alike,) = known.record(binding, [Words(4, [1, 2])])
        same([alike], [Unfolder("counted", counted, Words(3, [1])).record(binding, Words(4, [1, 2]))])


def test_the_request_is_named_whose_key_raises():
    def function(graph: Graph, request: Any) -> object:
        return {"h": graph.chain(STEP, x=request).last.h}

    good, odd = torch.ones(2, 2), torch.ones(3, 2)
    known = KnownGraphs(Unfolder("m", function, good, key=lambda request: 6 // (3 - len(request))))
    with pytest.raises(RequestError, match=r"request 2 of 3 \(index 1\): model 'm': its key raised ZeroDivisionError"):
        known.record(Bound(), [good, odd, good])
    with pytest.raises(RequestError, match=r"model 'm': its key raised ZeroDivisionError"):
        known.record(Bound(), [odd])
