"""The graph's builders and result forms, served and compared with the nodes run one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged, rows
from cellrt.engine.engine import Engine
from cellrt.errors import RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import unfold
from tests.api.models import SIZE, attending, counter, embedded, model, recurrent, serve


def test_single_nodes_with_tensors_numbers_and_zeros(engine: Engine) -> None:
    step, token = recurrent(), embedded()

    def function(graph, request):
        first = token(token=request["token"])
        second = step(x=request["x"], h=first.h)
        third = step(x=graph.constant(torch.full((SIZE,), 0.5)), h=graph.zeros(step).h)
        return {"second": second.h, "third": third, "both": [second.h, third.h]}

    example = {"token": 3, "x": torch.randn(SIZE)}
    one, two = serve(engine, model(function, example), example, {"token": np.int64(5), "x": np.ones(SIZE, np.float32)})
    assert one["second"].shape == (SIZE,) and two["both"].shape == (2, SIZE)
    torch.testing.assert_close(one["third"], two["third"])


def test_calls_on_the_cells_are_the_chain(engine: Engine) -> None:
    step = recurrent()

    def function(graph, request):
        state = graph.zeros(step)
        for x in request:
            state = step(x=x, h=state.h)
        chain = graph.chain(step, x=request)
        return {"by_hand": state.h, "chain": chain.last.h, "steps": chain.h}

    (result,) = serve(engine, model(function, torch.randn(6, SIZE)))
    torch.testing.assert_close(result["by_hand"], result["chain"])
    torch.testing.assert_close(result["steps"][-1], result["chain"])


@pytest.mark.parametrize("source", [[1, 2, 3], (4,), np.array([1, 2]), torch.tensor([7, 8, 9, 0])])
def test_chain_of_tokens(engine: Engine, source: object) -> None:
    token = embedded()
    (result,) = serve(engine, model(lambda graph, request: {"h": graph.chain(token, token=request).h}, source))
    assert result["h"].shape == (len(source), SIZE)


def test_chain_on_a_chain_forwards_and_backwards(engine: Engine) -> None:
    token, step = embedded(), recurrent()

    def function(graph, tokens):
        first = graph.chain(token, token=tokens)
        second = graph.chain(step, reverse=True, x=first.h, h=torch.ones(SIZE))
        third = graph.chain(step, x=list(reversed(first.h)), h=second.last.h)
        return {
            "first": first.h,
            "second": second.h,
            "second last": second.last.h,
            "third": third.h[-1],
            "middle": third.h[1:3],
            "reversed": list(reversed(second.h)),
        }

    (result, _) = serve(engine, model(function, [1, 2, 3, 4]), [1, 2, 3, 4], [5, 6, 7])
    # A reversed chain's steps are in the order of its inputs: it ends at the first.
    torch.testing.assert_close(result["second"][0], result["second last"])
    torch.testing.assert_close(result["reversed"], result["second"].flip(0))


def test_chain_with_inputs_that_stay_the_same(engine: Engine) -> None:
    token, attend = embedded(), attending()

    def function(graph, request):
        encoder = graph.chain(token, token=request["tokens"])
        same = graph.chain(attend, memory=encoder.h, x=request["x"])
        mixed = graph.chain(attend, memory=[encoder.last.h, torch.ones(SIZE)], x=request["x"])
        none = graph.chain(attend, memory=[], x=request["x"])
        rows = attend(memory=torch.ones(3, SIZE), x=encoder.last.h)
        return {"same": same.h, "mixed": mixed.last.h, "none": none.last.h, "rows": rows.h}

    example = {"tokens": [1, 2, 3], "x": torch.randn(4, SIZE)}
    serve(engine, model(function, example), example, {"tokens": [9], "x": torch.randn(1, SIZE)})


def test_chain_on_unevenly_spaced_outputs(engine: Engine) -> None:
    token, step = embedded(), recurrent()

    def function(graph, tokens):
        first = graph.chain(token, token=tokens)
        picked = [first.h[k] for k in (0, 1, 3)]
        chain = graph.chain(step, x=picked, h=torch.ones(SIZE))
        backwards = graph.chain(step, reverse=True, x=[*picked, torch.ones(SIZE)])
        return {"last": chain.last.h, "steps": chain.h, "backwards": backwards.h, "backwards last": backwards.last.h}

    (result,) = serve(engine, model(function, [1, 2, 3, 4]))
    assert result["steps"].shape == (3, SIZE)
    torch.testing.assert_close(result["backwards"][0], result["backwards last"])


NUMBER = rows(dtype=torch.int64)
SUM = cell(lambda n, x: {"n": 2 * n + x}, {"n": NUMBER, "x": NUMBER}, name="sum")
ADD = cell(lambda x: {"x": x + 1}, {"x": NUMBER}, name="add")


def digits(values: RaggedRows) -> torch.Tensor:
    """Of each node's values the sum, each twice the one before."""
    rows = values.values.split(values.offsets.diff().tolist())
    return torch.tensor([int((row << torch.arange(len(row)).flip(0)).sum()) for row in rows], dtype=torch.int64)


LISTED = cell(digits, {"values": ragged(dtype=torch.int64)}, name="listed")
SOURCES = {
    "number": lambda graph, value: value,
    "NumPy number": lambda graph, value: np.int64(value),
    "tensor": lambda graph, value: torch.tensor(value),
    "smaller": lambda graph, value: torch.tensor(value, dtype=torch.int32),
    "output": lambda graph, value: ADD(x=value - 1).x,
    "node": lambda graph, value: ADD(x=value - 1),
    "constant": lambda graph, value: graph.constant(value),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(SOURCES)), st.integers(-9, 9)), min_size=1, max_size=8), st.booleans())
def test_lists_may_mix_what_the_request_brings_with_outputs(items, reverse):
    def function(graph, request):
        listed = [SOURCES[source](graph, value) for source, value in items]
        chain = graph.chain(SUM, x=listed, reverse=reverse)
        return {"chain": chain.last.n, "ragged": LISTED(values=tuple(listed)).output}

    result = run_one_by_one(model(function), None)
    values = [value for _, value in items]
    expected = 0
    for value in reversed(values) if reverse else values:
        expected = 2 * expected + value
    assert int(result["chain"]) == expected
    assert int(result["ragged"]) == sum(value << k for k, value in enumerate(reversed(values)))


def test_a_mixed_list_is_served(engine: Engine) -> None:
    def function(graph, ids):
        first = graph.chain(SUM, x=ids).last.n
        mixed = [*ids[1:], first, 7]
        return {"chain": graph.chain(SUM, x=mixed).n, "ragged": LISTED(values=mixed).output}

    (result, _) = serve(engine, model(function, [1, 2, 3]), [1, 2, 3], [4])
    assert result["chain"].tolist() == [2, 7, 25, 57] and result["ragged"] == 57


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_smaller_integers_are_widened(engine: Engine, dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max

    def function(graph, given):
        chain = graph.chain(SUM, x=given)
        return {"n": chain.n, "one": ADD(x=given[0]).x, "ragged": LISTED(values=given).output}

    given_tensor = torch.tensor([most, 1], dtype=dtype)
    for result in serve(engine, model(function, given_tensor), given_tensor, given_tensor.numpy(), [most, 1]):
        assert result["n"].tolist() == [most, 2 * most + 1] and result["one"] == most + 1
        assert result["ragged"] == 2 * most + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_list_of_tensors_is_their_stack(engine: Engine, dtype: torch.dtype) -> None:
    spec = rows(2, dtype=dtype)
    same = cell(lambda x: x.clone(), {"x": spec}, name="same")
    given_rows = [torch.full((2,), value, dtype=dtype, requires_grad=True) for value in (1.0, -2.5)]
    (result,) = serve(engine, model(lambda graph, request: {"x": graph.chain(same, x=request).output}, given_rows))
    assert result["x"].dtype == dtype and result["x"].tolist() == [[1, 1], [-2.5, -2.5]]


@pytest.mark.parametrize("tensor", [torch.zeros(3, 2, device="meta"), torch.zeros(3, 2).to_sparse()])
def test_a_tensor_without_plain_values_is_refused(engine: Engine, tensor: torch.Tensor) -> None:
    same = cell(lambda x: x.clone(), {"x": (2,)}, name="same")
    engine.register(model(lambda graph, x: {"x": graph.chain(same, x=x).output}, torch.zeros(2, 2)))
    with pytest.raises(RequestError, match=rf"float32\[3, 2\] with layout {tensor.layout} on device {tensor.device}"):
        engine.submit("m", tensor)


def test_loop_until_an_output_or_the_limit(engine: Engine) -> None:
    count = counter()

    def function(graph, request):
        loop = graph.loop(count, max_steps=6, until="stop", number=request["from"], limit=request["to"], step=1)
        return {
            "numbers": loop.number,
            "last": loop.last.number,
            "half": loop.last.half,
            "halves": loop.half,
            "stop": loop.last.stop,
        }

    requests = [{"from": 0, "to": 3}, {"from": 0, "to": 100}, {"from": 5, "to": 1}]
    ended, limited, once = serve(engine, model(function, requests[0]), *requests)
    assert ended["numbers"].tolist() == [1, 2, 3] and ended["last"] == 3 and bool(ended["stop"])
    assert limited["numbers"].tolist() == [1, 2, 3, 4, 5, 6] and not bool(limited["stop"])
    assert once["numbers"].tolist() == [6] and once["half"] == 3


def test_loop_without_an_end_and_what_follows_it(engine: Engine) -> None:
    count, token = counter(), embedded()

    def function(graph, request):
        loop = graph.loop(count, max_steps=request, limit=0, step=2)
        return {"number": loop.last.number, "after": token(token=loop.last.number).h}

    (_, result) = serve(engine, model(function, 2), 2, 4)
    assert result["number"] == 8


def test_loop_with_a_ragged_input_that_stays(engine: Engine) -> None:
    token, attend = embedded(), attending()

    def function(graph, tokens):
        encoder = graph.chain(token, token=tokens)
        loop = graph.loop(attend, max_steps=3, memory=encoder.h, x=encoder.last.h)
        return {"h": loop.h, "last": loop.last.h}

    (result, _) = serve(engine, model(function, [1, 2]), [1, 2], [3])
    torch.testing.assert_close(result["h"][-1], result["last"])


def test_constants_are_kept_once_and_others_still_work(engine: Engine) -> None:
    token = embedded()

    def function(graph, request):
        return {"h": token(token=graph.constant(request), h=graph.constant(torch.ones(SIZE))).h}

    serve(engine, model(function, 2), 2, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_rows_of_other_dtypes(engine: Engine, dtype: torch.dtype) -> None:
    spec = rows(2, dtype=dtype)
    same = cell(lambda x: {"x": x.flip(1), "is_set": x != 0}, {"x": spec}, name="same")

    def function(graph, request):
        first = same(x=request)
        ones = [True, False] if dtype is torch.bool else [1, 0]
        return {"x": same(x=first.x).x, "is_set": first.is_set, "listed": same(x=ones).x}

    (result,) = serve(engine, model(function, torch.tensor([0, 1]).to(dtype)))
    assert result["x"].dtype == dtype and result["x"].tolist() == [0, 1] and result["listed"].tolist() == [0, 1]
    assert result["is_set"].tolist() == [False, True]


def test_a_node_alone_may_be_the_result(engine: Engine) -> None:
    step = recurrent()
    (result,) = serve(engine, model(lambda graph, request: step(x=request), torch.ones(SIZE)))
    assert list(result) == ["h"]


def test_the_same_output_may_be_several_results(engine: Engine) -> None:
    step = recurrent()

    def function(graph, request):
        chain = graph.chain(step, x=request)
        return {"a": chain.h, "b": chain.h, "c": chain.h[0], "d": [chain.h[0], chain.h[0]], "e": chain.last}

    serve(engine, model(function, torch.ones(3, SIZE)))


def test_unfolders_compose(engine: Engine) -> None:
    step = recurrent()
    inner = model(lambda graph, request: {"h": graph.chain(step, x=request).last.h}, torch.ones(2, SIZE), "inner")
    serve(engine, model(lambda graph, request: {"h": step(x=inner(graph, request)["h"]).h}, torch.ones(2, SIZE)))


def test_two_models_with_an_equal_cell_batch_together(engine: Engine) -> None:
    first, second = recurrent(), recurrent()
    assert first is not second and first.identity == second.identity
    engine.register(model(lambda graph, x: {"h": graph.chain(first, x=x).last.h}, torch.ones(2, SIZE), "one"))
    engine.register(model(lambda graph, x: {"h": graph.chain(second, x=x).h}, torch.ones(2, SIZE), "two"))
    assert list(engine.statistics()["cells"]) == ["Recurrent"]
    xs = [torch.randn(20, SIZE) for _ in range(200)]
    futures = [engine.submit(name, x) for x in xs for name in ("one", "two")]
    for one, two in zip(futures[::2], futures[1::2]):
        torch.testing.assert_close(one.result(60)["h"], two.result(60)["h"][-1])
    timeline = engine.timeline()
    model_of = {span.request: span.label for span in timeline.requests}
    assert any(len({model_of[request] for request in task.requests}) == 2 for task in timeline.tasks)


def test_a_tensor_may_be_changed_once_it_is_submitted(engine):
    """The engine has its own copy of what a client gave it."""
    double = cell(lambda x: x * 2, {"x": (2,)}, name="double")

    @unfold("double", example=torch.zeros(3, 2))
    def doubled(graph, x):
        return {"y": graph.chain(double, x=x).output}

    engine.register(doubled)
    for rows_given in (torch.ones(3, 2), np.ones((3, 2), np.float32)):
        future = engine.submit("double", rows_given)
        rows_given[:] = 7
        assert torch.equal(future.result(timeout=60)["y"], torch.full((3, 2), 2.0))
