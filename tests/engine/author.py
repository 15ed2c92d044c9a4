"""Writes random graphs. A request is a list of (operation, seed): the same request always gives the same graph."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from cellrt.graph.graph import Graph
from cellrt.graph.symbols import State
from cellrt.graph.unfolder import Unfolder
from tests.engine.zoo import WIDTH, Zoo

Operation = tuple[str, int]
Request = list[Operation]


class Author:
    """Writes one request's graph: operations read each other's outputs and leave results of every form."""

    def __init__(self, graph: Graph, zoo: Zoo) -> None:
        self.graph, self.zoo = graph, zoo
        self.random = random.Random(0)
        self.outputs: list[object] = []
        self.chains: list[object] = []
        self.results: dict[str, object] = {}

    def write(self, request: Request) -> dict[str, object]:
        """Writes all operations; returns the results."""
        for name, seed in request:
            self.random = random.Random(seed)
            OPERATIONS[name](self)
        return self.results

    def tensor(self, *shape: int) -> torch.Tensor:
        """Random numbers that depend on the seed alone."""
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randn(*shape, generator=generator)

    def row(self) -> object:
        """A row: an earlier output, a tensor of the request or a constant."""
        kind = self.random.random()
        if self.outputs and kind < 0.7:
            return self.random.choice(self.outputs)
        if kind < 0.8:
            return self.graph.constant(torch.full((WIDTH,), 0.25))
        return self.tensor(WIDTH)

    def show(self, *results: object) -> None:
        """Makes each of them a result, mostly."""
        for result in results:
            if not self.results or self.random.random() < 0.6:
                self.results[f"r{len(self.results)}"] = result

    def chain(self) -> None:
        """A chain over new rows or over another chain's, forwards or backwards."""
        steps = self.random.choice(self.chains) if self.chains and self.random.random() < 0.5 else None
        x = steps if steps is not None else self.tensor(self.random.randint(1, 7), WIDTH)
        reverse = self.random.random() < 0.4
        cell = self.random.choice([self.zoo.simple, self.zoo.gated])
        start = {"h": self.row()} if self.random.random() < 0.5 else {}
        made = self.graph.chain(cell, x=x, reverse=reverse, **start)
        self.chains.append(made.h)
        self.outputs += [made.last.h, made.h[0]]
        self.show(made.h, made.last.h, made.h[0], list(made.h[::2]))

    def listed(self) -> None:
        """A chain and a tree over lists of whatever there is."""
        x = [self.row() for _ in range(self.random.randint(1, 6))]
        chain = self.graph.chain(self.zoo.gated, x=x, reverse=self.random.random() < 0.4)
        tree = self.graph.tree([-1] + [0] * len(x), leaf=self.zoo.leaf, inner=self.zoo.child_sum, leaf_inputs={"x": x})
        self.outputs += [chain.last.h, tree.h]
        self.show(chain.h, tree.c)

    def step_by_step(self) -> None:
        """A chain written as calls of the cell, with any inputs."""
        state, cell = self.graph.zeros(self.zoo.gated), self.zoo.gated
        taken = []
        for _ in range(self.random.randint(1, 5)):
            state = cell(x=self.row(), h=state.h, c=state.c)
            taken.append(state.c)
        self.outputs.append(state.h)
        self.show(taken, state.h)

    def mesh(self) -> None:
        """Calls of cells without state on whatever there is."""
        for _ in range(self.random.randint(1, 5)):
            if self.random.random() < 0.5:
                halves = self.zoo.fork(x=self.row())
                self.outputs += [halves.left, halves.right]
                self.show(halves.right)
            else:
                self.outputs.append(self.zoo.average(a=self.row(), b=self.row()).output)
                self.show(self.outputs[-1])

    def tree(self) -> None:
        """A tree from random parents, with as many children as it happens to get."""
        parents = [-1] + [self.random.randrange(k) for k in range(1, self.random.randint(1, 9))]
        leaves = sum(k not in parents for k in range(len(parents)))
        inputs = self.tensor(leaves, WIDTH) if self.random.random() < 0.7 else self.row()
        root = self.graph.tree(parents, leaf=self.zoo.leaf, inner=self.zoo.child_sum, leaf_inputs={"x": inputs})
        self.outputs += [root.h, root.c]
        self.show(root.h, root.c)

    def binary_tree(self) -> None:
        """A tree in which every inner node has two children, in a shuffled order of nodes."""
        parents, open_nodes = [-1], [0]
        for _ in range(self.random.randint(0, 4)):
            parent = open_nodes.pop(self.random.randrange(len(open_nodes)))
            open_nodes += [len(parents), len(parents) + 1]
            parents += [parent, parent]
        numbers = list(range(len(parents)))
        self.random.shuffle(numbers)
        shuffled = [0] * len(parents)
        for node, parent in enumerate(parents):
            shuffled[numbers[node]] = -1 if parent < 0 else numbers[parent]
        inputs = self.tensor(len(open_nodes), WIDTH)
        root = self.graph.tree(shuffled, leaf=self.zoo.leaf, inner=self.zoo.join, leaf_inputs={"x": inputs})
        self.outputs.append(root.h)
        self.show(root.h)

    def gather(self) -> None:
        """One node that reads any number of others, none included."""
        count = self.random.randint(0, 5)
        rows = [self.row() for _ in range(count)]
        made = self.zoo.child_sum(h=rows, c=rows[::-1])
        self.outputs.append(made.h)
        self.show(made.c)

    def loop(self) -> None:
        """A loop whose end its own output decides, or that runs to its limit; others read its last step, or all."""
        made = self.graph.loop(
            self.zoo.decoder,
            max_steps=self.random.randint(1, 9),
            until=self.random.choice(["stop", None]),
            token=self.random.randrange(11),
            h=self.row(),
            mood=self.row(),
        )
        self.outputs.append(made.last.h)
        if self.random.random() < 0.5:
            pooled = self.zoo.child_sum(h=made.h, c=made.h)
            self.outputs.append(pooled.h)
            self.show(pooled.h)
        self.show(made.token, made.last.token, made.h, made.last.h, made.last.stop)
        if self.random.random() < 0.5:
            self.outputs.append(self.zoo.embed(token=made.last.token).output)
            self.show(self.outputs[-1])

    def body(self) -> None:
        """A loop of several cells, which read each other at the same step and the one before."""
        mood, passes_on, until = self.row(), self.random.random() < 0.5, self.random.choice(["stop", None])

        def step(body: object, state: State) -> dict[str, object]:
            told = self.zoo.decoder(token=state.token, h=state.h, mood=state.mood)
            lower = self.zoo.gated(x=self.zoo.embed(token=told.token).output)
            upper = self.zoo.simple(x=lower.c, h=state.upper)
            mixed = self.zoo.average(a=upper.h, b=state.h)
            made = {"token": told.token, "upper": upper.h, "stop": told.stop, "lower": lower.h, "mood": state.mood}
            return {**made, "h": mixed if passes_on else told.h}

        steps = self.random.randint(1, 7)
        given = {"token": self.random.randrange(11), "h": self.row(), "upper": self.row(), "mood": mood}
        made = self.graph.loop(step, max_steps=steps, until=until, **given)
        self.outputs += [made.last.h, made.last.lower]
        if self.random.random() < 0.5:
            self.outputs.append(self.zoo.child_sum(h=made.upper, c=made.lower).h)
            self.show(self.outputs[-1])
        self.show(made.token, made.last.token, made.h, made.last.upper, made.lower, made.last.stop)


OPERATIONS: dict[str, Callable[[Author], None]] = {
    "chain": Author.chain,
    "listed": Author.listed,
    "step_by_step": Author.step_by_step,
    "mesh": Author.mesh,
    "tree": Author.tree,
    "binary_tree": Author.binary_tree,
    "gather": Author.gather,
    "loop": Author.loop,
    "body": Author.body,
}


def make_unfolder(zoo: Zoo, name: str = "random") -> Unfolder:
    """A model that can write every random graph of these cells."""
    example: Request = [(operation, 3) for operation in OPERATIONS]
    return Unfolder(name, lambda graph, request: Author(graph, zoo).write(request), example, tuple(zoo))
