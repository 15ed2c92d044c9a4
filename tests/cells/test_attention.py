"""Attention and the decoders with it, against rows computed one at a time."""

import pytest
import torch
from torch import nn

from cellrt.cells import (
    AdditiveAttention,
    AttentionGRUDecoder,
    AttentionKeys,
    AttentionLSTMDecoder,
    DotAttention,
)
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows
from cellrt.errors import DefinitionError
from tests.cells.attention_oracle import additive, attend_one, dot, general, ragged_of
from tests.cells.gated import assert_close

COUNTS = [[1], [0], [3, 1, 7], [0, 5, 0, 0, 2, 0], [40, 1, 2, 33, 8]]
"""Memory rows of each node."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
WAYS = ["dot", "general", "additive", "keys"]


def memories(counts, size, dtype=torch.float32):
    return [torch.randn(count, size).to(dtype) for count in counts]


def way_of(name, query_size, memory_size, dtype=torch.float32):
    """An attention module, the score it should have, and the sizes of its query and memory."""
    if name == "dot":
        return DotAttention(), dot, memory_size, memory_size
    if name == "general":
        made = DotAttention(query_size, memory_size).to(dtype)
        return made, general(made.weight.detach()), query_size, memory_size
    made = AdditiveAttention(query_size, memory_size, 6).to(dtype)
    score = additive(made.query.weight.detach(), made.key.weight.detach(), made.score.detach())
    return made, score, query_size, memory_size


def with_keys(attention, memory, name):
    """The ragged inputs: with ``keys`` if they are computed apart."""
    if name != "keys":
        return (memory,)
    return memory, RaggedRows(AttentionKeys(attention)(memory.values).key, memory.offsets)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_context_is_that_of_each_row_alone(name, counts, dtype):
    attention, score, query_size, memory_size = way_of(name, 5, 7, dtype)
    parts = memories(counts, memory_size, dtype)
    query = torch.randn(len(counts), query_size).to(dtype)
    with torch.inference_mode():
        context = attention(query, *with_keys(attention, ragged_of(parts), name)).context
    assert context.dtype is dtype
    expected = [attend_one(row, part, score) for row, part in zip(query, parts)]
    assert_close(context.double(), torch.tensor(expected, dtype=torch.float64), TOLERANCES[dtype])


@pytest.mark.parametrize("name", WAYS)
def test_several_queries_share_a_memory(name):
    attention, _, query_size, memory_size = way_of(name, 5, 7)
    parts = memories([3, 0, 8, 1], memory_size)
    query = torch.randn(4 * 3, query_size)
    shared = attention(query, *with_keys(attention, ragged_of(parts), name)).context
    repeated = [part for part in parts for _ in range(3)]
    assert_close(shared, attention(query, *with_keys(attention, ragged_of(repeated), name)).context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_scores_do_not_overflow(dtype):
    memory = torch.tensor([[200.0, 0.0], [0.0, 200.0], [200.0, 0.0]], dtype=dtype)
    query = torch.tensor([[200.0, 100.0], [-200.0, -100.0]], dtype=dtype)
    context = DotAttention()(query, ragged_of([memory, memory])).context
    assert context.tolist() == [[200.0, 0.0], [0.0, 200.0]]


@pytest.mark.parametrize("name", WAYS)
def test_company_does_not_matter(name):
    attention, _, query_size, memory_size = way_of(name, 5, 7)
    parts, query = memories([4, 0, 9, 2, 30], memory_size), torch.randn(5, query_size)
    order = [3, 0, 4, 2, 1]

    def contexts(rows):
        memory = ragged_of([parts[row] for row in rows])
        return attention(query[rows], *with_keys(attention, memory, name)).context

    together = contexts(range(5))
    assert_close(contexts(order), together[order])
    assert_close(torch.cat([contexts([row]) for row in range(5)]), together)


def test_gradients_reach_all_inputs():
    attention = AdditiveAttention(3, 4, 5).double()
    query = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 5])
    assert torch.autograd.gradcheck(lambda q, v: attention(q, RaggedRows(v, offsets)).context, (query, values))


def make_decoder(kind, name, feeding):
    attention = {"dot": DotAttention, "general": lambda: DotAttention(6, 6)}.get(
        name, lambda: AdditiveAttention(6, 6, 4)
    )()
    return kind(9, 5, 6, 2, attention=attention, input_feeding=feeding)


def reference_step(decoder, token, state, attended, memory):
    """One row of one step in float64, its recurrent half by torch: logits, states, attended."""
    attention = decoder.attention
    if isinstance(attention, AdditiveAttention):
        score = additive(*(value.detach() for value in (attention.query.weight, attention.key.weight, attention.score)))
    else:
        score = dot if attention.weight is None else general(attention.weight.detach())
    kind = nn.LSTMCell if len(state) == 2 else nn.GRUCell
    recurrent = kind(decoder.recurrent.input_size, 6).double()
    recurrent.load_state_dict({key: value.double() for key, value in decoder.recurrent.state_dict().items()})
    x = decoder.embedding.weight[token].double()
    x = torch.cat([x, attended.double()]) if decoder.input_feeding else x
    old = tuple(value.double() for value in state)
    new = recurrent(x, old) if len(state) == 2 else (recurrent(x, old[0]),)
    context = torch.tensor(attend_one(new[0], memory, score), dtype=torch.float64)
    attended = torch.tanh(decoder.combine.weight.double() @ torch.cat([context, new[0]]))
    return decoder.projection.weight.double() @ attended + decoder.projection.bias.double(), new, attended


@pytest.mark.parametrize("feeding", [True, False], ids=["feeding", "plain"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("kind", [AttentionGRUDecoder, AttentionLSTMDecoder])
def test_a_decoder_step_is_that_of_each_row_alone(kind, name, feeding):
    decoder = make_decoder(kind, name, feeding)
    parts = memories([3, 0, 1, 8], 6)
    token = torch.tensor([0, 8, 2, 3])
    state = {key: torch.randn(4, 6) for key in decoder.states}
    attended = torch.randn(4, 6)
    given = dict(zip(("memory", "keys"), with_keys(decoder.attention, ragged_of(parts), name)))
    given |= {"attended": attended} if feeding else {}
    with torch.inference_mode():
        chosen = decoder(token, **state, **given)
        scored = decoder.scores(token, **state, **given)
    for row in range(4):
        states = tuple(value[row] for value in state.values())
        logits, new, after = reference_step(decoder, int(token[row]), states, attended[row], parts[row])
        assert_close(scored["logits"][row].double(), logits)
        assert int(chosen["token"][row]) == int(logits.argmax())
        for key, value in zip((*decoder.states, "attended"), (*new, after)):
            assert_close(chosen[key][row].double(), value)
            assert_close(scored[key][row].double(), value)
    assert torch.equal(chosen["stop"], chosen["token"] == 2)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("kind", [AttentionGRUDecoder, AttentionLSTMDecoder])
def test_a_decoder_carries_its_state(kind, name):
    decoder = make_decoder(kind, name, True)
    made = cell(decoder, decoder.input_specs())
    assert set(made.carry) == {"token", "attended", *decoder.states}
    assert made.outputs["stop"].shape == ()


def test_what_does_not_fit_is_refused():
    with pytest.raises(DefinitionError, match="both sizes"):
        DotAttention(5)
    decoder = make_decoder(AttentionGRUDecoder, "dot", True)
    with pytest.raises(ValueError, match="attended"):
        decoder(torch.tensor([1]), torch.randn(1, 6), ragged_of(memories([2], 6)))
