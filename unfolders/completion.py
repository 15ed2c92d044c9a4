"""Completion: a language model reads a prompt and goes on with it, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

from cellrt import Cell, DefinitionError, Graph, Loop, LoopBody, LoopOfCells, Output, RequestError, State, Unfolder
from cellrt.cells import LayeredModel
from cellrt.cells.sampling import Asked
from cellrt.numbers import as_integer
from cellrt.unfolders._sampling import EXAMPLE, FIELDS, SamplingRequests
from cellrt.unfolders.generation import check_prompt

Write = Callable[[Graph, Any, int, bool, Mapping[str, Any]], Loop | LoopOfCells]
"""Writes the graph of a prompt, the most tokens to make, whether a session keeps it, and what else the cell is given;
returns what makes them."""
ASKED = frozenset(Asked._fields)
TOPS = ("top_token", "top_logprob")


def complete(
    name: str,
    model: Cell | LayeredModel,
    *,
    max_tokens: int = 256,
    keep: bool = False,
    results: tuple[str, ...] = ("token", "logprob"),
) -> Unfolder:
    """Return a model that completes texts: ``engine.register(complete("lm", language_model(...)))``.

    A request is a prompt, tokens ``[steps]``, at least one; or a dict of ``prompt`` and ``max_tokens``, the most to be
    made. The tokens made, the end token included, are results ``[steps taken]``.

    Of a model that samples (``language_model(..., sampling=True)``) a request may also have, each by itself:

    - ``temperature`` (0, the default: the likeliest token), ``top_k``, ``top_p``, ``min_p``, ``seed`` (default: one
      that nobody knows);
    - ``repetition_penalty`` (of all tokens so far), ``presence_penalty``, ``frequency_penalty`` (of those of the
      answer), ``logit_bias`` ({token: number});
    - ``min_tokens``, ``ignore_eos``, ``stop_tokens``: the answer ends with one of them, or with the end token;
    - ``allowed_tokens``: a list of the only tokens that are chosen, or bool ``[vocabulary]``;
    - ``answered``: how many tokens of the answer were made before, of which the prompt's last is the newest. Penalties
      of the answer and ``min_tokens`` count them;
    - ``logprobs``: this many of the likeliest tokens of each step are results ``top_token`` and ``top_logprob``
      ``[steps taken, most]``, the likeliest first; behind these are -1 and minus infinity.

    With ``keep`` a session keeps what was read. The last token made has not been read then: the next prompt begins
    with it.

    Args:
        name: the model's name.
        model: a cell with ``token`` among its inputs and outputs, an output ``stop`` and one growing state, such as
            ``cellrt.cells.language_model`` makes, or one that samples, with its inputs; or the cells of
            ``cellrt.cells.layered_language_model``.
        max_tokens: the most tokens that a request makes.
        keep: whether sessions go on where they were.
        results: outputs of the cell that are results.

    Raise DefinitionError if the cell is no such cell.
    """
    write, cells = _layered(model) if isinstance(model, LayeredModel) else _plain(name, model, results)
    is_layered = isinstance(model, LayeredModel)
    requests = CompletionRequests(name, model.head if isinstance(model, LayeredModel) else model, max_tokens)

    def unfold(graph: Graph, request: Any) -> object:
        read = requests.read(request, reads_all=not is_layered)
        loop = write(graph, read.prompt, read.max_tokens, keep, read.asked)
        return {result: getattr(loop, result) for result in (*results, *read.tops)}

    return Unfolder(name, unfold, requests.example, cells)


class Completion(NamedTuple):
    """A request, read.

    Attributes:
        prompt: its tokens.
        max_tokens: the most to be made.
        asked: the inputs of a cell that samples, by name.
        tops: results beside the usual ones.
    """

    prompt: Any
    max_tokens: int
    asked: Mapping[str, Any]
    tops: tuple[str, ...]


class CompletionRequests:
    """Reads the requests of one model.

    Args:
        name: the model's name.
        head: the cell that chooses tokens.
        max_tokens: the most that a request makes.

    Attributes:
        example: a request with all fields.
    """

    def __init__(self, name: str, head: Cell, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._sampling = SamplingRequests(name, head) if head.inputs.keys() >= ASKED else None
        self.example = {"prompt": [0, 0], "max_tokens": 1, **(EXAMPLE if self._sampling is not None else {})}

    def read(self, request: Any, *, reads_all: bool) -> Completion:
        """Return a request, read; ``reads_all``: the cell that chooses reads the whole prompt in its first step, not
        the last token alone. Raise RequestError for what is wrong.
        """
        given = request if isinstance(request, Mapping) else {"prompt": request}
        if unknown := given.keys() - self.example.keys():
            samples = " (those of sampling: language_model(..., sampling=True))" if unknown & {*FIELDS} else ""
            known = _listed(self.example.keys())
            raise RequestError(f"expected {known} in the request, got {sorted(unknown)} too{samples}")
        prompt: Any = given.get("prompt")
        check_prompt(prompt)
        steps = given.get("max_tokens", self._max_tokens)
        most = as_integer(steps)
        if most is None or not 1 <= most <= self._max_tokens:
            raise RequestError(f"expected max_tokens from 1 to {self._max_tokens}, got {steps!r}")
        if self._sampling is None:
            return Completion(prompt, most, {}, ())
        asked, told = self._sampling.read(given, len(prompt) if reads_all else 1, most)
        return Completion(prompt, most, asked, TOPS if told else ())


def _listed(names: Set[str]) -> str:
    *first, last = sorted(names, key=["prompt", "max_tokens", *FIELDS].index)
    return f"{', '.join(first)} and {last}"


def _plain(name: str, model: Cell, results: tuple[str, ...]) -> tuple[Write, tuple[Cell, ...]]:
    """Return the function that writes a model of one cell, and the cell.

    Raise DefinitionError for a cell that makes no tokens.
    """
    grown = [key for key, spec in model.inputs.items() if spec.appends]
    rest = model.inputs.keys() - {"token", *grown}
    missing = {"token", "stop", *results} - set(model.outputs)
    is_one = (not rest and len(grown) == 1) or (rest == {*ASKED, "spans"} and len(grown) == 2)
    if not is_one or "token" not in model.inputs or missing:
        raise DefinitionError(
            f"model {name!r}: expected a cell with inputs token and one growing state, and outputs token, stop and "
            f"{list(results)}; got {model!r}"
        )

    def write(graph: Graph, prompt: Any, steps: int, keep: bool, asked: Mapping[str, Any]) -> Loop:
        states: dict[str, Any] = {key: graph.pages(model, key, keep=keep) for key in grown}
        return graph.loop(model, token=prompt, until="stop", max_steps=steps, **states, **asked)

    return write, (model,)


def _layered(model: LayeredModel) -> tuple[Write, tuple[Cell, ...]]:
    """Return the function that writes a model with a cell for each layer, and the cells."""
    memory = () if model.memory is None else (model.memory,)

    def write(graph: Graph, prompt: Any, steps: int, keep: bool, asked: Mapping[str, Any]) -> LoopOfCells:
        states = [graph.pages(layer, keep=keep) for layer in model.layers]
        history = [graph.pages(cell, keep=keep) for cell in memory]
        if len(prompt) > 1:
            x = graph.chain(model.embed, token=prompt[:-1]).x
            for layer, kv in zip(model.layers, states):
                x = graph.chain(layer, x=x, kv=kv).x
            for cell, pages in zip(memory, history):
                graph.chain(cell, token=prompt[:-1], history=pages)

        def step(body: LoopBody, state: State) -> dict[str, Output]:
            x = model.embed(token=state.token).x
            for layer, kv in zip(model.layers, states):
                x = layer(x=x, kv=kv).x
            sampling: dict[str, Any] = {"token": state.token, "history": history[0], **asked} if history else {}
            made = model.head(x=x, **sampling)
            return {name: getattr(made, name) for name in model.head.outputs}

        return graph.loop(step, token=prompt[-1], until="stop", max_steps=steps)

    return write, (model.embed, *model.layers, *memory, model.head)
