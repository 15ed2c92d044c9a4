"""Encoders of several layers and of both directions, and bridges to their decoders, served, against torch's modules."""

import pytest
import torch
from torch import nn

import cellrt
from cellrt import cells, unfolders
from cellrt.errors import DefinitionError
from tests.oracles.beam import search
from tests.unfolders.test_sequences import serve

TOKENS, WIDTH, SIZE, START, END, MOST = 9, 5, 8, 0, 2, 7
LAYERS = {nn.LSTM: cells.EmbeddingLSTMDecoder, nn.GRU: cells.EmbeddingGRUDecoder}
ATTENTION = {nn.LSTM: cells.AttentionLSTMDecoder, nn.GRU: cells.AttentionGRUDecoder}
SOURCES = [[3, 1, 4, 1, 5], [8], [2, 7, 1, 8, 2, 8, 1, 8], [6, 6]]


class Translator(nn.Module):
    """An encoder-decoder as somebody may have trained it in torch; states are `[layers, size]`, one for each kind.

    The encoder's layers are half as wide if they run in both directions, so that a decoder may begin with both halves
    side by side, unless there is a `bridge`, a layer from the last states of the top layer alone.
    """

    def __init__(self, kind, num_layers, is_both, has_bridge=False, attends=False):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.num_layers = kind, num_layers
        width = SIZE if has_bridge or not is_both else SIZE // 2
        self.memory_size = width * (1 + is_both)
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder = kind(WIDTH, width, num_layers, bidirectional=is_both, dropout=0.5 if num_layers > 1 else 0.0)
        depth = 1 if has_bridge else num_layers
        self.decoder = kind(WIDTH + SIZE * attends, SIZE, depth)
        self.bridge = nn.Linear(self.memory_size, SIZE) if has_bridge else None
        self.query, self.key, self.score = nn.Linear(SIZE, 6), nn.Linear(self.memory_size, 6), nn.Linear(6, 1)
        self.combine = nn.Linear(self.memory_size + SIZE, SIZE) if attends else None
        self.projection = nn.Linear(SIZE, TOKENS)
        nn.init.normal_(self.projection.weight, std=2.0)
        self.eval()

    def encode(self, source):
        """The encoder's outputs `[n, size]`, and the decoder's first states."""
        memory, last = self.encoder(self.source(torch.tensor(source)))
        states = last if isinstance(last, tuple) else (last,)
        if self.bridge is not None:
            top = [state[-self.encoder_directions :].flatten() for state in states]
            return memory, [torch.tanh(self.bridge(state))[None] for state in top]
        by_layer = [state.view(self.num_layers, -1, state.shape[-1]) for state in states]
        return memory, [state.flatten(1) for state in by_layer]

    @property
    def encoder_directions(self):
        return 2 if self.encoder.bidirectional else 1

    def step(self, token, current, memory):
        """The logits after a token, and what the next step needs."""
        states, attended = current
        x = self.target(torch.tensor(token))
        x = x if self.combine is None else torch.cat([x, attended])
        output, after = self.decoder(x[None], tuple(states) if len(states) > 1 else states[0])
        h = output[0]
        if self.combine is not None:
            scores = self.score(torch.tanh(self.query(h) + self.key(memory)))[:, 0]
            h = torch.tanh(self.combine(torch.cat([scores.softmax(0) @ memory, h])))
        return self.projection(h), (after if len(states) > 1 else (after,), h)

    @torch.inference_mode()
    def greedy(self, source):
        """The tokens, and their log-probabilities."""
        memory, states = self.encode(source)
        current, tokens, chances = (states, torch.zeros(SIZE)), [], []
        while len(tokens) < MOST and END not in tokens:
            logits, current = self.step(tokens[-1] if tokens else START, current, memory)
            tokens.append(int(logits.argmax()))
            chances.append(logits.log_softmax(0).max())
        return tokens, torch.stack(chances)

    @torch.inference_mode()
    def beams(self, source, beams):
        memory, states = self.encode(source)

        def advance(token, current):
            return self.step(token, current, memory)

        return search(advance, (states, torch.zeros(SIZE)), START, END, beams, MOST)

    def layers(self):
        return unfolders.from_torch(self.encoder, embedding=self.source)

    def served_bridge(self):
        if self.bridge is None:
            return None
        top, names = self.num_layers - 1, ("h", "c") if self.kind is nn.LSTM else ("h",)
        places = [f"_l{top}", f"_l{top}_reverse"][: self.encoder_directions]
        sources = {name: [name + place for place in places] for name in names}
        return cells.Bridge(sources, dict.fromkeys(names, self.bridge), nn.Tanh())

    def decoder_module(self, **options):
        if self.combine is None:
            return LAYERS[self.kind].from_torch(self.target, self.decoder, self.projection, END, **options)
        attention = cells.AdditiveAttention.from_torch(self.query, self.key, self.score)
        parts = (self.target, self.decoder, self.combine, self.projection, END)
        return ATTENTION[self.kind].from_torch(*parts, attention=attention, **options)

    def keys(self, decoder):
        if self.combine is None:
            return None
        return cellrt.cell(cells.AttentionKeys(decoder.attention), {"h": (self.memory_size,)})


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


def parts(kind=nn.LSTM, attends=False, **changes):
    made = Translator(kind, num_layers=1, is_both=False, attends=attends)
    decoder = made.decoder_module()
    given = {
        "encoder": made.layers(),
        "decoder": cellrt.cell(decoder, decoder.input_specs()),
        "keys": made.keys(decoder),
    }
    return {**given, "start": START, "max_steps": MOST} | changes


def layers_of(kind=nn.LSTM, size=SIZE, **options):
    return unfolders.from_torch(kind(WIDTH, size, **options), embedding=nn.Embedding(TOKENS, WIDTH))


def gru_cell():
    module = cells.EmbeddingGRUDecoder(TOKENS, WIDTH, SIZE, END)
    return cellrt.cell(module, module.input_specs())


def keys_of(read, made):
    return cellrt.cell(nn.Linear(read, made), {"input": (read,)})


def without(changes, *names):
    return {key: value for key, value in changes.items() if key not in names}


WRONG = {
    "a larger encoder": (
        lambda: parts(encoder=layers_of(size=7)),
        r"h_l0: float32\[7\].*'EmbeddingLSTMDecoder' starts",
    ),
    "both directions": (
        lambda: parts(encoder=layers_of(bidirectional=True)),
        r"together float32\[16\].*h: float32\[8\]",
    ),
    "two layers": (
        lambda: parts(encoder=layers_of(num_layers=2)),
        r"together float32\[2, 8\].*h: float32\[8\].*bridge=",
    ),
    "an LSTM before a GRU": (
        lambda: parts(decoder=gru_cell()),
        r"states are \['h', 'c'\].*Decoder' are \['h'\].*bridge=",
    ),
    "a GRU before an LSTM": (
        lambda: parts(encoder=layers_of(nn.GRU)),
        r"states are \['h'\].*are \['h', 'c'\].*bridge=",
    ),
    "another dtype": (
        lambda: parts(encoder=unfolders.from_torch(nn.LSTM(WIDTH, SIZE).bfloat16())),
        r"h_l0: bfloat16\[8\].*h: float32\[8\]",
    ),
    "no layers": (
        lambda: parts(encoder=nn.Linear(2, 3)),
        "the encoder cannot be used: from_torch: expected .* not Lin",
    ),
    "an unfolder": (lambda: parts(encoder=None), "the encoder cannot be used: from_torch: expected .* not NoneType"),
    "a decoder's module": (
        lambda: parts(decoder=cells.EmbeddingGRUDecoder(TOKENS, WIDTH, SIZE, END)),
        "expected a cell as decoder, .* got EmbeddingGRUDecoder",
    ),
    "a stack as decoder": (lambda: parts(decoder=layers_of()), "expected a cell as decoder, .* got Stack"),
    "a bridge of a state that is not there": (
        lambda: parts(bridge=cells.Bridge({"h": ["h_l1"]})),
        r"the bridge reads \['h_l1'\]; the encoder's last states are h_l0: float32\[8\], c_l0: float32\[8\]",
    ),
    "a bridge to a state that is not there": (
        lambda: parts(bridge=cells.Bridge({"s": ["h_l0"]})),
        r"the bridge makes s: float32\[8\]; the decoder 'EmbeddingLSTMDecoder' reads h: float32\[8\], c: float32\[8\]",
    ),
    "a bridge of another size": (
        lambda: parts(bridge=cells.Bridge({"h": ["h_l0"]}, {"h": nn.Linear(SIZE, 5)})),
        r"the bridge makes h: float32\[5\]; the decoder 'EmbeddingLSTMDecoder' reads h: float32\[8\]",
    ),
    "a bridge whose layer does not fit": (
        lambda: parts(bridge=cells.Bridge({"h": ["h_l0"]}, {"h": nn.Linear(5, SIZE)})),
        r" bridge' does not run on .* rows of \(h_l0: float32\[8\]\)",
    ),
    "a bridge that is a cell of another size": (
        lambda: parts(bridge=cellrt.cell(lambda h_l0: {"h": h_l0}, {"h_l0": (5,)})),
        r"the bridge reads h_l0: float32\[5\]; the encoder's last states are h_l0: float32\[8\]",
    ),
    "a module as bridge": (lambda: parts(bridge=nn.Linear(8, 8)), "expected a Bridge or a cell as bridge, got Linear"),
    "nothing of the encoder": (lambda: parts(bridge=cells.Bridge({})), "reads nothing of the encoder"),
    "an unknown result": (lambda: parts(results=("logprob",)), r"\['logprob'\] are not outputs.*return_logprobs=True"),
    "no steps": (lambda: parts(max_steps=0), "expected max_steps as an int of at least 1, got 0"),
    "another memory": (lambda: parts(attends=True, memory="x"), "no output 'x' to attend to"),
    "a wider memory": (
        lambda: parts(attends=True, encoder=layers_of(size=4, bidirectional=True, num_layers=1), keys=None),
        r"ragged inputs are \['memory', 'keys'\], but there are \['memory'\]",
    ),
    "rows of another size": (
        lambda: parts(attends=True, encoder=layers_of(size=7), bridge=cells.Bridge({})),
        r"attends to memory: ragged float32\[8\]; the encoder gives rows of float32\[7\]",
    ),
    "keys of another size": (
        lambda: parts(attends=True, keys=keys_of(SIZE, 5)),
        r"attends to keys: ragged float32\[6\]; the encoder gives rows of float32\[5\]",
    ),
    "keys of other rows": (
        lambda: parts(attends=True, keys=keys_of(5, 6)),
        r"the keys' 'input' is float32\[5\]; the encoder's rows are float32\[8\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_do_not_fit_are_refused_by_name(case):
    make, message = WRONG[case]
    with pytest.raises(DefinitionError, match=f"(?s)model.*{message}"):
        unfolders.encoder_decoder("model", **make())


def test_a_prompt_in_both_directions_is_not_continued():
    with pytest.raises(DefinitionError, match="'model': a prompt whose layers run in both directions .* give start="):
        unfolders.generate("model", gru_cell(), prompt=layers_of(nn.GRU, bidirectional=True), max_steps=MOST)
    with pytest.raises(
        DefinitionError, match="'model': a bridge leads from a prompt's layers, but there is no prompt="
    ):
        unfolders.generate("model", gru_cell(), bridge=cells.Bridge({}), max_steps=MOST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": gru_cell()}, "expected the decoder's module, got the cell 'EmbeddingGRUDecoder' of it"),
        ({"end": 3}, "the decoder ends at token 2, the search at 3"),
        ({"decoder": nn.Linear(2, 3)}, r"Linear has no input_specs\(\): expected inputs="),
        ({"encoder": layers_of(size=7)}, r"h_l0: float32\[7\].*'EmbeddingLSTMDecoder' starts with h: float32\[8\]"),
    ],
    ids=str,
)
def test_a_search_that_does_not_fit_is_refused(changes, message):
    given = without(parts(), "keys") | {"decoder": cells.EmbeddingLSTMDecoder(TOKENS, WIDTH, SIZE, END), "end": END}
    with pytest.raises(DefinitionError, match=f"(?s)model.*{message}"):
        unfolders.beam_search("model", **given | changes)


@pytest.mark.parametrize("request_", [[1, 2], {"text": [1]}, {"source": [1], "max_step": 3}], ids=str)
def test_a_request_of_another_form_is_refused(request_):
    with pytest.raises(cellrt.RequestError, match="'model': expected a dict with 'source'"):
        unfolders.encoder_decoder("model", **parts()).record(None, request_)
