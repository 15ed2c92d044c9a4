"""Encoder-decoders (Sutskever, Vinyals and Le 2014; BatchMaker section 2.7.4), with or without attention."""

from __future__ import annotations

from typing import Any

import torch

from cellrt.definition.cell import Cell
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.graph import Graph
from cellrt.graph.symbols import Chain
from cellrt.graph.unfolder import Unfolder, unfold


def encoder_decoder(
    name: str,
    *,
    encoder: Cell,
    decoder: Cell,
    start: int,
    max_steps: int,
    memory: str = "h",
    keys: Cell | None = None,
) -> Unfolder:
    """A model: an encoder over the source, and a decoder that feeds its own tokens back until it says stop.

    A request is `{"source": int64 [n]}`, n >= 1, and may have `"max_steps"` of its own, an int from 1 to that of the
    model. The result is `tokens` int64 `[1 to max_steps]`, the end token included.

    Args:
        name: the model's name.
        encoder: a cell with one input that is not carried, a token.
        decoder: a cell with `token` and the output `stop`, such as `EmbeddingGRUDecoder` or `AttentionGRUDecoder`. It
            starts from the encoder's last states by name; other states start with zeros. If it has the ragged input
            `memory`, that is the encoder's output `memory` of every step.
        start: the token before the first.
        max_steps: the most steps of the decoder.
        memory: the encoder's output that is attended to.
        keys: a cell of `AttentionKeys`, if the decoder has a ragged input `keys`.

    Raises DefinitionError if cells and inputs do not fit.
    """
    source = source_input(name, encoder)
    check_attention(name, encoder, decoder, memory, keys)
    if "stop" not in decoder.outputs or "token" not in decoder.carry:
        raise DefinitionError(f"model {name!r}: {decoder!r} must have an output 'stop' and carry 'token'")
    shared = [state for state in decoder.carry if encoder.outputs.get(state) == decoder.inputs[state]]

    @unfold(name, example={"source": torch.zeros(2, dtype=torch.int64)})
    def model(graph: Graph, request: dict[str, Any]) -> object:
        limit = step_limit(request, max_steps)
        encoded = graph.chain(encoder, **{source: request["source"]})
        given: dict[str, Any] = {state: getattr(encoded.last, state) for state in shared}
        given |= attention_inputs(graph, encoded, decoder, memory, keys)
        decoded = graph.loop(decoder, until="stop", max_steps=limit, token=graph.constant(start), **given)
        return {"tokens": decoded.token}

    return model


def source_input(name: str, encoder: Cell) -> str:
    """The encoder's one input that is not carried. Raises DefinitionError if there is another number of them."""
    found = [each for each in encoder.inputs if each not in encoder.carry]
    if len(found) != 1:
        raise DefinitionError(f"model {name!r}: the encoder must have one input that is not carried, got {found}")
    return found[0]


def check_attention(name: str, encoder: Cell, decoder: Cell, memory: str, keys: Cell | None) -> None:
    """Raises DefinitionError if the ragged inputs of a decoder are not those that the encoder and `keys` give."""
    wanted = [each for each, spec in decoder.inputs.items() if spec.ragged]
    given = (["memory"] if "memory" in wanted else []) + (["keys"] if keys is not None else [])
    if sorted(wanted) != sorted(given):
        raise DefinitionError(f"model {name!r}: the decoder's ragged inputs are {wanted}, but there are {given}")
    if wanted and memory not in encoder.outputs:
        raise DefinitionError(f"model {name!r}: {encoder!r} has no output {memory!r} to attend to")
    if keys is not None and (len(keys.inputs), len(keys.outputs)) != (1, 1):
        raise DefinitionError(f"model {name!r}: {keys!r} must have one input and one output")


def attention_inputs(graph: Graph, encoded: Chain, decoder: Cell, memory: str, keys: Cell | None) -> dict[str, object]:
    """The decoder's ragged inputs: the encoder's outputs, and a key for each of them."""
    if not any(spec.ragged for spec in decoder.inputs.values()):
        return {}
    outputs = getattr(encoded, memory)
    if keys is None:
        return {"memory": outputs}
    made = graph.chain(keys, **{next(iter(keys.inputs)): outputs})
    return {"memory": outputs, "keys": getattr(made, next(iter(keys.outputs)))}


def step_limit(request: dict[str, Any], most: int) -> int:
    """The most steps of a request's decoder. Raises RequestError if it asks for too many."""
    limit = request.get("max_steps", most)
    if not isinstance(limit, int) or not 1 <= limit <= most:
        raise RequestError(f"max_steps: expected an int from 1 to {most}, got {limit!r}")
    return limit
