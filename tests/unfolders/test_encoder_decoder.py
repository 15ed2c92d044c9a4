"""Encoder-decoders with and without attention, served, against the same modules called one token at a time."""

import pytest
import torch

from cellrt.cells import (
    AdditiveAttention,
    AttentionGRUDecoder,
    AttentionKeys,
    AttentionLSTMDecoder,
    EmbeddingGRUCell,
    EmbeddingGRUDecoder,
    EmbeddingLSTMCell,
)
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, rows
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders import encoder_decoder
from tests.engine.helpers import small_engine

SIZE, TOKENS, START, END, MOST = 6, 9, 0, 2, 7
INTEGER = rows(dtype=torch.int64)
KINDS = ["gru", "gru attention", "gru attention, keys, feeding", "lstm attention, feeding"]


def modules(kind):
    """Encoder, decoder, and the module of the keys if there is one."""
    torch.manual_seed(KINDS.index(kind))
    is_lstm, feeding = "lstm" in kind, "feeding" in kind
    encoder = (EmbeddingLSTMCell if is_lstm else EmbeddingGRUCell)(TOKENS, 4, SIZE)
    if kind == "gru":
        return encoder, EmbeddingGRUDecoder(TOKENS, 4, SIZE, END), None
    decoder_kind = AttentionLSTMDecoder if is_lstm else AttentionGRUDecoder
    if "keys" not in kind:
        return encoder, decoder_kind(TOKENS, 4, SIZE, END, input_feeding=feeding), None
    attention = AdditiveAttention(SIZE, SIZE, 5)
    decoder = decoder_kind(TOKENS, 4, SIZE, END, attention=attention, input_feeding=feeding)
    return encoder, decoder, AttentionKeys(attention)


def inputs_of(decoder):
    return decoder.input_specs() if hasattr(decoder, "input_specs") else {"token": INTEGER, "h": (SIZE,)}


def state_names(kind):
    return ("h", "c") if "lstm" in kind else ("h",)


def model(kind, **options):
    encoder, decoder, keys = modules(kind)
    inputs = {"token": INTEGER, **{name: (SIZE,) for name in state_names(kind)}}
    return encoder_decoder(
        "model",
        encoder=cell(encoder, inputs, max_batch=8),
        decoder=cell(decoder, inputs_of(decoder), max_batch=4),
        keys=None if keys is None else cell(keys, {"h": (SIZE,)}),
        **{"start": START, "max_steps": MOST} | options,
    )


def translate(kind, source, most):
    """One request without the runtime."""
    encoder, decoder, keys = modules(kind)
    state, steps = [torch.zeros(1, SIZE) for _ in state_names(kind)], []
    for token in source:
        state = list(encoder(token[None], *state))
        steps.append(state[0])
    memory = torch.cat(steps)
    offsets = torch.tensor([0, len(memory)])
    given = {} if kind == "gru" else {"memory": RaggedRows(memory, offsets)}
    if keys is not None:
        given["keys"] = RaggedRows(keys(memory).key, offsets)
    if "feeding" in kind:
        given["attended"] = torch.zeros(1, SIZE)
    token, tokens = torch.tensor([START]), []
    while len(tokens) < most and END not in tokens:
        after = decoder(token, *state, **given)
        token, state = after["token"], [after[name] for name in state_names(kind)]
        if "feeding" in kind:
            given["attended"] = after["attended"]
        tokens.append(int(token))
    return tokens


def sources(count):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(TOKENS, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_served_tokens_are_those_of_each_request_alone(kind):
    requests = [{"source": source} for source in sources(40)]
    requests += [{"source": source, "max_steps": 1 + k % MOST} for k, source in enumerate(sources(40))]
    made = model(kind)
    expected = [translate(kind, request["source"], request.get("max_steps", MOST)) for request in requests]
    assert len({len(tokens) for tokens in expected}) > 3
    with small_engine(2) as engine:
        engine.register(made)
        futures = engine.submit_many("model", requests)
        assert [future.result(timeout=60)["tokens"].tolist() for future in futures] == expected
    assert [run_one_by_one(made, request)["tokens"].tolist() for request in requests[:5]] == expected[:5]


@pytest.mark.parametrize("limit", [0, MOST + 1, 2.0])
def test_a_wrong_limit_is_refused(limit):
    with pytest.raises(RequestError, match=f"from 1 to {MOST}"):
        run_one_by_one(model("gru"), {"source": torch.tensor([1]), "max_steps": limit})


def test_cells_that_do_not_fit_are_refused():
    encoder, decoder, keys = modules("gru attention, keys, feeding")
    inputs = {"token": INTEGER, "h": (SIZE,)}
    made = {"encoder": cell(encoder, inputs), "decoder": cell(decoder, decoder.input_specs())}
    options = {"start": START, "max_steps": MOST}
    with pytest.raises(DefinitionError, match="ragged inputs are \\['memory', 'keys'\\]"):
        encoder_decoder("model", **made, **options)
    with pytest.raises(DefinitionError, match="no output 'c'"):
        encoder_decoder("model", **made, keys=cell(keys, {"h": (SIZE,)}), memory="c", **options)
    with pytest.raises(DefinitionError, match="'stop'"):
        encoder_decoder("model", **made | {"decoder": made["encoder"]}, **options)
    with pytest.raises(DefinitionError, match="not carried"):
        encoder_decoder("model", **made | {"encoder": made["decoder"]}, **options)
