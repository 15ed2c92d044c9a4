"""What a ready-made model's documentation says of a request may come over HTTP: its form has it."""

from __future__ import annotations

import pytest
from torch import nn

import cellrt
from cellrt import cells, unfolders
from cellrt.core.processor import Processor
from cellrt.engine.discovery import Discovery
from cellrt.engine.registry import Registry
from cellrt.errors import RequestError
from cellrt.graph.unfolder import Unfolder
from cellrt.serve.described import request_form
from cellrt.serve.forms import RecordForm
from cellrt.serve.server_settings import Limits
from cellrt.serve.sized import SizedGraph

MOST = 7


def decoder() -> nn.Module:
    return cells.EmbeddingGRUDecoder(9, 4, 6, end_token=1)


def drawing() -> cellrt.Cell:
    module = cells.SamplingDecoder(decoder(), cells.Sample(end_token=1, temperature=0.5))
    return cellrt.cell(module, module.input_specs())


def encoder() -> cellrt.Cell:
    return cellrt.cell(cells.EmbeddingGRUCell(9, 4, 6), {"token": cellrt.token, "h": (6,)})


def encoder_decoder() -> Unfolder:
    return unfolders.encoder_decoder("model", encoder=encoder(), decoder=drawing(), start=0, max_steps=MOST)


def beam_search() -> Unfolder:
    return unfolders.beam_search("model", encoder=encoder(), decoder=decoder(), start=0, end=1, max_steps=MOST)


def generate() -> Unfolder:
    return unfolders.generate("model", drawing(), max_steps=MOST)


def form_of(model: Unfolder) -> RecordForm:
    binding = Discovery(Registry(Processor(1), 1000))
    graph = SizedGraph(binding)
    model.record_in(graph, model.example)

    def takes(other: object) -> bool:
        try:
            model.record(binding, other)
        except RequestError:
            return False
        return True

    form = request_form(model.example, takes, Limits(), graph)
    assert isinstance(form, RecordForm)
    return form


@pytest.mark.parametrize(
    ("make", "needed", "optional"),
    [
        (encoder_decoder, {"source": [1, 2, 3], "seed": 5}, {"max_steps": 2}),
        (beam_search, {"source": [1, 2, 3]}, {"max_steps": 2}),
        (generate, {"seed": 5}, {"token": 3, "h": [0.0] * 6, "step": 0}),
    ],
    ids=["encoder_decoder", "beam_search", "generate"],
)
def test_what_a_request_may_have_it_may_leave_out(make, needed: dict[str, object], optional: dict[str, object]) -> None:
    form = form_of(make())
    assert form.fields.keys() == needed.keys() | optional.keys() and form.optional == optional.keys()
    for given in (needed, {**needed, **optional}):
        assert form.read(given, "request").keys() == given.keys()
