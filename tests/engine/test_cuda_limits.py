"""A token outside an embedding costs one request, not the device: there it would be an assertion in a kernel."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cellrt import cells
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged, rows
from cellrt.errors import CellError, RequestError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.dry import DryDevice, DryDeviceError
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.limits import find_limits
from tests.engine.helpers import WAIT_S, close_and_check, error_of
from tests.engine.test_cuda_worker import device_engine

WORDS, WIDTH = 7, 4
TOKEN = rows(dtype=torch.int64)
RUNS = SchedulerSettings(join_budget_s=60.0, min_run_s=60.0)


@pytest.fixture(autouse=True)
def asserting_kernels(monkeypatch):
    """An index out of range loses the device, as it does on a GPU."""
    monkeypatch.setattr(DryDevice, "is_fatal", lambda device, error: isinstance(error, DryDeviceError | IndexError))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, token: Tensor) -> Tensor:
        return self.table(token)


class Walk(NamedTuple):
    token: Tensor
    stop: Tensor


class Walks(nn.Module):
    """The next token is read from a table, and is outside of it behind the largest; token ``last`` says stop."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last
        self.register_buffer("table", torch.arange(1, WORDS + 1))

    def forward(self, token: Tensor) -> Walk:
        return Walk(self.table[token], token == self.last)


class WalksFrom(Walks):
    """As ``Walks``, beside a number that stays as the request gave it."""

    def forward(self, start: Tensor, token: Tensor) -> Walk:
        return Walk(self.table[token] + 0 * self.table[start], token == self.last)


class SumOfWords(Words):
    def forward(self, tokens: RaggedRows) -> Tensor:
        index = torch.repeat_interleave(
            torch.arange(len(tokens.offsets) - 1), tokens.offsets.diff(), output_size=len(tokens.values)
        )
        return torch.zeros(len(tokens.offsets) - 1, WIDTH).index_add_(0, index, self.table(tokens.values))


def only_the_third_fails(
    model: Unfolder, requests: list[object], fault: type = RequestError, **options: object
) -> None:
    """Twice, so that the second time what was captured is repeated."""
    engine = device_engine("dry", 1, DeviceOptions(ring_bytes=1 << 16, capture_after=1, **options), settings=RUNS)
    engine.register(model, warm_up=False)
    for _ in range(2):
        for k, future in enumerate(engine.submit_many(model.name, requests)):
            error = error_of(future)
            if k == 2:
                assert type(error) is fault and "outside what the cell indexes" in str(error)
            else:
                assert error is None
                assert all(value.isfinite().all() for value in future.result(WAIT_S).values())
    close_and_check(engine)


@pytest.mark.parametrize("token", [WORDS, -1, 1 << 40])
def test_a_token_that_a_request_brings(token):
    made = cell(Words(), {"token": TOKEN}, max_batch=8)
    model = Unfolder("words", lambda graph, request: made(token=request), 1)
    only_the_third_fails(model, [1, 2, token, 3])


as_it_is_or_compiled = pytest.mark.parametrize(
    "options", [{}, {"compiled": True, "compile_backend": "eager"}], ids=["as it is", "compiled"]
)


@as_it_is_or_compiled
def test_a_token_that_a_cell_made(options):
    following = cell(lambda token: token + 3, {"token": TOKEN}, max_batch=8)
    made = cell(Words(), {"token": TOKEN}, max_batch=8)
    model = Unfolder("words", lambda graph, request: made(token=following(token=request)), 1)
    only_the_third_fails(model, [1, 2, 5, 3], CellError, **options)


@as_it_is_or_compiled
def test_a_token_that_a_loop_carries(options):
    made = cell(Walks(last=2), {"token": TOKEN}, max_batch=8)

    def unfold(graph, request):
        return {"last": graph.loop(made, until="stop", max_steps=9, token=request).last.token}

    only_the_third_fails(Unfolder("walk", unfold, 1), [1, 0, 4, 2], CellError, **options)


def test_a_token_that_a_loop_carries_is_not_taken_for_what_stays():
    made = cell(WalksFrom(last=2), {"start": TOKEN, "token": TOKEN}, max_batch=8)

    def unfold(graph, request):
        return {"last": graph.loop(made, until="stop", max_steps=9, start=request, token=request).last.token}

    only_the_third_fails(Unfolder("walk", unfold, 1), [1, 0, 4, 2], CellError)


def test_a_token_in_a_list():
    made = cell(SumOfWords(), {"tokens": ragged(dtype=torch.int64)}, max_batch=8)
    model = Unfolder("sums", lambda graph, request: made(tokens=request), [1])
    only_the_third_fails(model, [[1, 2], [3], [2, WORDS, 1], [4, 5, 6]])


@pytest.mark.parametrize("fused", [False, True])
def test_a_token_in_a_chain_of_a_ready_made_cell(fused):
    module = cells.EmbeddingLSTMCell(WORDS, WIDTH, WIDTH)
    made = cell(module, {"token": TOKEN, "h": (WIDTH,), "c": (WIDTH,)}, max_batch=8)
    model = Unfolder("chain", lambda graph, tokens: {"h": graph.chain(made, token=tokens).last.h}, [1, 2])
    only_the_third_fails(model, [[1, 2], [3, 4, 5], [6, WORDS, 0], [2]], fused=fused)


def test_limits_are_found_where_an_input_itself_is_an_index():
    def forward(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        table = torch.zeros(5, 2)
        return table[a] + table.index_select(0, b) + nn.functional.embedding(c + 1, table) + d[:, None]

    token = rows(dtype=torch.int64)
    found = find_limits(cell(forward, dict.fromkeys("abcd", token), max_batch=4))
    assert found == {"a": (-5, 5), "b": (0, 5)}
