"""Attention decoders made of trained torch modules, against these modules stepped by hand, a row at a time."""

import pytest
import torch
from torch import nn

from cellrt.cells import AdditiveAttention, AttentionGRUDecoder, AttentionKeys, AttentionLSTMDecoder, DotAttention
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, RowSpec
from cellrt.errors import DefinitionError
from tests.cells.attention_oracle import ragged_of
from tests.cells.gated import assert_close, normal

TOKENS, WIDTH, SIZE, MEMORY, KEY, END = 9, 5, 8, 6, 7, 2
WAYS = ["dot", "general", "additive", "additive with biases", "keys"]
KINDS = {AttentionGRUDecoder: nn.GRU, AttentionLSTMDecoder: nn.LSTM}


class Trained(nn.Module):
    """A decoder as somebody may have trained it in torch, after Luong et al. (2015)."""

    def __init__(self, layers, way, num_layers, feeding, bias):
        super().__init__()
        self.way, self.memory_size = way, SIZE if way == "dot" else MEMORY
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = layers(WIDTH + SIZE * feeding, SIZE, num_layers, bias=bias)
        self.general = nn.Linear(self.memory_size, SIZE, bias=bias)
        self.query, self.key = nn.Linear(SIZE, KEY, "biases" in way), nn.Linear(self.memory_size, KEY, "biases" in way)
        self.score = nn.Linear(KEY, 1, bias=bias)
        self.combine = nn.Linear(self.memory_size + SIZE, SIZE, bias=bias)
        self.projection = nn.Linear(SIZE, TOKENS, bias=bias)

    def scores(self, h, memory):
        if self.way == "dot":
            return memory @ h
        if self.way == "general":
            return self.general(memory) @ h
        return self.score(torch.tanh(self.query(h) + self.key(memory)))[:, 0]

    def forward(self, token, states, attended, memory):
        """One row: token ``[]``, states ``[layers, size]``, memory ``[n, size]`` -> logits, states, attended."""
        x = self.table(token)
        x = torch.cat([x, attended]) if self.layers.input_size > WIDTH else x
        h, after = self.layers(x[None], tuple(states) if len(states) > 1 else states[0])
        context = self.scores(h[0], memory).softmax(0) @ memory
        attended = torch.tanh(self.combine(torch.cat([context, h[0]])))
        return self.projection(attended), after if len(states) > 1 else (after,), attended

    def attention(self):
        if self.way == "dot":
            return DotAttention()
        if self.way == "general":
            return DotAttention.from_torch(self.general)
        return AdditiveAttention.from_torch(self.query, self.key, self.score)

    def decoder(self, kind, **options):
        parts = (self.table, self.layers, self.combine, self.projection)
        return kind.from_torch(*parts, END, attention=self.attention(), **options)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("feeding", [True, False], ids=["feeding", "plain"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_trained_modules(kind, way, feeding, num_layers):
    trained = Trained(KINDS[kind], way, num_layers, feeding, bias=way != "general")
    decoder = trained.decoder(kind, return_logits=True, return_logprobs=True)
    parts = [normal(count, trained.memory_size) for count in (3, 1, 8)]
    token, attended = torch.tensor([0, 8, 2]), normal(3, SIZE)
    states = [normal(3, num_layers, SIZE) for _ in decoder.states]
    given = {name: state[:, 0] if num_layers == 1 else state for name, state in zip(decoder.states, states)}
    given |= {"memory": ragged_of(parts)} | ({"attended": attended} if feeding else {})
    if way == "keys":
        keys = AttentionKeys(decoder.attention)(given["memory"].values).key
        given["keys"] = RaggedRows(keys, given["memory"].offsets)
    with torch.inference_mode():
        made = decoder(token, **given)
        for row, memory in enumerate(parts):
            logits, after, attended_after = trained(token[row], [state[row] for state in states], attended[row], memory)
            assert_close(made["logits"][row], logits)
            assert int(made["token"][row]) == int(logits.argmax())
            assert_close(made["logprob"][row], logits.log_softmax(0).max())
            assert_close(made["attended"][row], attended_after)
            for name, state in zip(decoder.states, after):
                assert_close(made[name][row].reshape(num_layers, SIZE), state)
    assert torch.equal(made["stop"], made["token"] == END)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_type_of_the_weights_is_that_of_the_cell(kind, dtype):
    decoder = Trained(KINDS[kind], "additive", 2, True, bias=True).to(dtype).decoder(kind, return_logprobs=True)
    made = cell(decoder, decoder.input_specs())
    assert {spec.dtype for spec in made.inputs.values()} == {torch.int64, dtype}
    assert made.outputs["h"] == made.inputs["h"] == RowSpec(made.inputs["h"].shape, dtype)
    assert set(made.carry) == {"token", "attended", *decoder.states}


def parts_of(trained):
    return {
        "table": trained.table,
        "module": trained.layers,
        "combine": trained.combine,
        "projection": trained.projection,
        "end_token": END,
        "attention": trained.attention(),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": nn.LSTM(WIDTH, SIZE)}, "expected GRUCell or GRU, not LSTM"),
        ({"module": nn.GRU(WIDTH + 1, SIZE)}, r"reads 5 \(the embedding\), or 13 \(and the attended state\)"),
        ({"combine": nn.Linear(MEMORY + SIZE, SIZE + 1)}, r"expected combine from memory_size \+ 8 to 8, got Linear"),
        ({"combine": nn.Linear(SIZE, SIZE)}, r"expected combine from memory_size \+ 8 to 8, got Linear"),
        ({"combine": nn.Linear(4 + SIZE, SIZE)}, "queries of 8 to rows of 4, got .* queries of 8 to rows of 6"),
        ({"attention": DotAttention()}, "queries of 8 to rows of 6, got DotAttention.* queries of 6 to rows of 6"),
        ({"attention": nn.Linear(SIZE, MEMORY)}, "expected DotAttention or AdditiveAttention as attention, got Linear"),
        ({"attention": DotAttention(SIZE, MEMORY).double()}, "one dtype, but .* DotAttention has torch.float64"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    parts = parts_of(Trained(nn.GRU, "additive", 1, False, bias=True))
    with pytest.raises(DefinitionError, match=f"(?s)AttentionGRUDecoder: .*{message}"):
        AttentionGRUDecoder.from_torch(**parts | changes)


def test_attention_layers_that_do_not_fit_are_refused():
    with pytest.raises(DefinitionError, match="AdditiveAttention: expected query and key of one size"):
        AdditiveAttention.from_torch(nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(4, 1))
