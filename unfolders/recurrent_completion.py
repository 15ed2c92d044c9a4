"""Completion by a language model with a state of fixed size: a chain reads the prompt, and a loop goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellrt import Graph, LoopBody, Output, RequestError, State, Unfolder
from cellrt.cells.mamba2 import RecurrentModel
from cellrt.numbers import as_integer
from cellrt.unfolders.generation import check_prompt


def complete_recurrent(
    name: str,
    model: RecurrentModel,
    *,
    max_tokens: int = 256,
    keep: bool = False,
    results: tuple[str, ...] = ("token", "logprob"),
) -> Unfolder:
    """Return a model that completes texts, as ``complete``: requests, results and options are the same.

    Args:
        name: the model's name.
        model: cells as ``cellrt.cells.mamba2.recurrent_language_model`` makes them.
        max_tokens: the most tokens that a request makes.
        keep: whether sessions go on where they were; the last token made has not been read then.
        results: outputs of the head that are results.
    """
    states = tuple(model.step.carry)

    def step(body: LoopBody, state: State) -> dict[str, Output]:
        read = model.step(token=state.token, **{one: getattr(state, one) for one in states})
        made = model.head(x=read.x)
        after = {one: getattr(read, one) for one in states}
        return {**after, **{output: getattr(made, output) for output in model.head.outputs}}

    def unfold(graph: Graph, request: Any) -> object:
        given = request if isinstance(request, Mapping) else {"prompt": request}
        if unknown := given.keys() - {"prompt", "max_tokens"}:
            raise RequestError(f"expected prompt and max_tokens in the request, got {sorted(unknown)} too")
        prompt: Any = given.get("prompt")
        check_prompt(prompt)
        most = as_integer(given.get("max_tokens", max_tokens))
        if most is None or not 1 <= most <= max_tokens:
            raise RequestError(f"expected max_tokens from 1 to {max_tokens}, got {given['max_tokens']!r}")
        before = graph.state(model.step) if keep else graph.zeros(model.step)
        start: Any = {one: getattr(before, one) for one in states}
        if len(prompt) > 1:
            last = graph.chain(model.step, token=prompt[:-1], **start).last
            start = {one: getattr(last, one) for one in states}
        loop = graph.loop(step, token=prompt[-1], until="stop", max_steps=most, **start)
        if keep:
            graph.keep(before, after={one: getattr(loop.last, one) for one in states})
        return {result: getattr(loop, result) for result in results}

    return Unfolder(name, unfold, {"prompt": [0, 0], "max_tokens": 1}, tuple(model))
