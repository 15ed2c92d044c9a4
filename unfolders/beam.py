"""Encoder-decoders with beam search: see ``cellrt/cells/beam.py`` for what is searched and how ties are broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cellrt import Cell, DefinitionError, Graph, Unfolder, cell
from cellrt.cells import Bridge
from cellrt.cells.beam import BeamEnd, BeamStart, BeamStep
from cellrt.cells.output import NEVER
from cellrt.unfolders._encoder import Encoder, Layers, Reader, take
from cellrt.unfolders.encoder_decoder import MAX_STEPS, SOURCE, check_max_steps, step_limit


def beam_search(
    name: str,
    *,
    encoder: Layers,
    decoder: nn.Module,
    start: int,
    end: int,
    max_steps: int,
    inputs: Mapping[str, object] | None = None,
    beams: int = 4,
    best: int = 1,
    length_penalty: float = 0.0,
    bridge: Cell | Bridge | None = None,
    memory: str = "h",
    keys: Cell | None = None,
    max_batch: int = 128,
) -> Unfolder:
    """Return a model: an encoder over the source, and a beam search with a decoder, each step of which is one row.

    A request is ``{"source": [n, *shape]}``, n >= 1, what the encoder reads (tokens are int64 ``[n]``), and may have
    ``"max_steps"`` of its own, an int from 1 to that of the model. The best sequence comes first in all results.
    ``tokens`` int64 ``[best, max_steps]`` are filled up with the end token. ``length`` int64 ``[best]`` counts tokens
    with the end token, if the sequence was not cut at ``max_steps``. ``score`` float32 ``[best]`` is the
    log-probability under the length penalty; minus infinity if there are fewer sequences.

    Args:
        name: the model's name.
        encoder, bridge, memory, keys: as in ``encoder_decoder``.
        decoder: what ``BeamStep`` takes as scorer, such as ``EmbeddingGRUDecoder`` or ``AttentionGRUDecoder``: the
            module, not a cell of it.
        start, end: the tokens before the first and after the last.
        max_steps: the most tokens of a sequence.
        inputs: the decoder's inputs, as for ``cellrt.cell``; default: its ``input_specs()``.
        beams, best, length_penalty: hypotheses kept, sequences returned, and 0 or Wu et al.'s exponent.
        max_batch: most requests in a step, which has ``beams`` times as many hypotheses.

    Raise DefinitionError if cells and inputs do not fit, naming the model, the cell, what was expected and what came.
    """
    check_max_steps(name, max_steps)
    search = BeamStep(
        decoder,
        _inputs_of(name, decoder, inputs, end),
        beams=beams,
        end_token=end,
        max_steps=max_steps,
        best=best,
        length_penalty=length_penalty,
    )
    step = cell(search, search.input_specs(), name=f"{name} beam step", max_batch=max_batch)
    reader = Reader(type(decoder).__name__, search.others, search.states, tuple(getattr(decoder, "states", ())))
    encoding = Encoder(name, encoder, reader, bridge=bridge, memory=memory, keys=keys)
    if encoding.gives_nothing:
        raise DefinitionError(f"model {name!r}: the decoder reads nothing of the encoder: {step!r}")
    shared = {state: search.others[state] for state in encoding.states}
    spread = cell(BeamStart(list(shared), beams), shared, name=f"{name} beam start") if shared else None
    finish = cell(
        BeamEnd(best, end, length_penalty),
        {key: step.outputs[key] for key in ("tokens", "score", "length")},
        name=f"{name} beam end",
    )

    def unfold(graph: Graph, request: Mapping[str, Any]) -> object:
        wanted = take(request, SOURCE, (MAX_STEPS,))
        limit = step_limit(wanted.get(MAX_STEPS, max_steps), max_steps)
        given = encoding(graph, wanted[SOURCE])
        if spread is not None:
            node = graph.call(spread, **{state: given[state] for state in shared})
            given |= {state: getattr(node, state) for state in shared}
        token, score = graph.constant(search.start_token(start)), graph.constant(search.start_score())
        searched = graph.loop(step, until="stop", max_steps=limit, token=token, score=score, **given)
        last = searched.last
        return graph.call(finish, tokens=last.tokens, score=last.score, length=last.length)

    example = {SOURCE: encoding.stack.example(), MAX_STEPS: max_steps}
    return Unfolder(name, unfold, example, (*encoding.cells, step, finish))


def _inputs_of(name: str, decoder: Any, inputs: Mapping[str, object] | None, end: int) -> Mapping[str, object]:
    """Return the inputs of the decoder. Raise DefinitionError for what cannot be searched with."""
    if isinstance(decoder, Cell):
        raise DefinitionError(f"model {name!r}: expected the decoder's module, got the cell {decoder.name!r} of it")
    if getattr(decoder, "end_token", NEVER) not in (NEVER, end):
        raise DefinitionError(f"model {name!r}: the decoder ends at token {decoder.end_token}, the search at {end}")
    if inputs is None and not hasattr(decoder, "input_specs"):
        raise DefinitionError(f"model {name!r}: {type(decoder).__name__} has no input_specs(): expected inputs=")
    found: Mapping[str, object] = decoder.input_specs() if inputs is None else inputs
    return found
