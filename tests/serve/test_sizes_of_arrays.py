"""Arrays in tuples, lists and trees may have other sizes than the example's, where the model takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import cellrt
from cellrt.core.processor import Processor
from cellrt.engine.discovery import Discovery
from cellrt.engine.registry import Registry
from cellrt.errors import RequestError
from cellrt.graph.unfolder import Unfolder
from cellrt.serve.described import request_form
from cellrt.serve.forms import Form
from cellrt.serve.server_settings import Limits
from cellrt.serve.sized import SizedGraph

ADD = cellrt.cell(lambda x, h: {"h": x + h}, {"x": (2,), "h": (2,)}, name="add")
COUNT = cellrt.cell(lambda n, h: {"h": n + h}, {"n": cellrt.token, "h": cellrt.token}, name="count")
ZEROS = torch.zeros(2, 2)


def form_of(model: Unfolder) -> Form:
    binding = Discovery(Registry(Processor(1), 1000))
    graph = SizedGraph(binding)
    model.record_in(graph, model.example)

    def takes(other: object) -> bool:
        try:
            model.record(binding, other)
        except RequestError:
            return False
        return True

    return request_form(model.example, takes, Limits(), graph)


def summed(graph: cellrt.Graph, request: Any) -> dict[str, object]:
    """The sums of the arrays, each of any length."""
    return {f"sum{place}": graph.chain(ADD, x=array).last.h for place, array in enumerate(request)}


def both(graph: cellrt.Graph, request: Any) -> dict[str, object]:
    """The sum of two arrays that must be as long as each other."""
    if len(request[0]) != len(request[1]):
        raise RequestError("expected as many of both")
    return {"h": graph.chain(ADD, x=request[0] + request[1]).h}


def unlike(graph: cellrt.Graph, request: Any) -> dict[str, object]:
    """Rows and tokens, of any lengths."""
    rows, tokens = request
    return {"h": graph.chain(ADD, x=rows).h, "n": graph.chain(COUNT, n=tokens).h}


def fixed(graph: cellrt.Graph, request: Any) -> dict[str, object]:
    """Two rows, of the cell's own size."""
    return {"h": ADD(x=request[0], h=request[1]).h}


@pytest.mark.parametrize(
    ("function", "example", "given"),
    [
        (summed, (ZEROS, ZEROS), [[[1, 2]], [[1, 2], [3, 4], [5, 6]]]),
        (summed, [ZEROS], [[[1, 2], [3, 4], [5, 6]]]),
        (summed, (ZEROS.numpy(), torch.zeros(3, 2).numpy()), [[[1, 2]], [[1, 2]]]),
        (both, (ZEROS, ZEROS), [[[1, 2]], [[3, 4]]]),
        (unlike, (ZEROS, torch.zeros(2, dtype=torch.int64)), [[[1, 2]], [1, 2, 3]]),
        (unlike, (ZEROS.numpy(), [0, 0]), [[[1, 2]], [1, 2, 3]]),
    ],
    ids=["tuple", "list", "of NumPy", "together", "unlike", "with a list"],
)
def test_arrays_may_be_of_any_size_that_the_model_takes(function: Any, example: object, given: list[Any]) -> None:
    model = Unfolder("model", function, example)
    read = form_of(model).read(given, "request")
    assert type(read) is type(example)
    for part, expected, like in zip(read, given, example, strict=True):  # type: ignore[call-overload]
        assert type(part) is type(like) and np.asarray(part).tolist() == expected
    model.record(Discovery(Registry(Processor(1), 1000)), read)


def test_arrays_that_have_a_size_of_their_own_keep_it() -> None:
    form = form_of(Unfolder("model", fixed, (torch.zeros(2), torch.zeros(2))))
    with pytest.raises(RequestError, match=r"expected shape \[2\], got \[3\]"):
        form.read([[1, 2], [1, 2, 3]], "request")


def test_parts_that_are_unlike_are_read_each_as_the_example_s_and_are_as_many() -> None:
    form = form_of(Unfolder("model", unlike, (ZEROS, torch.zeros(2, dtype=torch.int64))))
    assert form.read([[[1, 2]], [3]], "request")[1].dtype == torch.int64
    for wrong, words in (([[[1, 2]]], "a list of 2 parts"), ([[[1, 2]], [0.5]], r"request\[1\]: expected INT64")):
        with pytest.raises(RequestError, match=words):
            form.read(wrong, "request")
    assert form.schema()["prefixItems"][1]["items"] == {"type": "integer"}
