"""Generation: a model whose decoder feeds its own tokens back until it stops, after a prompt or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cellrt import Cell, DefinitionError, Graph, RequestError, Unfolder
from cellrt.cells import Bridge
from cellrt.unfolders._encoder import Encoder, Layers, reader_of, stack_of
from cellrt.unfolders.encoder_decoder import check_decoder

PROMPT = "prompt"


def generate(
    name: str,
    decoder: Cell,
    *,
    max_steps: int,
    prompt: Layers | None = None,
    start: int | None = None,
    bridge: Cell | Bridge | None = None,
    until: str | None = "stop",
    results: Sequence[str] = ("token",),
    example: Any = None,
) -> Unfolder:
    """Return a model that decodes: ``engine.register(generate("g2p", decoder, max_steps=20, prompt=encoder,
    start=2))``.

    A request is a dict of the decoder's inputs by name, each one row; carried ones that it leaves out are zeros. With a
    prompt it has also ``prompt``, the ``[steps, *shape]`` that the prompt's layers read; a request that is no dict is
    the prompt alone. Each result is ``[steps taken, *shape]``: ``token`` int64 ``[1 to max_steps]``, the stop token
    included.

    Args:
        name: the model's name.
        decoder: such as ``EmbeddingLSTMDecoder``: a cell with ``token`` among its inputs and outputs.
        max_steps: the most steps.
        prompt: layers with whose last states the decoder starts. Layers in both directions need ``start``.
        start: the token before the first. None: the request's ``token``, or, with a prompt of tokens, its last one; the
            layers then read those before it.
        bridge: how the prompt's last states become the decoder's first ones; see ``encoder_decoder``.
        until: the output that ends the sequence.
        results: outputs of the decoder that are results: beside ``token`` such as ``logprob`` and ``logits`` of a
            decoder made with ``return_logprobs=True`` and ``return_logits=True``.
        example: a request for the check at registration; default: zeros, a prompt of two steps.

    Raise DefinitionError if the prompt does not fit the decoder, naming the model, the cell, what was expected and
    what came.
    """
    results = [results] if isinstance(results, str) else list(results)
    feeds_tokens = start is not None or prompt is not None
    check_decoder(name, decoder, until, results, max_steps, feeds_tokens=feeds_tokens)
    encoding = None if prompt is None else _encoding(name, prompt, decoder, bridge, start)
    if encoding is None and bridge is not None:
        raise DefinitionError(f"model {name!r}: a bridge leads from a prompt's layers, but there is no prompt=")

    def unfold(graph: Graph, request: Any) -> object:
        given = dict(request) if isinstance(request, Mapping) else {PROMPT: request}
        if start is not None:
            given.setdefault("token", graph.constant(start))
        if encoding is not None:
            if PROMPT not in given:
                raise RequestError(f"expected {PROMPT!r} in the request, got {list(given)}")
            steps = given.pop(PROMPT)
            if "token" not in given:
                check_prompt(steps)
                steps, given["token"] = steps[:-1], steps[-1]
            given = {**(encoding(graph, steps) if len(steps) else {}), **given}
        if unknown := [key for key in given if key not in decoder.inputs]:
            raise RequestError(f"unknown {unknown} in the request; the decoder has inputs {list(decoder.inputs)}")
        loop = graph.loop(decoder, until=until, max_steps=max_steps, **given)
        return {result: getattr(loop, result) for result in results}

    if example is None:
        example = _example(decoder, encoding)
    is_cut = encoding is not None and start is None  # the last token of the prompt is none of the request's own tensors
    cells = (decoder,) if encoding is None else (*encoding.cells, decoder)
    return Unfolder(name, unfold, example, cells, None if is_cut else _key)


def check_prompt(steps: Any) -> None:
    """Raise RequestError unless there is a last token."""
    try:
        num_steps = len(steps)
    except TypeError:
        raise RequestError(f"expected a prompt of at least one token, got {steps!r:.80}") from None
    if not num_steps:
        raise RequestError("expected a prompt of at least one token, got none")


def _key(request: Any) -> object:
    """Return the key of a request: the lengths and names that its graph depends on, unless its prompt is cut."""
    if not isinstance(request, Mapping):
        return len(request)
    return len(request[PROMPT]) if PROMPT in request else 0, *request


def _encoding(name: str, prompt: Layers, decoder: Cell, bridge: Cell | Bridge | None, start: int | None) -> Encoder:
    """Return the layers of a prompt. Raise DefinitionError if the decoder cannot go on where they end."""
    stack = stack_of(name, prompt)
    if start is None and any(layer.reverse is not None for layer in stack.layers):
        raise DefinitionError(
            f"model {name!r}: a prompt whose layers run in both directions is read as a whole, so the decoder cannot "
            "go on from its last token: give start=, the token before the first, which makes the prompt a source; or "
            "use layers in one direction"
        )
    encoding = Encoder(name, stack, reader_of(decoder), bridge=bridge)
    if encoding.gives_nothing:
        raise DefinitionError(f"model {name!r}: the decoder {decoder!r} reads nothing of the prompt")
    return encoding


def _example(decoder: Cell, encoding: Encoder | None) -> dict[str, Any]:
    from_encoder = () if encoding is None else encoding.states
    given = {
        name: torch.zeros((2, *spec.shape) if spec.ragged else spec.shape, dtype=spec.dtype, device="cpu")
        for name, spec in decoder.inputs.items()
        if encoding is None or name not in (*decoder.carry, *from_encoder)
    }
    return given if encoding is None else {PROMPT: encoding.stack.example(), **given}
