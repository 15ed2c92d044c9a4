"""Transformer layers over ragged rows, against torch's layers with padding, T5 of ``transformers``, and formulas."""

import math

import pytest
import torch
from torch import nn

from cellrt.cells.paged_attention import Pages, append_pages
from cellrt.cells.positions import (
    LearnedPositions,
    LinearScaling,
    RelativePositions,
    RotaryPositions,
    SinusoidalPositions,
)
from cellrt.cells.transformer import MLP, CrossAttention, GatedMLP, Heads, SelfAttention, TransformerLayer
from cellrt.errors import DefinitionError
from tests.cells.toy_pages import spans_of

LENGTHS = [5, 1, 9, 3]
SPANS = spans_of([range(length) for length in LENGTHS])
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


def split(rows):
    return rows.split(LENGTHS)


def paged(key, value, page_size=4):
    """Empty pages for the rows of ``SPANS``, one node's between another's."""
    count = -(-max(LENGTHS) // page_size)
    tables = torch.arange(count * len(LENGTHS), dtype=torch.int32).view(count, -1).t().contiguous()
    shape = tables.numel(), page_size, *key.shape[1:]
    return Pages(key.new_zeros(shape), value.new_zeros(shape), tables, torch.tensor(LENGTHS, dtype=torch.int32))


def new_pages(heads, size):
    empty = torch.zeros(1, heads, size)
    return paged(empty, empty)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_is_that_of_torch_with_padding(norm_first, bias, activation):
    torch.manual_seed(0)
    options = {"activation": activation, "batch_first": True, "norm_first": norm_first, "bias": bias}
    layer = nn.TransformerEncoderLayer(24, 4, 50, **options).eval()
    x = torch.randn(sum(LENGTHS), 24)
    padded = nn.utils.rnn.pad_sequence(split(x), batch_first=True)
    is_padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]
    wanted = layer(padded, src_key_padding_mask=is_padding)[~is_padding]
    torch.testing.assert_close(TransformerLayer.from_torch(layer)(x, SPANS), wanted, **CLOSE)


@torch.inference_mode()
def test_tcbs_figures_2_5_and_6_a_sentence_of_a_flat_task_is_encoded_as_it_is_alone():
    """With the numbers of torch's layers, positions that begin anew, and attention to its own rows alone."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(24, 4, 50, batch_first=True).eval() for _ in range(2)]
    ours, positions = [TransformerLayer.from_torch(layer) for layer in layers], SinusoidalPositions(24)

    def encode(x, spans):
        x = x + positions(spans.positions)
        for layer in ours:
            x = layer(x, spans)
        return x

    def alone(x):
        x = (x + positions(torch.arange(len(x))))[None]
        for layer in layers:
            x = layer(x)
        return x[0]

    x = torch.randn(sum(LENGTHS), 24)
    for found, own in zip(split(encode(x, SPANS)), split(x)):
        torch.testing.assert_close(found, alone(own), **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_layer_is_that_of_torch_step_by_step(norm_first):
    """Each step takes the next row of every node that has one; the memory's keys and values are made once."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(24, 4, 50, batch_first=True, norm_first=norm_first).eval()
    x, memory_rows = torch.randn(sum(LENGTHS), 24), torch.randn(14, 24)
    memories = memory_rows.split([2, 7, 4, 1])
    wanted = [
        layer(rows[None], memory[None], tgt_mask=nn.Transformer.generate_square_subsequent_mask(len(rows)))[0]
        for rows, memory in zip(split(x), memories)
    ]
    made = TransformerLayer.from_torch(layer)
    pages = new_pages(4, 6)
    memory = Pages.of_rows(*made.cross.memory(memory_rows), torch.tensor([0, 2, 9, 13, 14], dtype=torch.int32))
    for step in range(max(LENGTHS)):
        spans = spans_of([[step] if step < length else [] for length in LENGTHS])
        own = pages._replace(lengths=torch.full((4,), step + 1, dtype=torch.int32))
        rows = torch.stack([rows[step] for rows in split(x) if step < len(rows)])
        found = made(rows, spans, own, memory)
        expected = torch.stack([rows[step] for rows in wanted if step < len(rows)])
        torch.testing.assert_close(found, expected, **CLOSE)


@torch.inference_mode()
def test_cross_attention_reads_a_memory_in_pages_too():
    torch.manual_seed(0)
    cross = CrossAttention(Heads(24, 4, bias=True), memory_size=10)
    rows, x = torch.randn(sum(LENGTHS), 10), torch.randn(4, 24)
    key, value = cross.memory(rows)
    spans = spans_of([[7], [0, 1], [], [2]])
    pages = paged(key, value)
    append_pages(pages, SPANS, key, value)
    in_one = cross(x, spans, Pages.of_rows(key, value, SPANS.offsets))
    torch.testing.assert_close(cross(x, spans, pages), in_one, atol=0, rtol=0)


@torch.inference_mode()
def test_other_activations_of_torch_layers_are_refused():
    with pytest.raises(DefinitionError, match="expected the activation relu or gelu"):
        TransformerLayer.from_torch(nn.TransformerEncoderLayer(8, 2, activation=torch.tanh))


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(DefinitionError, match="a multiple of kv_heads"):
        Heads(24, 4, 3)
    with pytest.raises(DefinitionError, match="a divisor of hidden"):
        Heads(25, 4)


@torch.inference_mode()
def test_mlps_are_their_formulas():
    torch.manual_seed(0)
    x, plain, gated = torch.randn(3, 6), MLP(6, 10), GatedMLP(6, 10)
    inner = plain.up(x)
    wanted = plain.down(0.5 * inner * (1 + torch.erf(inner / math.sqrt(2))))
    torch.testing.assert_close(plain(x), wanted)
    gate = gated.gate(x)
    torch.testing.assert_close(gated(x), gated.down(gate / (1 + torch.exp(-gate)) * gated.up(x)))


@torch.inference_mode()
@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_t5_layers_are_those_of_transformers(feed_forward):
    """An encoder's and a decoder's stack of two layers, with relative positions that the layers share."""
    t5 = pytest.importorskip("transformers", reason="needs transformers: pip install transformers").models.t5
    torch.manual_seed(0)
    config = t5.T5Config(
        vocab_size=30, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, feed_forward_proj=feed_forward,
    )  # fmt: skip
    theirs = t5.T5Model(config).eval()
    for stack in (theirs.encoder, theirs.decoder):
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_()
    lengths = [30, 17]
    sources = [torch.randint(0, 30, (length,)) for length in lengths]
    targets = [torch.randint(0, 30, (length,)) for length in (4, 25)]
    spans, target_spans = (spans_of([range(len(one)) for one in group]) for group in (sources, targets))
    x = theirs.shared(torch.cat(sources))
    for layer in t5_stack(theirs.encoder, config):
        x = layer(x, spans)
    memory_rows = theirs.encoder.final_layer_norm(x)
    x = theirs.shared(torch.cat(targets))
    for layer in t5_stack(theirs.decoder, config):
        memory = Pages.of_rows(*layer.cross.memory(memory_rows), spans.offsets)
        x = layer(x, target_spans, memory=memory)
    found = theirs.decoder.final_layer_norm(x)
    for one, other, rows in zip(sources, targets, found.split([4, 25])):
        wanted = theirs(input_ids=one[None], decoder_input_ids=other[None]).last_hidden_state[0]
        torch.testing.assert_close(rows, wanted, **CLOSE)


def t5_stack(stack, config):
    """Our layers with the weights of a stack of T5."""
    sizes = Heads(config.d_model, config.num_heads, head_dim=config.d_kv, scale=1.0)
    first = stack.block[0].layer[0].SelfAttention.relative_attention_bias
    buckets, reach = config.relative_attention_num_buckets, config.relative_attention_max_distance
    relative = RelativePositions(config.num_heads, buckets, reach, both_ways=not stack.is_decoder)
    relative.weight.copy_(first.weight)
    layers = []
    for block in stack.block:
        parts = block.layer
        gated = config.is_gated_act
        dense = parts[-1].DenseReluDense
        mlp = (GatedMLP if gated else MLP)(config.d_model, config.d_ff, dense.act, bias=False)
        made = TransformerLayer(
            SelfAttention(sizes, causal=stack.is_decoder, relative=relative),
            mlp,
            lambda: nn.RMSNorm(config.d_model, eps=config.layer_norm_epsilon),
            cross=CrossAttention(sizes) if stack.is_decoder else None,
        )
        copy_t5_attention(made.attention, parts[0].SelfAttention)
        if made.cross is not None:
            copy_t5_attention(made.cross, parts[1].EncDecAttention)
            made.cross_norm.load_state_dict(parts[1].layer_norm.state_dict())
        names = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
        for mine, other in names.items():
            getattr(mlp, mine).load_state_dict(getattr(dense, other).state_dict())
        made.attention_norm.load_state_dict(parts[0].layer_norm.state_dict())
        made.mlp_norm.load_state_dict(parts[-1].layer_norm.state_dict())
        layers.append(made)
    return layers


def copy_t5_attention(mine, theirs):
    for name in ("query", "key", "value", "out"):
        getattr(mine, name).load_state_dict(getattr(theirs, name[0]).state_dict())


def test_relative_positions_of_small_distances_have_a_bucket_each():
    relative = RelativePositions(1, buckets=8, max_distance=16)
    with torch.no_grad():
        relative.weight.copy_(torch.arange(8.0)[:, None])
    table = relative()[0]
    assert table.shape == (33,)
    assert table[16:].tolist() == [0.0] * 17  # keys after the query
    assert table[16 - torch.arange(17)].tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7]


def test_relative_positions_follow_their_weights():
    relative = RelativePositions(2)
    with torch.no_grad():
        before = relative().clone()
        relative.weight.add_(1.0)
        torch.testing.assert_close(relative(), before + 1)


@pytest.mark.parametrize("halves", [False, True])
def test_sinusoidal_positions_are_sines_and_cosines(halves):
    found = SinusoidalPositions(6, halves=halves)(torch.tensor([0, 3, 50]))
    for row, position in zip(found.tolist(), (0, 3, 50)):
        angles = [position / 10_000 ** (k / 3) for k in range(3)]
        sines, cosines = [math.sin(a) for a in angles], [math.cos(a) for a in angles]
        wanted = sines + cosines if halves else [x for pair in zip(sines, cosines) for x in pair]
        assert row == pytest.approx(wanted, abs=1e-5)


def test_learned_positions_end():
    positions = LearnedPositions(4, 3)
    assert torch.equal(positions(torch.tensor([3, 0])), positions.weight[[3, 0]])
    with pytest.raises(IndexError):
        positions(torch.tensor([4]))


def test_rotary_scores_depend_on_the_distance_alone():
    rotary = RotaryPositions(8)
    query, key = torch.randn(1, 1, 8).expand(2, 1, 8), torch.randn(1, 1, 8).expand(2, 1, 8)
    turned, _ = rotary(query, key, torch.tensor([9, 1009]))
    _, other = rotary(query, key, torch.tensor([4, 1004]))
    scores = (turned * other).sum(-1)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)


def test_linear_scaling_divides_positions():
    query = torch.randn(3, 2, 8)
    stretched = RotaryPositions(8, scaling=LinearScaling(4.0))(query, query, torch.tensor([0, 8, 40]))
    plain = RotaryPositions(8)(query, query, torch.tensor([0, 2, 10]))
    torch.testing.assert_close(stretched, plain)


@pytest.mark.parametrize("kind", [RotaryPositions, SinusoidalPositions])
def test_odd_sizes_are_refused(kind):
    with pytest.raises(DefinitionError, match="expected an even"):
        kind(5)
