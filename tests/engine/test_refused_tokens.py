"""A token that no embedding has is named with the input that gave it and the table that it was looked up in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt.definition.lookup import Refused, RefusedLookup, read_refused
from cellrt.engine.blame import BEYOND_LIMITS
from cellrt.errors import CellError, RequestError, http_status
from cellrt.worker.device.checks import error_of
from cellrt.worker.device.signature import OUTSIDE
from tests.engine.helpers import WAIT_S, small_engine

TOKENS, POSITIONS, LAST = 6, 50, 9


class Reader(nn.Module):
    """Tokens of a small vocabulary; positions of a larger table, ``scale`` apart."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.positions, self.words, self.scale = nn.Embedding(POSITIONS, 4), nn.Embedding(TOKENS, 4), scale

    def forward(self, token: Tensor, place: Tensor, h: Tensor) -> dict[str, Tensor]:
        return {"h": h + self.positions(place * self.scale) + self.words(token), "place": place + 1}


@pytest.fixture(scope="module")
def engine():
    with small_engine() as made:
        for scale in (1, POSITIONS // LAST):
            read = cellrt.cell(Reader(scale), {"token": cellrt.token, "place": cellrt.token, "h": (4,)}, name="read")

            @cellrt.unfold(f"by {scale}", example=[1, 2])
            def model(graph, tokens, read=read):
                return {"h": graph.chain(read, token=tokens, place=0).last.h}

            made.register(model)
        yield made


@pytest.mark.parametrize(
    ("scale", "tokens", "told"),
    [
        (1, [1, TOKENS, 2], f"input 'token': expected tokens from 0 to {TOKENS - 1}, got {TOKENS}"),
        (1, [-1], f"input 'token': expected tokens from 0 to {TOKENS - 1}, got -1"),
        (1, [POSITIONS + 1], f"input 'token': expected tokens from 0 to {TOKENS - 1}, got {POSITIONS + 1}"),
        (1, [0] * (POSITIONS + 1), f"it looks up {POSITIONS} in a table of {POSITIONS} rows"),
        (POSITIONS // LAST, [0] * (LAST + 2), f"it looks up 50 in a table of {POSITIONS} rows"),
    ],
)
def test_an_error_names_the_table_that_refused(engine, scale, tokens, told):
    good = engine.submit(f"by {scale}", [1, 2])
    with pytest.raises(RequestError if told.startswith("input") else CellError) as raised:
        engine.submit(f"by {scale}", tokens).result(WAIT_S)
    assert str(raised.value).rstrip(")").endswith(told)
    assert good.result(WAIT_S)["h"].isfinite().all()


def test_what_an_error_says_can_be_read_again():
    refused = Refused("token", -7, 12)
    assert read_refused(f"cell 'read' raised IndexError: no ({refused})") == refused
    assert read_refused("cell 'read' raised IndexError: no (it looks up 9 in a table of 3 rows)") is None


def test_what_was_looked_up_in_vain_and_caught_is_not_told():
    error = IndexError("another")
    with RefusedLookup() as watch, pytest.raises(IndexError):
        nn.functional.embedding(torch.tensor([3]), torch.zeros(2, 3))
    assert watch.found(error) is None


class Two(nn.Module):
    """Two vocabularies of other sizes, and a token for each; and any number of the larger one's."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Embedding(POSITIONS, 4), nn.Embedding(TOKENS, 4)

    def forward(self, left: Tensor, right: Tensor, parts: cellrt.RaggedRows) -> Tensor:
        return self.large(left) + self.small(right) + 0 * self.large(parts.values).sum()


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ((TOKENS, TOKENS, []), f"input 'right': expected tokens from 0 to {TOKENS - 1}, got {TOKENS}"),
        ((0, 0, [1, POSITIONS]), f"input 'parts': expected tokens from 0 to {POSITIONS - 1}, got {POSITIONS}"),
    ],
)
def test_equal_tokens_of_another_input_are_not_blamed(request_, told):
    two = cellrt.cell(Two(), {"left": cellrt.token, "right": cellrt.token, "parts": cellrt.ragged(dtype=torch.int64)})

    @cellrt.unfold("two", example=(0, 0, [1]))
    def model(graph, request):
        left, right, parts = request
        return {"y": two(left=left, right=right, parts=parts).output}

    with small_engine() as engine:
        engine.register(model, warm_up=False)
        with pytest.raises(RequestError) as raised:
            engine.submit("two", request_).result(WAIT_S)
    assert str(raised.value).endswith(told)


class Next(nn.Module):
    """Adds 1 to a token; looks up the next one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 4)

    def forward(self, token: Tensor) -> dict[str, Tensor]:
        return {"token": token + 1 + 0 * self.words(token).sum(-1).long()}


@pytest.fixture(scope="module")
def adding():
    """An engine with models of a cell that adds 1 to a token: see their docstrings."""
    add, again = (cellrt.cell(Next(), {"token": cellrt.token}, name=name) for name in ("add", "again"))

    @cellrt.unfold("twice", example=1)
    def twice(graph, token):
        """Of a token that the request gives, and of what came of it."""
        return {"token": add(token=add(token=token).token).token}

    @cellrt.unfold("listed", example=[1, 2])
    def listed(graph, tokens):
        """Of tokens that the request gives, one by one."""
        return {str(k): add(token=token).token for k, token in enumerate(tokens)}

    @cellrt.unfold("constant", example=1)
    def constant(graph, steps):
        """Of tokens that it computes."""
        return {"token": graph.loop(add, token=0, max_steps=steps).last.token}

    @cellrt.unfold("looped", example=(1, 2))
    def looped(graph, request):
        """Of a token that the request gives, and of those that it computes then."""
        token, steps = request
        return {"token": graph.loop(add, token=token, max_steps=steps).last.token}

    @cellrt.unfold("in two", example=1)
    def in_two(graph, token):
        """As ``looped``, where a step is two cells."""

        def step(_, state):
            return {"token": add(token=again(token=state.token).token).token}

        return {"token": graph.loop(step, token=token, max_steps=TOKENS).last.token}

    with small_engine() as engine:
        for model in (twice, listed, constant, looped, in_two):
            engine.register(model, warm_up=False)
        yield engine


@pytest.mark.parametrize(
    ("model", "request_", "cell"),
    [("listed", [1, TOKENS], "add"), ("looped", (TOKENS, 9), "add"), ("in two", TOKENS, "again")],
)
def test_a_token_that_the_request_gave_is_its_own_fault(adding, model, request_, cell):
    told = f"model {model!r}: cell {cell!r}, input 'token': expected tokens from 0 to {TOKENS - 1}, got {TOKENS}"
    with pytest.raises(RequestError) as raised:
        adding.submit(model, request_).result(WAIT_S)
    assert (str(raised.value), http_status(raised.value)) == (told, 400)
    assert isinstance(raised.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("model", "request_"), [("twice", TOKENS - 1), ("constant", TOKENS + 2), ("looped", (1, TOKENS)), ("in two", 1)]
)
def test_a_token_that_a_cell_computed_is_the_cell_s_fault(adding, model, request_):
    with pytest.raises(CellError, match=str(TOKENS)):
        adding.submit(model, request_).result(WAIT_S)


class Own(nn.Module):
    """Says of its own accord that it was given a bad token, as an input that it has not."""

    def forward(self, token: Tensor) -> Tensor:
        if (token > TOKENS).any():
            raise IndexError("no (input 'word': expected tokens from 0 to 5, got 9)")
        return token


def test_a_cell_that_names_no_input_of_its_own_blames_nobody():
    own = cellrt.cell(Own(), {"token": cellrt.token}, name="own")

    @cellrt.unfold("own", example=1)
    def model(graph, token):
        return {"token": own(token=token).output}

    with small_engine() as engine:
        engine.register(model, warm_up=False)
        with pytest.raises(CellError, match="expected tokens"):
            engine.submit("own", TOKENS + 1).result(WAIT_S)


class Says(nn.Module):
    """The token after each of a request's, and then after its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 4)

    def forward(self, token: Tensor, rows: Tensor, said: cellrt.PagedRows) -> dict[str, Tensor]:
        said.append(self.words(token))
        return {"token": token + 1}


@pytest.mark.parametrize(
    ("tokens", "fault"), [([1, TOKENS], RequestError), ([TOKENS], RequestError), ([1, TOKENS - 2], CellError)]
)
def test_a_token_of_a_prompt_is_the_request_s_fault_and_what_comes_after_the_cell_s(tokens, fault):
    says = cellrt.cell(Says(), {"token": cellrt.token, "rows": cellrt.span(), "said": cellrt.grows(4)})

    @cellrt.unfold("says", example=[1, 2])
    def model(graph, tokens):
        return {"token": graph.loop(says, token=tokens, said=graph.pages(says), max_steps=3).token}

    with small_engine() as engine:
        engine.register(model, warm_up=False)
        with pytest.raises(fault, match=f"input 'token': expected tokens from 0 to {TOKENS - 1}, got {TOKENS}"):
            engine.submit("says", tokens).result(WAIT_S)


def test_what_a_device_says_of_a_number_is_known():
    cell = cellrt.cell(Next(), {"token": cellrt.token})
    assert BEYOND_LIMITS in str(error_of(cell, OUTSIDE))
