"""Encoders of sentences and encoder-decoders of attention alone, against torch's own Transformer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import relu

from cellrt.cells.transformer import TransformerLayer
from cellrt.cells.transformer_stack import StackSizes, TransformerStack, encoder_decoder_cells, sentence_encoder
from cellrt.errors import RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders.attention import embed, transduce
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, small_engine

SIZES = StackSizes(vocabulary=30, positions=40, hidden=24, inner=40, layers=2, heads=4, activation=relu, scale=3.0)
START, END, MAX_STEPS = 1, 5, 20


class Reference(nn.Module):
    """Torch's layers with the same embeddings, one sequence at a time, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        options = {"batch_first": True, "activation": "relu", "dropout": 0.0}
        self.encoder = TransformerStack(SIZES)
        self.decoder = TransformerStack(SIZES, is_decoder=True)
        self.head = nn.Linear(24, 30)
        self.encoder_layers = nn.ModuleList(nn.TransformerEncoderLayer(24, 4, 40, **options) for _ in range(2))
        self.decoder_layers = nn.ModuleList(nn.TransformerDecoderLayer(24, 4, 40, **options) for _ in range(2))
        self.eval()
        for ours, theirs in ((self.encoder, self.encoder_layers), (self.decoder, self.decoder_layers)):
            for k, layer in enumerate(theirs):
                ours.layers[k] = TransformerLayer.from_torch(layer)

    def embedded(self, stack, tokens):
        return (3.0 * stack.embedding(tokens) + stack.positions(torch.arange(len(tokens))))[None]

    def encoded(self, tokens):
        x = self.embedded(self.encoder, tokens)
        for layer in self.encoder_layers:
            x = layer(x)
        return x

    def sentence(self, tokens):
        mean = self.encoded(tokens)[0].mean(0)
        return mean / mean.norm()

    def translate(self, tokens):
        memory, made = self.encoded(tokens), [START]
        while len(made) <= MAX_STEPS and made[-1] != END:
            x = self.embedded(self.decoder, torch.tensor(made))
            mask = nn.Transformer.generate_square_subsequent_mask(len(made))
            for layer in self.decoder_layers:
                x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
            made.append(int(self.head(x[0, -1]).argmax()))
        return made[1:]


REFERENCE = Reference()
SENTENCES = sentence_encoder(REFERENCE.encoder, max_batch=4, max_batch_rows=40)
CELLS = encoder_decoder_cells(
    REFERENCE.encoder, REFERENCE.decoder, REFERENCE.head, END, page_size=4, max_batch=4, max_batch_rows=40
)


def draw(seed: int, length: int) -> torch.Tensor:
    return torch.randint(0, 30, (length,), generator=torch.Generator().manual_seed(seed))


LENGTHS = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40)), min_size=1, max_size=12)
THOROUGH = settings(suppress_health_check=list(HealthCheck), max_examples=examples(6), deadline=None)


@THOROUGH
@given(drawn=LENGTHS, workers=st.integers(1, 2))
def test_embeddings_are_those_of_each_sentence_alone_in_torch(drawn, workers):
    engine = small_engine(workers, debug=True)
    try:
        engine.register(embed("embed", SENTENCES), warm_up=False)
        futures = [engine.submit("embed", draw(*one)) for one in drawn]
        for one, future in zip(drawn, futures):
            with torch.no_grad():
                wanted = REFERENCE.sentence(draw(*one))
            torch.testing.assert_close(future.result(WAIT_S)["embedding"], wanted, atol=1e-5, rtol=1e-4)
    finally:
        close_and_check(engine)


@THOROUGH
@given(drawn=LENGTHS, workers=st.integers(1, 2))
def test_translations_are_those_of_each_source_alone_in_torch(drawn, workers):
    """64 pages at a worker, of which a source and its translation take up to 15."""
    engine = small_engine(workers, page_bytes=1, debug=True)
    try:
        engine.register(transduce("translate", CELLS, start=START, max_steps=MAX_STEPS), warm_up=False)
        futures = [engine.submit("translate", draw(*one)) for one in drawn]
        for one, future in zip(drawn, futures):
            with torch.no_grad():
                wanted = REFERENCE.translate(draw(*one))
            assert future.result(WAIT_S)["token"].tolist() == wanted
    finally:
        close_and_check(engine)


def test_translations_differ_and_some_end():
    with torch.no_grad():
        found = [REFERENCE.translate(draw(seed, 3 + seed)) for seed in range(12)]
    assert len({tuple(tokens) for tokens in found}) > 6
    assert any(tokens[-1] == END for tokens in found)


def test_mistakes_in_requests_are_named():
    translate = transduce("translate", CELLS, start=START, max_steps=MAX_STEPS)
    with pytest.raises(RequestError, match="at least one token"):
        run_one_by_one(translate, [])
    with pytest.raises(RequestError, match="max_steps from 1 to 20"):
        run_one_by_one(translate, {"source": [1], "max_steps": 21})
    with pytest.raises(RequestError, match="at least one token"):
        run_one_by_one(embed("embed", SENTENCES), [])
    with pytest.raises(RequestError, match="all of them in one task"):
        run_one_by_one(embed("embed", SENTENCES), draw(0, 41))
