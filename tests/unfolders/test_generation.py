"""Generation through the engine against decoding by hand in torch."""

import pytest
import torch
from torch import nn

import cellrt
from cellrt import unfolders
from cellrt.cells import EmbeddingLSTMCell, EmbeddingLSTMDecoder, Sample, SamplingDecoder
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.reference import run_one_by_one
from tests.unfolders.test_sequences import serve

INTEGER = cellrt.rows(dtype=torch.int64)
VOCABULARY, HIDDEN, END, LIMIT = 7, 12, 3, 9


class Language:
    """A random language model in torch, ``layers`` deep."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.table = nn.Embedding(VOCABULARY, 6)
        self.module, self.projection = nn.LSTM(6, HIDDEN, layers), nn.Linear(HIDDEN, VOCABULARY)
        self.projection.weight.data *= 8

    def decoder(self) -> EmbeddingLSTMDecoder:
        return EmbeddingLSTMDecoder.from_torch(self.table, self.module, self.projection, END)

    def specs(self) -> dict[str, object]:
        shape = (HIDDEN,) if self.layers == 1 else (self.layers, HIDDEN)
        return {"token": INTEGER, "h": shape, "c": shape}

    @torch.inference_mode()
    def continue_(self, prompt: list[int]) -> list[int]:
        """The tokens that follow, the most likely each, up to the end."""
        made: list[int] = []
        while len(made) < LIMIT and END not in made:
            output, _ = self.module(self.table(torch.tensor(prompt + made)))
            made.append(int(self.projection(output[-1]).argmax()))
        return made


PROMPTS = [[2, 5, 1], [4], [0, 1, 2, 4, 5, 6]]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_prompt_is_continued(layers):
    language = Language(layers)
    encoder = unfolders.from_torch(language.module, embedding=language.table)
    decoder = cellrt.cell(language.decoder(), language.specs())
    model = unfolders.generate("language", decoder, max_steps=LIMIT, prompt=encoder)
    for prompt, found in zip(PROMPTS, serve(model, PROMPTS)):
        assert found["token"].tolist() == language.continue_(prompt)


def test_an_encoders_states_start_the_decoder_at_a_fixed_token():
    language = Language(1)
    encoder = unfolders.from_torch(language.module, embedding=language.table)
    decoder = cellrt.cell(language.decoder(), language.specs())
    model = unfolders.generate("translate", decoder, max_steps=LIMIT, prompt=encoder, start=2)
    for prompt, found in zip(PROMPTS, serve(model, PROMPTS)):
        assert found["token"].tolist() == language.continue_([*prompt, 2])


def test_without_a_prompt_the_request_holds_the_first_states():
    language = Language(1)
    decoder = cellrt.cell(language.decoder(), language.specs())
    model = unfolders.generate("free", decoder, max_steps=LIMIT, start=2, results=("token", "h"))
    with torch.inference_mode():
        _, (h, c) = language.module(language.table(torch.tensor([4, 5])))
    fresh, given = serve(model, [{}, {"h": h[0, :].clone(), "c": c[0, :].clone()}])
    assert fresh["token"].tolist() == language.continue_([2])
    assert given["token"].tolist() == language.continue_([4, 5, 2])
    assert given["h"].shape == (len(given["token"]), HIDDEN)


def test_sampled_text_depends_on_its_seed_alone():
    language = Language(1)
    specs = {"token": INTEGER, "seed": INTEGER, "step": INTEGER, "h": (HIDDEN,), "c": (HIDDEN,)}
    decoder = cellrt.cell(SamplingDecoder(language.decoder(), Sample(END, temperature=3.0)), specs)
    model = unfolders.generate("sample", decoder, max_steps=LIMIT, start=2)
    requests = [{"seed": seed} for seed in range(8)]
    together = [found["token"].tolist() for found in serve(model, requests)]
    alone = [serve(model, [request])[0]["token"].tolist() for request in requests[:3]]
    assert alone == together[:3]
    assert len(set(map(tuple, together))) > 1


def test_a_prompt_that_does_not_fit_is_refused():
    language = Language(1)
    decoder = cellrt.cell(language.decoder(), language.specs())
    deep = unfolders.from_torch(nn.LSTM(6, HIDDEN, 2), embedding=language.table)
    with pytest.raises(DefinitionError, match=r"together float32\[2, 12\].* starts with h: float32\[12\]"):
        unfolders.generate("deep", decoder, max_steps=LIMIT, prompt=deep)
    both = unfolders.from_torch(nn.LSTM(6, HIDDEN, bidirectional=True), embedding=language.table)
    with pytest.raises(DefinitionError, match="in both directions"):
        unfolders.generate("both", decoder, max_steps=LIMIT, prompt=both)
    other = cellrt.cell(EmbeddingLSTMCell(7, 6, HIDDEN + 1), {"token": INTEGER, "h": (13,), "c": (13,)})
    with pytest.raises(DefinitionError, match=r"h_l0: float32\[13\].* starts with h: float32\[12\]"):
        unfolders.generate("other", decoder, max_steps=LIMIT, prompt=other)
    with pytest.raises(DefinitionError, match="must have the output 'stop'"):
        unfolders.generate("other", other, max_steps=LIMIT, prompt=other)
    with pytest.raises(DefinitionError, match="must carry 'token'"):
        unfolders.generate("other", other, max_steps=LIMIT, prompt=other, until=None)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ([], "expected a prompt of at least one token, got none"),
        (3, "expected a prompt of at least one token, got 3"),
        ({"prompt": [1, 2], "max_steps": 3}, r"unknown \['max_steps'\] in the request; the decoder has inputs"),
    ],
)
def test_what_a_prompt_cannot_be_is_said(request_: object, told: str) -> None:
    language = Language(1)
    decoder = cellrt.cell(language.decoder(), language.specs())
    layers = unfolders.from_torch(language.module, embedding=language.table)
    model = unfolders.generate("told", decoder, prompt=layers, max_steps=3)
    with pytest.raises(RequestError, match=told):
        run_one_by_one(model, request_)
