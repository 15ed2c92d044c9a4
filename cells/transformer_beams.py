"""Beam search (``beam.py``) over the decoder of a Transformer whose keys and values lie in pages.

A row of the loop is a request's whole beam, so each step appends one row to its growing state: the keys and values of
all beams. They stay where they are when hypotheses are reordered. What moves is a row of small integers, ``ancestors``
``[beams, max_steps]``: of each hypothesis, the beam in which each of its earlier tokens was read. So hypothesis b sees
at step s the entry of beam ``ancestors[b, s]``. Attention finds it there without a copy: to it each entry, of one step
and one beam, is a page of its own, and a hypothesis is a list of these.

The keys and values of the source are read once a request, for all of its beams together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cellrt import Cell, DefinitionError, PagedRows, RowSpec, grows, rows, token
from cellrt.cells.beam import BeamStep
from cellrt.cells.language_models import pages_of_layers
from cellrt.cells.paged_attention import Pages, Spans
from cellrt.cells.transformer_stack import GreedyDecoder


class BeamScorer(nn.Module):
    """A decoder as the scorer of a ``BeamStep``, with the tokens, states and pages of whole beams.

    Args:
        greedy: the decoder and its head.
        beams: hypotheses of a request.
    """

    def __init__(self, greedy: GreedyDecoder, beams: int) -> None:
        super().__init__()
        self.decoder, self.head, self.beams = greedy.decoder, greedy.head, beams

    def forward(self, token: Tensor, ancestors: Tensor, kv: PagedRows, memory: PagedRows) -> dict[str, Tensor]:
        """``token`` int64 ``[rows * beams]`` and ``ancestors`` int32 ``[rows * beams, max_steps]`` -> ``logits``
        ``[rows * beams, vocabulary]`` and the ancestors with this step's.

        Rows of ``kv`` are ``[layers, 2, beams, heads, size]``, those of ``memory`` ``[layers, 2, heads, size]``; their
        pages are of dimension 2.
        """
        positions = kv.positions.repeat_interleave(self.beams)
        beam = torch.arange(self.beams, dtype=torch.int32, device=token.device).repeat(len(kv.positions))
        ancestors = ancestors.scatter(1, positions.long()[:, None], beam[:, None])
        spans = Spans(torch.arange(len(token) + 1, dtype=torch.int32, device=token.device), positions)
        readers = Spans(memory.offsets * self.beams, positions)
        own, read = pages_of_beams(kv, ancestors), pages_of_layers(memory)
        return {"logits": self.head(self.decoder(token, spans, own, read, readers)), "ancestors": ancestors}


def pages_of_beams(kv: PagedRows, ancestors: Tensor) -> list[Pages]:
    """Return the keys and values of each layer as each hypothesis sees them, in place: pages of one entry.

    ``kv`` has one row a request, ``[layers, 2, beams, heads, size]``, in pages of dimension 2; ``ancestors`` is int32
    ``[rows * beams, max_steps]``, right up to the hypothesis's step.
    """
    _, layers, _, page_size, beams, *entry = kv.pages.shape
    entries = kv.pages.view(-1, 1, *entry)
    a_part = page_size * beams
    a_page, last = 2 * layers * a_part, (2 * layers - 1) * a_part
    steps = torch.arange(min(ancestors.shape[1], kv.tables.shape[1] * page_size), device=ancestors.device)
    firsts = kv.tables[kv.nodes][:, steps // page_size] * a_page + (steps % page_size * beams).int()
    tables = firsts.repeat_interleave(beams, 0) + ancestors[:, : len(steps)]
    lengths = (kv.positions + 1).repeat_interleave(beams)
    parts = [entries[part * a_part : len(entries) - last + part * a_part] for part in range(2 * layers)]
    return [Pages(keys, values, tables, lengths) for keys, values in zip(parts[::2], parts[1::2], strict=True)]


def transformer_beam_step(
    decoder: Cell, *, beams: int, max_steps: int, best: int = 1, length_penalty: float = 0.0
) -> BeamStep:
    """Return the step of a beam search with the decoder of ``encoder_decoder_cells``; arguments are as those of
    ``BeamStep``.

    Beside what a ``BeamStep`` has, a cell of it takes ``ancestors`` int32 ``[rows, beams, max_steps]``, carried, which
    starts with zeros; the growing state ``kv``; and the pages ``memory`` of the encoder.

    Raise DefinitionError for another cell, and for more steps than the decoder has positions.
    """
    greedy = decoder.module
    if not isinstance(greedy, GreedyDecoder):
        raise DefinitionError(f"expected a decoder as encoder_decoder_cells makes it, got {decoder!r}")
    positions = greedy.decoder.sizes.positions
    if max_steps > positions:
        raise DefinitionError(f"{decoder!r}: expected max_steps of at most {positions}, its positions, got {max_steps}")
    own = decoder.inputs["kv"]
    layers, _, heads, size = own.shape
    inputs: dict[str, RowSpec] = {
        "token": token,
        "ancestors": rows(max_steps, dtype=torch.int32),
        "kv": grows(layers, 2, beams, heads, size, dtype=own.dtype, page_size=own.page_size, page_dim=own.page_dim),
        "memory": decoder.inputs["memory"],
    }
    return BeamStep(
        BeamScorer(greedy, beams),
        inputs,
        beams=beams,
        end_token=greedy.end_token,
        max_steps=max_steps,
        best=best,
        length_penalty=length_penalty,
    )
