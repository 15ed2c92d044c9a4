"""Completion by a language model with a state of fixed size: a chain reads the prompt, and a loop goes on with it."""

from __future__ import annotations

from typing import Any

from cellrt import Graph, LoopBody, Output, State, Unfolder
from cellrt.cells.mamba2 import RecurrentModel
from cellrt.unfolders.completion import CompletionRequests


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
    states, memory = tuple(model.step.carry), model.memory
    requests = CompletionRequests(name, model.head, max_tokens)

    def unfold(graph: Graph, request: Any) -> object:
        prompt, most, asked, tops = requests.read(request, reads_all=False)
        before = graph.state(model.step) if keep else graph.zeros(model.step)
        sampling: dict[str, Any] = {}
        if memory is not None:
            sampling = {"history": graph.pages(memory, keep=keep), **asked}
        start: Any = {one: getattr(before, one) for one in states}
        if len(prompt) > 1:
            last = graph.chain(model.step, token=prompt[:-1], **start).last
            start = {one: getattr(last, one) for one in states}
            if memory is not None:
                graph.chain(memory, token=prompt[:-1], history=sampling["history"])

        def step(body: LoopBody, state: State) -> dict[str, Output]:
            read = model.step(token=state.token, **{one: getattr(state, one) for one in states})
            made = model.head(x=read.x, **({"token": state.token, **sampling} if sampling else {}))
            after = {one: getattr(read, one) for one in states}
            return {**after, **{output: getattr(made, output) for output in model.head.outputs}}

        loop = graph.loop(step, token=prompt[-1], until="stop", max_steps=most, **start)
        if keep:
            graph.keep(before, after={one: getattr(loop.last, one) for one in states})
        return {result: getattr(loop, result) for result in (*results, *tops)}

    cells = tuple(cell for cell in model if cell is not None)
    return Unfolder(name, unfold, requests.example, cells)
