"""Cells that a row makes do anything that an author's code can do, and what their models give where it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged, rows
from cellrt.engine.future import RequestFuture
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S

WIDTH, MARK = 2, 100.0
"""A row whose first number is MARK + k does what FAULTS has at place k."""


class OwnError(BaseException):
    """No Exception, and not of Python's own."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise SystemExit("never printed")

    __repr__ = __str__


class UntrueError(Exception):
    def __bool__(self) -> bool:
        raise OwnError("never asked")


class Refusing(Tensor):
    """A tensor that nothing can be done with."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise OwnError("not for you")


class UntrueList(list):
    def __bool__(self) -> bool:
        raise OwnError("never asked")


def raising(error: BaseException) -> Callable[[Tensor, Tensor], Tensor]:
    def fail(out: Tensor, given: Tensor) -> Tensor:
        raise error

    return fail


def recurse(out: Tensor, given: Tensor) -> Tensor:
    return recurse(out, given)


def spoil(out: Tensor, given: Tensor) -> Tensor:
    given.fill_(-1.0)
    raise ValueError("after writing to its input")


def shrink(out: Tensor, given: Tensor) -> Tensor:
    given.resize_(0)
    raise ValueError("after shrinking its input")


def with_gradients(out: Tensor, given: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        return out.clone().requires_grad_() * 1


FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "SystemExit": raising(SystemExit(3)),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "StopIteration": raising(StopIteration()),
    "CancelledError": raising(asyncio.CancelledError()),
    "MemoryError": raising(MemoryError()),
    "a group": raising(BaseExceptionGroup("several", [SystemExit(1), ValueError()])),
    "an error of its own": raising(OwnError("mine")),
    "an error that cannot be printed": raising(UnprintableError()),
    "an error that is neither true nor false": raising(UntrueError()),
    "a CellError that cannot be printed": raising(CellError(UnprintableError())),
    "endless recursion": recurse,
    "a written input": spoil,
    "an input of another size": shrink,
    "nothing": lambda out, given: None,
    "text": lambda out, given: "a row",
    "another shape": lambda out, given: out[:, :1],
    "another dtype": lambda out, given: out.double(),
    "too many rows": lambda out, given: torch.cat([out, out]),
    "a meta tensor": lambda out, given: out.to("meta"),
    "a sparse tensor": lambda out, given: out.to_sparse(),
    "a tensor that refuses": lambda out, given: out.as_subclass(Refusing),
    "a list that is neither true nor false": lambda out, given: UntrueList([out, out]),
    "two outputs": lambda out, given: {"h": out, "other": out},
}
HARMLESS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "with gradients": with_gradients,
    "not contiguous": lambda out, given: torch.stack([out, out], 2)[:, :, 0],
    "expanded": lambda out, given: out[:, None, :].expand(len(out), 3, WIDTH)[:, 1],
    "a parameter": lambda out, given: nn.Parameter(out.clone()),
}
PLACES = {name: MARK + k for k, name in enumerate([*HARMLESS, *FAULTS])}


class State(NamedTuple):
    h: Tensor


class Step(NamedTuple):
    h: Tensor
    n: Tensor
    stop: Tensor


def behave(out: Tensor, given: Tensor) -> object:
    """``out``, unless a row of what was given is marked otherwise."""
    made: object = out
    if out.device.type != "meta":
        for name, mark in PLACES.items():
            if bool((given[:, 0] == mark).any()):
                made = (FAULTS | HARMLESS)[name](out, given)
    return made


class Add(nn.Module):
    """``x + h / 2``."""

    def forward(self, x: Tensor, h: Tensor) -> object:
        out = behave(x + 0.5 * h, x)
        return {"h": out} if isinstance(out, Tensor) else out


class AddRuns(Add):
    def forward(self, x: Tensor, h: Tensor) -> object:
        return super().forward(x, h)

    def steps(self, batch_sizes: list[int], x: Tensor, h: Tensor) -> object:
        taken, states = 0, []
        for size in batch_sizes:
            h = x[taken : taken + size] + 0.5 * h[:size]
            states.append(h)
            taken += size
        out = behave(torch.cat(states), x)
        return {"h": out} if isinstance(out, Tensor) else out


def count(x: Tensor, h: Tensor, n: Tensor, at: Tensor) -> object:
    """A step of a loop of four: takes ``x`` at step ``at``, zeros at the others."""
    now = torch.where((n == at)[:, None], x, torch.zeros_like(x))
    out = behave(now + 0.5 * h, now)
    return Step(out, n + 1, n + 1 >= 4) if isinstance(out, Tensor) else out


def add_up(x: RaggedRows) -> object:
    """The sum of each node's rows."""
    owners = torch.repeat_interleave(torch.arange(len(x.offsets) - 1, device=x.values.device), x.offsets.diff())
    sums = torch.zeros(len(x.offsets) - 1, WIDTH, device=x.values.device).index_add(0, owners, x.values)
    out = behave(sums, x.values)
    return {"h": out} if isinstance(out, Tensor) else out


ROW, NUMBER = (WIDTH,), rows(dtype=torch.int64)


def make_models(max_batch: int = 64) -> dict[str, tuple[Unfolder, Cell]]:
    """Models by name, each with the cell that does it; a request is ``[steps, WIDTH]``."""
    both = {"x": ROW, "h": ROW}
    add, runs = cell(Add(), both, max_batch=max_batch), cell(AddRuns(), both, max_batch=max_batch)
    loop = cell(count, {**both, "n": NUMBER, "at": NUMBER}, max_batch=max_batch)
    together = cell(add_up, {"x": ragged(WIDTH)}, max_batch=max_batch)

    def decode(graph, request):
        at = int(request[:, 0].argmax())
        made = graph.loop(loop, until="stop", max_steps=9, x=request[at], at=at)
        return {"every": made.h, "last": made.last.h}

    return {
        "chain": (Unfolder("chain", lambda graph, x: {"every": graph.chain(add, x=x).h}, torch.zeros(2, WIDTH)), add),
        "runs": (Unfolder("runs", lambda graph, x: {"every": graph.chain(runs, x=x).h}, torch.zeros(2, WIDTH)), runs),
        "loop": (Unfolder("loop", decode, torch.zeros(2, WIDTH)), loop),
        "ragged": (
            Unfolder("ragged", lambda graph, x: {"sum": together(x=list(x)).h}, torch.zeros(2, WIDTH)),
            together,
        ),
    }


MODELS = make_models()


def expected(model: str, request: Tensor) -> dict[str, Tensor]:
    """What a model gives for a request without faults, computed by hand."""
    if model == "ragged":
        return {"sum": request.sum(0)}
    if model == "loop":
        at = int(request[:, 0].argmax())
        given = torch.zeros(4, WIDTH)
        given[at] = request[at]
    else:
        given = request
    states, state = [], torch.zeros(WIDTH)
    for x in given:
        state = x + 0.5 * state
        states.append(state)
    return {"every": torch.stack(states)} | ({"last": state} if model == "loop" else {})


def request_of(length: int, number: int, fault: str | None) -> Tensor:
    """A request of ``length`` steps, one of which has a fault."""
    request = torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH) / 8 + number
    if fault is not None:
        request[number % length, 0] = PLACES[fault]
    return request


def assert_ends(model: str, request: Tensor, fault: str | None, future: RequestFuture) -> None:
    """A request ends by its own fault, or as computed by hand."""
    error = future.exception(WAIT_S)
    if fault in FAULTS:
        assert type(error) is CellError, error
        assert repr(MODELS[model][1].name) in str(error)
    else:
        assert error is None, error
        wanted = expected(model, request)
        result = future.result()
        assert result.keys() == wanted.keys()
        for name, value in result.items():
            torch.testing.assert_close(value, wanted[name])
