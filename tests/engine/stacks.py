"""Random models of several cells whose rows have different widths: what they keep, show and read is drawn, too.

Rows of different widths have the same numbers, so whatever takes a row for one of another kind reads or frees a
stranger's.
"""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.graph import Graph
from cellrt.graph.symbols import Output
from cellrt.graph.unfolder import Unfolder

WIDTHS = (2, 3, 5)
INPUT = 3
RAISE = 1001.0
"""A request's row that begins with it makes the cell that reads it raise."""
TOKENS = 11


class RaisedError(Exception):
    """What a cell raises that was told to."""


class Shown(NamedTuple):
    y: Tensor


class Stepped(NamedTuple):
    h: Tensor
    c: Tensor
    y: Tensor


class Made(NamedTuple):
    h: Tensor
    token: Tensor
    y: Tensor
    stop: Tensor


def weights(*shape: int) -> nn.Parameter:
    """Numbers that depend on the shape alone."""
    generator = torch.Generator().manual_seed(sum(37**k * size for k, size in enumerate(shape)))
    return nn.Parameter(torch.randn(*shape, generator=generator) / shape[0] ** 0.5, requires_grad=False)


class Front(nn.Module):
    """A layer without state; it raises where it is told to."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.mix = weights(given, width)

    def forward(self, x: Tensor) -> Shown:
        if x.device.type != "meta" and (x[:, 0] == RAISE).any():
            raise RaisedError
        return Shown(torch.tanh(x @ self.mix))


class Recurrent(nn.Module):
    """Carries two states of two widths, and shows a third."""

    def __init__(self, given: int, h: int, c: int, y: int) -> None:
        super().__init__()
        self.from_x, self.from_h, self.from_c = weights(given, c), weights(h, c), weights(c, h)
        self.shown = weights(c, y)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Stepped:
        c = 0.5 * c + torch.tanh(x @ self.from_x + h @ self.from_h)
        return Stepped(torch.tanh(c @ self.from_c), c, torch.sin(c @ self.shown))


class Generator(nn.Module):
    """A loop's step: counts by exact arithmetic and stops at 0, while its state goes on from what is shown."""

    def __init__(self, mood: int, h: int, y: int) -> None:
        super().__init__()
        self.from_mood, self.from_h, self.shown = weights(mood, h), weights(h, h), weights(h, y)

    def forward(self, mood: Tensor, h: Tensor, token: Tensor) -> Made:
        token = (token * 7 + 3) % TOKENS
        h = torch.tanh(h @ self.from_h + mood @ self.from_mood + 0.1 * token[:, None])
        return Made(h, token, torch.cos(h @ self.shown), token == 0)


@functools.cache
def front(given: int, width: int) -> Cell:
    """The cell of these widths: the same for all models."""
    return cell(Front(given, width), {"x": (given,)}, name=f"front {given} {width}", max_batch=4)


@functools.cache
def recurrent(given: int, h: int, c: int, y: int) -> Cell:
    """See ``front``."""
    return cell(
        Recurrent(given, h, c, y),
        {"x": (given,), "h": (h,), "c": (c,)},
        name=f"recurrent {given}{h}{c}{y}",
        max_batch=8,
    )


@functools.cache
def generator(mood: int, h: int, y: int) -> Cell:
    """See ``front``."""
    inputs = {"mood": (mood,), "h": (h,), "token": rows(dtype=torch.int64)}
    return cell(Generator(mood, h, y), inputs, name=f"generator {mood}{h}{y}", max_batch=3)


class Author:
    """Writes the graph of one request by a plan that is the same for all of a model."""

    def __init__(self, graph: Graph, x: Tensor, seed: int) -> None:
        self.graph, self.draw = graph, random.Random(seed)
        self.x: Any = x
        self.given, self.width = x, INPUT
        self.num_steps = len(x)
        self.keeps = False
        self.results: dict[str, object] = {}

    def write(self) -> dict[str, object]:
        """Layer on layer, each of another width; one at least keeps its state, and one at least is shown."""
        for _ in range(self.draw.randint(1, 3)):
            self.draw.choice([self.plain, self.chain, self.chain, self.by_hand])()
        if self.draw.random() < 0.4:
            self.loop()
        if not self.keeps:
            self.chain(keep=True)
        if not self.results:
            self.results["x"] = self.x
        return self.results

    def show(self, made: Any) -> None:
        """Makes some of a sequence a result: all steps, the last, a few, or nothing."""
        name = f"r{len(self.results)}"
        form = self.draw.choice(["all", "last", "some", "none"])
        if form != "none":
            picked = {"all": made, "last": made[-1], "some": list(made[::2])}[form]
            self.results[name] = picked

    def new_width(self) -> int:
        return self.draw.choice(WIDTHS)

    def plain(self) -> None:
        """A layer without state."""
        width = self.new_width()
        made = self.graph.chain(front(self.width, width), x=self.x)
        self.x, self.width = made.y, width
        self.show(made.y)

    def chain(self, keep: bool | tuple[str, ...] | None = None) -> None:
        """A layer with state, of which the session keeps all, some or nothing; what begins it is drawn."""
        h, c, y = self.new_width(), self.new_width(), self.new_width()
        choices: list[bool | tuple[str, ...]] = [False, True, True, ("h",), ("c",)]
        keep = self.draw.choice(choices) if keep is None else keep
        start: dict[str, Any] = {}
        if self.draw.random() < 0.3:
            start["h"] = front(INPUT, h)(x=self.given[0]).y
        if self.draw.random() < 0.3:
            start["c"] = self.graph.constant(torch.full((c,), 0.5))
        made = self.graph.chain(recurrent(self.width, h, c, y), x=self.x, keep=keep, **start)
        self.keeps = self.keeps or bool(keep)
        self.x, self.width = (made.y, y) if self.draw.random() < 0.7 else (made.h, h)
        for shown in (made.h, made.c, made.y):
            self.show(shown)

    def by_hand(self) -> None:
        """The same in calls of the cell, step by step."""
        h, c, y = self.new_width(), self.new_width(), self.new_width()
        made = recurrent(self.width, h, c, y)
        before = self.graph.state(made)
        state: Any = before
        steps: list[Output] = []
        for k in range(self.num_steps):
            state = made(x=self.x[k], h=state.h, c=state.c)
            steps.append(state.y)
        self.graph.keep(before, state)
        self.keeps = True
        self.x, self.width = steps, y
        self.show(steps)

    def loop(self) -> None:
        """Steps until one says stop, from the last row on."""
        h, y = self.new_width(), self.new_width()
        choices: list[bool | tuple[str, ...]] = [False, True, ("h",)]
        keep = self.draw.choice(choices)
        made = self.graph.loop(
            generator(self.width, h, y),
            max_steps=self.draw.randint(1, 6),
            until=self.draw.choice(["stop", None]),
            keep=keep,
            mood=self.x[-1],
            token=3,
        )
        self.keeps = self.keeps or bool(keep)
        if self.draw.random() < 0.5:
            width = self.new_width()
            self.results["read"] = front(h, width)(x=made.last.h).y
        self.results["steps"] = made.y
        self.results["last"] = made.last.h if self.draw.random() < 0.5 else made.last.token


def make_model(name: str, seed: int) -> Unfolder:
    """A model; its requests are ``[steps, INPUT]``, of any number of steps."""

    def unfold(graph: Graph, x: Tensor) -> dict[str, object]:
        return Author(graph, x, seed).write()

    return Unfolder(name, unfold, torch.zeros(2, INPUT))


def __getattr__(name: str) -> Unfolder:
    """The model ``model_7`` is made of seed 7: an engine in another process takes it by its name."""
    kind, _, seed = name.partition("_")
    if kind != "model" or not seed.isdecimal():
        raise AttributeError(name)
    return make_model(name, int(seed))
