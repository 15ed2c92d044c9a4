"""Completion: a language model reads a prompt and goes on with it, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cellrt import Cell, DefinitionError, Graph, Loop, LoopBody, LoopOfCells, Output, RequestError, State, Unfolder
from cellrt.cells import LayeredModel
from cellrt.numbers import as_integer
from cellrt.unfolders.generation import check_prompt

Write = Callable[[Graph, Any, int, bool], Loop | LoopOfCells]
"""Writes the graph of a prompt, the most tokens to make, and whether a session keeps it; returns what makes them."""


def complete(
    name: str,
    model: Cell | LayeredModel,
    *,
    max_tokens: int = 256,
    keep: bool = False,
    results: tuple[str, ...] = ("token", "logprob"),
) -> Unfolder:
    """A model that completes texts: ``engine.register(complete("lm", language_model(...)))``.

    A request is a prompt, tokens ``[steps]``, at least one; or a dict of ``prompt`` and ``max_tokens``, the most to be
    made. The tokens made, the end token included, are results ``[steps taken]``.

    With ``keep`` a session keeps what was read. The last token made has not been read then: the next prompt begins
    with it.

    Args:
        name: the model's name.
        model: a cell with ``token`` among its inputs and outputs, an output ``stop`` and one growing state, such as
            ``cellrt.cells.language_model`` makes; or the cells of ``cellrt.cells.layered_language_model``.
        max_tokens: the most tokens that a request makes.
        keep: whether sessions go on where they were.
        results: outputs of the cell that are results.

    Raises DefinitionError if the cell is no such cell.
    """
    write, cells = _layered(model) if isinstance(model, LayeredModel) else _plain(name, model, results)

    def unfold(graph: Graph, request: Any) -> object:
        given = request if isinstance(request, Mapping) else {"prompt": request}
        if unknown := given.keys() - {"prompt", "max_tokens"}:
            raise RequestError(f"expected prompt and max_tokens in the request, got {sorted(unknown)} too")
        check_prompt(given.get("prompt"))
        steps = given.get("max_tokens", max_tokens)
        most = as_integer(steps)
        if most is None or not 1 <= most <= max_tokens:
            raise RequestError(f"expected max_tokens from 1 to {max_tokens}, got {steps!r}")
        loop = write(graph, given["prompt"], most, keep)
        return {result: getattr(loop, result) for result in results}

    return Unfolder(name, unfold, {"prompt": [0, 0], "max_tokens": 1}, cells)


def _plain(name: str, model: Cell, results: tuple[str, ...]) -> tuple[Write, tuple[Cell, ...]]:
    """How a model of one cell is written, and the cell. Raises DefinitionError for one that says no tokens."""
    grown = [key for key, spec in model.inputs.items() if spec.appends]
    missing = {"token", "stop", *results} - set(model.outputs)
    if len(grown) != 1 or set(model.inputs) != {"token", *grown} or missing:
        raise DefinitionError(
            f"model {name!r}: expected a cell with inputs token and one growing state, and outputs token, stop and "
            f"{list(results)}; got {model!r}"
        )

    def write(graph: Graph, prompt: Any, steps: int, keep: bool) -> Loop:
        state: dict[str, Any] = {grown[0]: graph.pages(model, keep=keep)}
        return graph.loop(model, token=prompt, until="stop", max_steps=steps, **state)

    return write, (model,)


def _layered(model: LayeredModel) -> tuple[Write, tuple[Cell, ...]]:
    """How a model of a cell a layer is written, and the cells."""

    def write(graph: Graph, prompt: Any, steps: int, keep: bool) -> LoopOfCells:
        states = [graph.pages(layer, keep=keep) for layer in model.layers]
        if len(prompt) > 1:
            x = graph.chain(model.embed, token=prompt[:-1]).x
            for layer, kv in zip(model.layers, states):
                x = graph.chain(layer, x=x, kv=kv).x

        def step(body: LoopBody, state: State) -> dict[str, Output]:
            x = model.embed(token=state.token).x
            for layer, kv in zip(model.layers, states):
                x = layer(x=x, kv=kv).x
            made = model.head(x=x)
            return {name: getattr(made, name) for name in model.head.outputs}

        return graph.loop(step, token=prompt[-1], until="stop", max_steps=steps)

    return write, (model.embed, *model.layers, model.head)
