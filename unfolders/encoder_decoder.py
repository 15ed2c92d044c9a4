"""Encoder-decoders (Sutskever, Vinyals and Le 2014; BatchMaker section 2.7.4), with or without attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cellrt import Cell, DefinitionError, Graph, RequestError, Unfolder
from cellrt.cells import Bridge
from cellrt.numbers import as_integer
from cellrt.unfolders._encoder import Encoder, Layers, reader_of, take

SOURCE, MAX_STEPS = "source", "max_steps"
"""Keys of a request."""


def encoder_decoder(
    name: str,
    *,
    encoder: Layers,
    decoder: Cell,
    start: int,
    max_steps: int,
    bridge: Cell | Bridge | None = None,
    memory: str = "h",
    keys: Cell | None = None,
    results: Sequence[str] = (),
) -> Unfolder:
    """Return a model: an encoder over the source, and a decoder that feeds its own tokens back until it says stop.

    A request is ``{"source": [n, *shape]}``, n >= 1, what the encoder reads (tokens are int64 ``[n]``). It may have
    ``"max_steps"`` of its own, an int from 1 to that of the model, and has the decoder's other inputs by name, such as
    ``"seed"``. The result is ``tokens`` int64 ``[1 to max_steps]``, the end token included.

    Args:
        name: the model's name.
        encoder: layers (see ``from_torch``), a cell or a torch module: any number of layers, in one or both directions.
        decoder: a cell with ``token`` and the output ``stop``, such as ``EmbeddingGRUDecoder`` or
            ``AttentionGRUDecoder``. If it has the ragged input ``memory``, that is the encoder's output ``memory`` of
            every step.
        start: the token before the first.
        max_steps: the most steps of the decoder.
        bridge: how the encoder's last states become the decoder's first ones: a ``Bridge``, or a cell whose inputs have
            the names that ``cellrt/cells/bridge.py`` tells. None: by name, of several layers a row for each, of two
            directions side by side; states that only the decoder has, such as ``attended``, start with zeros.
        memory: the output of the encoder's top layer that is attended to, of two directions side by side.
        keys: a cell of ``AttentionKeys``, if the decoder has a ragged input ``keys``.
        results: further outputs of the decoder that are results, each ``[1 to max_steps, *shape]`` by its name: such as
            ``logprob`` and ``logits`` of a decoder made with ``return_logprobs=True`` and ``return_logits=True``.

    Raise DefinitionError if cells do not fit, naming the model, the cell, what was expected and what came.
    """
    results = [results] if isinstance(results, str) else list(results)
    check_decoder(name, decoder, "stop", results, max_steps, feeds_tokens=True)
    encoding = Encoder(name, encoder, reader_of(decoder), bridge=bridge, memory=memory, keys=keys)
    if encoding.gives_nothing:
        raise DefinitionError(f"model {name!r}: the decoder {decoder!r} reads nothing of the encoder")
    given = {"token", *encoding.states, *decoder.carry}
    others = {key: spec for key, spec in decoder.inputs.items() if key not in given and not spec.ragged}

    def unfold(graph: Graph, request: Mapping[str, Any]) -> object:
        wanted = take(request, SOURCE, (MAX_STEPS, *others))
        limit = step_limit(wanted.pop(MAX_STEPS, max_steps), max_steps)
        inputs = {**encoding(graph, wanted.pop(SOURCE)), **wanted}
        decoded = graph.loop(decoder, until="stop", max_steps=limit, token=graph.constant(start), **inputs)
        return {"tokens": decoded.token, **{result: getattr(decoded, result) for result in results}}

    def key(request: Mapping[str, Any]) -> object:
        limit = request.get(MAX_STEPS)
        return len(request[SOURCE]), type(limit), limit, *request

    example = {SOURCE: encoding.stack.example(), MAX_STEPS: max_steps}
    example |= {key: torch.zeros(spec.shape, dtype=spec.dtype, device="cpu") for key, spec in others.items()}
    return Unfolder(name, unfold, example, (*encoding.cells, decoder), key)


def check_decoder(
    name: str, decoder: object, until: str | None, results: Sequence[str], max_steps: int, *, feeds_tokens: bool
) -> None:
    """Raise DefinitionError unless this is a cell with the outputs asked for, which carries its token if it must."""
    if not isinstance(decoder, Cell):
        raise DefinitionError(
            f"model {name!r}: expected a cell as decoder, such as cellrt.cell(module, module.input_specs()), got "
            f"{type(decoder).__name__}"
        )
    check_max_steps(name, max_steps)
    if until is not None and until not in decoder.outputs:
        raise DefinitionError(f"model {name!r}: {decoder!r} must have the output {until!r}, which ends a sequence")
    if feeds_tokens and "token" not in decoder.carry:
        raise DefinitionError(f"model {name!r}: {decoder!r} must carry 'token', an input that is an output too")
    unknown = [result for result in results if result not in decoder.outputs]
    if unknown:
        asked = {"logits": "return_logits", "logprob": "return_logprobs"}
        hints = [f"{option}=True" for result, option in asked.items() if result in unknown]
        hint = f"; decoders of cellrt.cells have them if made with {' and '.join(hints)}" if hints else ""
        raise DefinitionError(
            f"model {name!r}: {unknown} are not outputs of the decoder {decoder.name!r}, which has "
            f"{list(decoder.outputs)}{hint}"
        )


def check_max_steps(name: str, max_steps: object) -> None:
    """Raise DefinitionError unless a sequence may have a step."""
    most = as_integer(max_steps)
    if most is None or most < 1:
        raise DefinitionError(f"model {name!r}: expected max_steps as an int of at least 1, got {max_steps!r}")


def step_limit(limit: object, most: int) -> int:
    """Return the most steps of a request's decoder. Raise RequestError if it asks for too many."""
    number = as_integer(limit)
    if number is None or not 1 <= number <= most:
        raise RequestError(f"max_steps: expected an int from 1 to {most}, got {limit!r}")
    return number
