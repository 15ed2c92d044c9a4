"""Models of attention alone: sentences to embeddings, and sequences to sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellrt import Cell, DefinitionError, Graph, GrowingState, RequestError, Unfolder, cell
from cellrt.cells.beam import BeamEnd
from cellrt.cells.transformer_beams import transformer_beam_step
from cellrt.cells.transformer_stack import EncoderDecoder
from cellrt.numbers import as_integer

EXAMPLE = {"source": [0, 0], "max_steps": 1}


def embed(name: str, encoder: Cell) -> Unfolder:
    """Return a model of sentences: tokens ``[steps]``, at least one -> ``embedding`` ``[hidden]``.

    ``encoder`` is a cell as ``cellrt.cells.transformer_stack.sentence_encoder`` makes it.
    """

    def unfold(graph: Graph, tokens: Any) -> object:
        if not len(tokens):
            raise RequestError("expected a sentence of at least one token")
        return {"embedding": graph.chain(encoder, token=tokens).last.output}

    return Unfolder(name, unfold, [0, 0], (encoder,))


def transduce(name: str, cells: EncoderDecoder, *, start: int, max_steps: int) -> Unfolder:
    """Return a model from sequences to sequences, greedy.

    A request is the source, tokens ``[steps]``, at least one; or a dict of ``source`` and ``max_steps``, the most
    tokens to be made. The tokens made, the end token included, are ``token`` and ``logprob`` ``[steps taken]``.

    Args:
        name: the model's name.
        cells: the encoder and the decoder.
        start: the token before the first.
        max_steps: the most tokens that a request makes.

    Raise DefinitionError for more steps than the decoder has positions for.
    """
    _check_steps(name, cells.decoder, max_steps)

    def unfold(graph: Graph, request: Any) -> object:
        memory, steps = _read(graph, cells.encoder, request, max_steps)
        first = graph.constant(start, cells.decoder.inputs["token"])
        own = graph.pages(cells.decoder)
        made = graph.loop(cells.decoder, token=first, kv=own, memory=memory, until="stop", max_steps=steps)
        return {"token": made.token, "logprob": made.logprob}

    return Unfolder(name, unfold, EXAMPLE, tuple(cells))


def transduce_with_beams(
    name: str,
    cells: EncoderDecoder,
    *,
    start: int,
    max_steps: int,
    beams: int = 4,
    best: int = 1,
    length_penalty: float = 0.0,
) -> Unfolder:
    """Return a model from sequences to sequences with beam search, each step of which is one row (``cells/beam.py``).

    Requests are those of ``transduce``. Results are those of ``beam_search``, the best sequence first. ``tokens`` int64
    ``[best, max_steps]`` are filled up with the end token. ``length`` int64 ``[best]`` counts tokens with the end
    token, if the sequence was not cut at ``max_steps``. ``score`` float32 ``[best]`` is the log-probability under the
    length penalty; minus infinity if there are fewer sequences.

    Args:
        name: the model's name.
        cells: the encoder and the decoder, as for ``transduce``. A step has as many requests at most as one of the
            decoder, and ``beams`` times as many hypotheses.
        start: the token before the first.
        max_steps: the most tokens of a sequence.
        beams, best, length_penalty: hypotheses kept, sequences returned, and 0 or Wu et al.'s exponent.

    Raise DefinitionError for sizes that do not fit.
    """
    search = transformer_beam_step(
        cells.decoder, beams=beams, max_steps=max_steps, best=best, length_penalty=length_penalty
    )
    step = cell(
        search,
        search.input_specs(),
        name=f"{name} beam step",
        max_batch=cells.decoder.max_batch,
        max_batch_rows=cells.decoder.max_batch_rows,
    )
    finish = cell(
        BeamEnd(best, search.end_token, length_penalty),
        {key: step.outputs[key] for key in ("tokens", "score", "length")},
        name=f"{name} beam end",
    )

    def unfold(graph: Graph, request: Any) -> object:
        memory, steps = _read(graph, cells.encoder, request, max_steps)
        token, score = graph.constant(search.start_token(start)), graph.constant(search.start_score())
        own = graph.pages(step)
        made = graph.loop(step, token=token, score=score, kv=own, memory=memory, until="stop", max_steps=steps).last
        return graph.call(finish, tokens=made.tokens, score=made.score, length=made.length)

    return Unfolder(name, unfold, EXAMPLE, (cells.encoder, step, finish))


def _check_steps(name: str, decoder: Cell, max_steps: int) -> None:
    longest = getattr(decoder.module, "longest_span", max_steps)
    if max_steps > longest:
        raise DefinitionError(f"model {name!r}: max_steps={max_steps}; the decoder has positions for {longest}")


def _read(graph: Graph, encoder: Cell, request: Any, max_steps: int) -> tuple[GrowingState, int]:
    """Add the encoder over a request's source: what it appends, and the most steps that the request may take."""
    given = request if isinstance(request, Mapping) else {"source": request}
    steps = given.get("max_steps", max_steps)
    if given.keys() - {"source", "max_steps"} or "source" not in given or not len(given["source"]):
        raise RequestError("expected a source of at least one token, and max_steps at most")
    most = as_integer(steps)
    if most is None or not 1 <= most <= max_steps:
        raise RequestError(f"expected max_steps from 1 to {max_steps}, got {steps!r}")
    memory = graph.pages(encoder)
    graph.chain(encoder, token=given["source"], memory=memory)
    return memory, most
