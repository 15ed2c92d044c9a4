"""Models of attention alone: sentences to embeddings, and sequences to sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellrt import Cell, Graph, RequestError, Unfolder
from cellrt.cells.transformer_stack import EncoderDecoder


def embed(name: str, encoder: Cell) -> Unfolder:
    """A model of sentences: tokens ``[steps]``, at least one -> ``embedding`` ``[hidden]``.

    ``encoder`` is a cell as ``cellrt.cells.transformer_stack.sentence_encoder`` makes it.
    """

    def unfold(graph: Graph, tokens: Any) -> object:
        if not len(tokens):
            raise RequestError("expected a sentence of at least one token")
        return {"embedding": graph.chain(encoder, token=tokens).last.output}

    return Unfolder(name, unfold, [0, 0], (encoder,))


def transduce(name: str, cells: EncoderDecoder, *, start: int, max_steps: int) -> Unfolder:
    """A model from sequences to sequences, greedy.

    A request is the source, tokens ``[steps]``, at least one; or a dict of ``source`` and ``max_steps``, the most
    tokens to be made. The tokens made, the end token included, are ``token`` and ``logprob`` ``[steps taken]``.

    Args:
        name: the model's name.
        cells: the encoder and the decoder.
        start: the token before the first.
        max_steps: the most tokens that a request makes.
    """

    def unfold(graph: Graph, request: Any) -> object:
        given = request if isinstance(request, Mapping) else {"source": request}
        steps = given.get("max_steps", max_steps)
        if given.keys() - {"source", "max_steps"} or "source" not in given or not len(given["source"]):
            raise RequestError("expected a source of at least one token, and max_steps at most")
        if not isinstance(steps, int) or not 1 <= steps <= max_steps:
            raise RequestError(f"expected max_steps from 1 to {max_steps}, got {steps!r}")
        memory = graph.pages(cells.encoder)
        graph.chain(cells.encoder, token=given["source"], memory=memory)
        first = graph.constant(start, cells.decoder.inputs["token"])
        own = graph.pages(cells.decoder)
        made = graph.loop(cells.decoder, token=first, kv=own, memory=memory, until="stop", max_steps=steps)
        return {"token": made.token, "logprob": made.logprob}

    return Unfolder(name, unfold, {"source": [0, 0], "max_steps": 1}, tuple(cells))
