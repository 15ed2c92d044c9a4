"""Scaled rotary positions and T5's relative positions against the published formulas, number by number.

``transformers`` is needed for none of it; where it is installed, test_llama.py and test_transformer.py compare with it.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cellrt.cells.paged_attention import Pages
from cellrt.cells.positions import Llama3Scaling, RelativePositions, RotaryPositions, Scaling, YarnScaling
from cellrt.cells.transformer import Heads, SelfAttention
from tests.cells.positions_oracle import (
    llama3_frequencies,
    t5_bucket,
    turned_pair,
    yarn_amplitude,
    yarn_frequencies,
)
from tests.cells.toy_pages import spans_of


@pytest.mark.parametrize("head_dim", [2, 8, 64, 128])
@pytest.mark.parametrize(
    ("base", "factor", "original", "low", "high"),
    [(500_000.0, 8.0, 8192, 1.0, 4.0), (500_000.0, 32.0, 8192, 1.0, 4.0), (500.0, 3.0, 32, 0.5, 2.0)],
)
def test_frequencies_of_llama_3_are_those_of_its_reference(head_dim, base, factor, original, low, high):
    made = RotaryPositions(head_dim, base, Llama3Scaling(factor, original, low, high))
    wanted = llama3_frequencies(head_dim, base, factor, original, low, high)
    assert made.frequencies.tolist() == pytest.approx(wanted, rel=1e-5)
    assert made.amplitude == 1.0


def test_frequencies_of_llama_3_1_are_those_worked_out_by_hand():
    """Its ``config.json``: heads of 128 numbers, base 500,000, factor 8, 8,192 positions, 1 to 4 turns of these.

    Number k makes 8192 / (2 pi 500000 ** (k / 64)) turns: k = 28 makes 4.19 and stays; k = 29 makes 3.4109, of which
    (3.4109 - 1) / 3 = 0.80363 stays; k = 32 makes 1.8438, of which 0.28128 stays: (0.28128 + 0.71872 / 8) / 707.107;
    k = 35 makes 0.9965 and is divided.
    """
    found = RotaryPositions(128, 500_000.0, Llama3Scaling(8.0, 8192)).frequencies.double()
    plain = RotaryPositions(128, 500_000.0).frequencies.double()
    assert found[:29].tolist() == pytest.approx(plain[:29].tolist())
    assert float(found[32]) == pytest.approx(5.24847e-4, rel=1e-5)
    assert (plain[35:] / found[35:]).tolist() == pytest.approx([8.0] * 29)
    assert float(found[29] / plain[29]) == pytest.approx(0.80363 + 0.19637 / 8, abs=1e-5)


@pytest.mark.parametrize("head_dim", [2, 8, 64, 128])
@pytest.mark.parametrize(
    ("base", "factor", "original", "high", "low"),
    [
        (1e6, 4.0, 32_768, 32.0, 1.0),
        (10_000.0, 16.0, 4096, 32.0, 1.0),
        (500.0, 4.0, 32, 32.0, 1.0),
        (500.0, 1.0, 32, 4.0, 0.5),
    ],
)
def test_frequencies_of_yarn_are_those_of_its_paper(head_dim, base, factor, original, high, low):
    made = RotaryPositions(head_dim, base, YarnScaling(factor, original, low, high))
    wanted = yarn_frequencies(head_dim, base, factor, original, high, low)
    assert made.frequencies.tolist() == pytest.approx(wanted, rel=1e-5)
    assert made.amplitude == pytest.approx(yarn_amplitude(factor))


def test_frequencies_of_qwen_with_yarn_are_those_worked_out_by_hand():
    """As Qwen 2.5's model cards say: heads of 128 numbers, base 1,000,000, factor 4, 32,768 positions; betas 32 and 1.

    64 ln(32768 / (32 * 2 pi)) / ln(1e6) = 23.6 and 64 ln(32768 / (2 pi)) / ln(1e6) = 39.7: the ramp is from 23 to 40.
    Of number 32, 1e-3, 9 / 17 is divided: 1e-3 * (8 / 17 + 9 / 17 / 4) = 6.02941e-4. 0.1 ln(4) + 1 = 1.138629.
    """
    scaling = YarnScaling(4.0, 32_768)
    found = RotaryPositions(128, 1e6, scaling).frequencies.double()
    plain = RotaryPositions(128, 1e6).frequencies.double()
    assert found[:24].tolist() == pytest.approx(plain[:24].tolist())
    assert float(found[32]) == pytest.approx(6.02941e-4, rel=1e-5)
    assert float(found[24] / plain[24]) == pytest.approx(16 / 17 + 1 / 17 / 4)
    assert (plain[40:] / found[40:]).tolist() == pytest.approx([4.0] * 24)
    assert scaling.amplitude == pytest.approx(1.138629, abs=1e-6)


SCALED = [
    (Llama3Scaling(8.0, 32), llama3_frequencies(8, 500.0, 8.0, 32), 1.0),
    (YarnScaling(4.0, 32), yarn_frequencies(8, 500.0, 4.0, 32), yarn_amplitude(4.0)),
]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["our kernel", "torch"])
@pytest.mark.parametrize(("scaling", "frequencies", "amplitude"), SCALED, ids=["llama3", "yarn"])
def test_heads_are_turned_by_scaled_angles(dtype, scaling: Scaling, frequencies, amplitude):
    positions = [0, 5, 31, 100]
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, len(positions), 3, 8, generator=generator)
    for given, turned in zip(
        (query, key), RotaryPositions(8, 500.0, scaling)(query, key, torch.tensor(positions, dtype=dtype))
    ):
        for row, position in enumerate(positions):
            for numbers, found in zip(given[row].tolist(), turned[row].tolist()):
                pairs = [
                    turned_pair(numbers[k], numbers[k + 4], position * frequency, amplitude)
                    for k, frequency in enumerate(frequencies)
                ]
                left, right = zip(*pairs)
                assert found == pytest.approx([*left, *right], abs=2e-5)


def numbered(buckets: int, max_distance: int, both_ways: bool) -> list[float]:
    """The bucket of each distance, from ``-max_distance`` on."""
    relative = RelativePositions(1, buckets, max_distance, both_ways)
    with torch.no_grad():
        relative.weight.copy_(torch.arange(float(buckets))[:, None])
        return relative()[0].tolist()


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 12), (16, 50), (64, 256), (8, 16)])
def test_buckets_are_those_of_t5(buckets, max_distance, both_ways):
    distances = range(-max_distance, max_distance + 1)
    wanted = [t5_bucket(distance, buckets, max_distance, both_ways=both_ways) for distance in distances]
    assert numbered(buckets, max_distance, both_ways) == wanted


def test_buckets_of_t5s_own_sizes_are_those_worked_out_by_hand():
    """32 buckets to distance 128. An encoder has 16 each way, of which 8 have one distance each, and from 8 on bucket
    8 + k begins at 8 * 16 ** (k / 8): 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5. A decoder has 16 of one distance each, and
    16 + k begins at 16 * 8 ** (k / 16): 16, 18.2, 20.7, ..., 112.4."""
    encoder, decoder = numbered(32, 128, True), numbered(32, 128, False)
    back = {0: 0, 1: 1, 7: 7, 8: 8, 11: 8, 12: 9, 15: 9, 16: 10, 22: 10, 23: 11, 45: 12, 46: 13, 64: 14, 90: 14, 91: 15}
    for distance, bucket in {**back, 128: 15}.items():
        assert encoder[128 - distance] == bucket
        assert encoder[128 + distance] == (16 + bucket if distance else 0)
    for distance, bucket in {0: 0, 15: 15, 16: 16, 18: 16, 19: 17, 20: 17, 21: 18, 112: 30, 113: 31, 128: 31}.items():
        assert decoder[128 - distance] == bucket
        assert decoder[128 + distance] == 0


@torch.inference_mode()
@pytest.mark.parametrize(("causal", "in_pages"), [(False, False), (True, False), (True, True)])
def test_attention_with_relative_positions_adds_to_each_score_the_number_of_its_bucket(causal, in_pages):
    """As T5 has it: scores are not scaled. Against torch's attention with all biases written out."""
    torch.manual_seed(1)
    heads, size, lengths = 4, 6, [30, 1, 17]
    relative = RelativePositions(heads, 8, 12, both_ways=not causal)
    attention = SelfAttention(Heads(24, heads, head_dim=size, scale=1.0), causal=causal, relative=relative)
    x = torch.randn(sum(lengths), 24)
    pages = None
    if in_pages:
        tables = torch.randperm(30).to(torch.int32).view(3, 10)
        pages = Pages(*torch.zeros(2, 30, 3, heads, size), tables, torch.tensor(lengths, dtype=torch.int32))
    found = attention(x, spans_of([range(length) for length in lengths]), pages)
    for rows, mine in zip(x.split(lengths), found.split(lengths)):
        count = len(rows)
        bias = torch.zeros(heads, count, count)
        for row in range(count):
            for k in range(count):
                bias[:, row, k] = relative.weight[t5_bucket(k - row, 8, 12, both_ways=not causal)]
                if causal and k > row:
                    bias[:, row, k] = -torch.inf
        query, key, value = (
            (rows @ part.weight.T).view(count, heads, size).transpose(0, 1)
            for part in (attention.query, attention.key, attention.value)
        )
        read = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        torch.testing.assert_close(mine, read.transpose(0, 1).flatten(1) @ attention.out.weight.T, rtol=1e-5, atol=2e-5)
