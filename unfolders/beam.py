"""Encoder-decoders with beam search: see `cellrt/cells/beam.py` for what is searched and how ties are broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cellrt.cells.beam import BeamEnd, BeamStart, BeamStep
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.errors import DefinitionError
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold
from cellrt.unfolders.encoder_decoder import attention_inputs, check_attention, source_input, step_limit


def beam_search(
    name: str,
    *,
    encoder: Cell,
    decoder: nn.Module,
    inputs: Mapping[str, object],
    start: int,
    end: int,
    max_steps: int,
    beams: int = 4,
    best: int = 1,
    length_penalty: float = 0.0,
    memory: str = "h",
    keys: Cell | None = None,
    max_batch: int = 128,
) -> Unfolder:
    """A model: an encoder over the source, and a beam search with a decoder, each step of which is one row.

    A request is `{"source": int64 [n]}`, n >= 1, and may have `"max_steps"` of its own, an int from 1 to that of the
    model. Results, the best sequence first: `tokens` int64 `[best, max_steps]`, filled up with the end token; `length`
    int64 `[best]`, tokens with the end token, which one that was cut at `max_steps` does not have; and `score` float32
    `[best]`, the log-probability under the length penalty, minus infinity if there are fewer sequences.

    Args:
        name: the model's name.
        encoder: a cell with one input that is not carried, a token.
        decoder: what `BeamStep` takes as scorer, such as `EmbeddingGRUDecoder` or `AttentionGRUDecoder`. Its states
            start from the encoder's last ones by name, others with zeros; `memory` and `keys` are as in
            `encoder_decoder`.
        inputs: the decoder's inputs, as for `cellrt.cell`.
        start, end: the tokens before the first and after the last.
        max_steps: the most tokens of a sequence.
        beams, best, length_penalty: hypotheses kept, sequences returned, and 0 or Wu et al.'s exponent.
        max_batch: most requests in a step, which has `beams` times as many hypotheses.

    Raises DefinitionError if cells and inputs do not fit.
    """
    source = source_input(name, encoder)
    search = BeamStep(
        decoder,
        inputs,
        beams=beams,
        end_token=end,
        max_steps=max_steps,
        best=best,
        length_penalty=length_penalty,
    )
    step = cell(search, search.input_specs(), name=f"{name} beam step", max_batch=max_batch)
    check_attention(name, encoder, step, memory, keys)
    shared = {state: spec for state, spec in search.others.items() if encoder.outputs.get(state) == spec}
    if not shared and not any(spec.ragged for spec in step.inputs.values()):
        raise DefinitionError(f"model {name!r}: the decoder reads nothing of the encoder: {encoder!r}, {step!r}")
    spread = cell(BeamStart(list(shared), beams), shared, name=f"{name} beam start") if shared else None
    finish = cell(
        BeamEnd(best, end, length_penalty),
        {key: step.outputs[key] for key in ("tokens", "score", "length")},
        name=f"{name} beam end",
    )

    @unfold(name, example={"source": torch.zeros(2, dtype=torch.int64)})
    def model(graph: Graph, request: dict[str, Any]) -> object:
        limit = step_limit(request, max_steps)
        encoded = graph.chain(encoder, **{source: request["source"]})
        given: dict[str, Any] = attention_inputs(graph, encoded, step, memory, keys)
        if spread is not None:
            node = graph.call(spread, **{state: getattr(encoded.last, state) for state in shared})
            given |= {state: getattr(node, state) for state in shared}
        token, score = graph.constant(search.start_token(start)), graph.constant(search.start_score())
        searched = graph.loop(step, until="stop", max_steps=limit, token=token, score=score, **given)
        last = searched.last
        return graph.call(finish, tokens=last.tokens, score=last.score, length=last.length)

    return model
