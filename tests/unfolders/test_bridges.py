"""Encoders of several layers and of both directions, and bridges to their decoders, served, against torch's modules."""

import pytest
import torch
from torch import nn

import cellrt
from cellrt import cells, unfolders
from tests.unfolders.test_sequences import serve
from tests.unfolders.translator import END, MOST, SIZE, SOURCES, START, TOKENS, Translator

CASES = {
    "two layers": {"num_layers": 2, "is_both": False},
    "both directions": {"num_layers": 1, "is_both": True},
    "two layers in both directions": {"num_layers": 2, "is_both": True},
    "a bridge from the top layer": {"num_layers": 2, "is_both": False, "has_bridge": True},
    "a bridge from both directions": {"num_layers": 1, "is_both": True, "has_bridge": True},
    "attention to both directions": {"num_layers": 2, "is_both": True, "attends": True},
    "attention and a bridge": {"num_layers": 1, "is_both": True, "has_bridge": True, "attends": True},
}
every_case = pytest.mark.parametrize("case", CASES)
both_kinds = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


@pytest.mark.one_in(3)
@both_kinds
@every_case
def test_an_encoder_decoder_is_that_of_torch(kind, case):
    made = Translator(kind, **CASES[case])
    decoder = made.decoder_module(return_logits=True, return_logprobs=True)
    model = unfolders.encoder_decoder(
        "translate",
        encoder=made.layers(),
        decoder=cellrt.cell(decoder, decoder.input_specs()),
        bridge=made.served_bridge(),
        keys=made.keys(decoder),
        start=START,
        max_steps=MOST,
        results=("logits", "logprob"),
    )
    for source, found in zip(SOURCES, serve(model, [{"source": source} for source in SOURCES])):
        tokens, chances = made.greedy(source)
        assert found["tokens"].tolist() == tokens
        torch.testing.assert_close(found["logprob"], chances, rtol=1e-4, atol=1e-4)
        assert found["logits"].shape == (len(tokens), TOKENS)
        torch.testing.assert_close(found["logits"].log_softmax(1).amax(1), chances, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(3)
@both_kinds
@every_case
def test_a_beam_search_is_that_of_torch(kind, case):
    made = Translator(kind, **CASES[case])
    decoder = made.decoder_module()
    model = unfolders.beam_search(
        "search",
        encoder=made.layers(),
        decoder=decoder,
        bridge=made.served_bridge(),
        keys=made.keys(decoder),
        start=START,
        end=END,
        max_steps=MOST,
        beams=3,
        best=2,
    )
    for source, found in zip(SOURCES, serve(model, [{"source": source} for source in SOURCES])):
        expected = made.beams(source, 3)[:2]
        tokens = [tuple(row[:length]) for row, length in zip(found["tokens"].tolist(), found["length"].tolist())]
        assert tokens == [each.tokens for each in expected]
        scores = torch.tensor([each.score for each in expected])
        torch.testing.assert_close(found["score"], scores, rtol=1e-4, atol=1e-4)


@both_kinds
@pytest.mark.parametrize("case", ["two layers in both directions", "a bridge from both directions"])
def test_a_prompt_in_both_directions_is_a_source(kind, case):
    made = Translator(kind, **CASES[case])
    decoder = made.decoder_module(return_logprobs=True)
    model = unfolders.generate(
        "translate",
        cellrt.cell(decoder, decoder.input_specs()),
        prompt=made.layers(),
        bridge=made.served_bridge(),
        start=START,
        max_steps=MOST,
        results=("token", "logprob"),
    )
    for source, found in zip(SOURCES, serve(model, SOURCES)):
        tokens, chances = made.greedy(source)
        assert found["token"].tolist() == tokens
        torch.testing.assert_close(found["logprob"], chances, rtol=1e-4, atol=1e-4)


def test_a_bridge_may_be_any_cell_with_the_names_of_last_states():
    made = Translator(nn.GRU, num_layers=1, is_both=True, has_bridge=True)
    linear = made.bridge

    def begin(h_l0, h_l0_reverse):
        return {"h": torch.tanh(linear(torch.cat([h_l0, h_l0_reverse], -1)))}

    model = unfolders.encoder_decoder(
        "translate",
        encoder=made.layers(),
        decoder=cellrt.cell(module := made.decoder_module(), module.input_specs()),
        bridge=cellrt.cell(begin, {"h_l0": (SIZE,), "h_l0_reverse": (SIZE,)}),
        start=START,
        max_steps=MOST,
    )
    for source, found in zip(SOURCES, serve(model, [{"source": source} for source in SOURCES])):
        assert found["tokens"].tolist() == made.greedy(source)[0]


def test_an_empty_bridge_starts_a_decoder_that_attends_with_zeros():
    made = Translator(nn.GRU, num_layers=1, is_both=True, attends=True)
    decoder = made.decoder_module()
    model = unfolders.encoder_decoder(
        "translate",
        encoder=made.layers(),
        decoder=cellrt.cell(decoder, decoder.input_specs()),
        bridge=cells.Bridge({}),
        keys=made.keys(decoder),
        start=START,
        max_steps=MOST,
    )
    encode = made.encode
    made.encode = lambda source: (encode(source)[0], [torch.zeros(1, SIZE)])
    for source, found in zip(SOURCES, serve(model, [{"source": source} for source in SOURCES])):
        assert found["tokens"].tolist() == made.greedy(source)[0]


def test_a_source_of_numbers_needs_no_embedding():
    made = Translator(nn.LSTM, num_layers=2, is_both=False)
    decoder = made.decoder_module()
    model = unfolders.encoder_decoder(
        "translate",
        encoder=made.encoder,
        decoder=cellrt.cell(decoder, decoder.input_specs()),
        start=START,
        max_steps=MOST,
    )
    requests = [{"source": made.source(torch.tensor(source)).detach()} for source in SOURCES]
    for source, found in zip(SOURCES, serve(model, requests)):
        assert found["tokens"].tolist() == made.greedy(source)[0]


def test_a_request_holds_the_decoders_other_inputs():
    made = Translator(nn.GRU, num_layers=1, is_both=True)
    decoder = cells.SamplingDecoder(made.decoder_module(return_logprobs=True), cells.Sample(END, temperature=3.0))
    model = unfolders.encoder_decoder(
        "sample",
        encoder=made.layers(),
        decoder=cellrt.cell(decoder, decoder.input_specs()),
        start=START,
        max_steps=MOST,
        results=("logprob",),
    )
    requests = [{"source": SOURCES[0], "seed": seed} for seed in range(6)]
    found = serve(model, [*requests, requests[0]])
    assert torch.equal(found[-1]["tokens"], found[0]["tokens"])
    assert len({tuple(each["tokens"].tolist()) for each in found}) > 1
    memory, states = made.encode(SOURCES[0])
    for each in found:
        current, before = (states, None), START
        for token, chance in zip(each["tokens"].tolist(), each["logprob"]):
            logits, current = made.step(before, current, memory)
            torch.testing.assert_close(chance, logits.log_softmax(0)[token].detach(), rtol=1e-4, atol=1e-4)
            before = token
