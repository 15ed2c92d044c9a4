"""The LSTM decoder and the sampling one, against torch's modules stepped by hand."""

import pytest
import torch
from torch import nn

from cellrt.cells import EmbeddingGRUDecoder, EmbeddingLSTMDecoder, Sample, SamplingDecoder
from cellrt.errors import DefinitionError
from tests.cells.gated import RUNS, assert_close, normal


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3])
@torch.inference_mode()
def test_decoder_feeds_its_tokens_back(num_layers, fold, batch_sizes):
    table, recurrent, projection = nn.Embedding(35, 20), nn.LSTM(20, 33, num_layers), nn.Linear(33, 35)
    decoder = EmbeddingLSTMDecoder.from_torch(table, recurrent, projection, end_token=3, fold=fold)
    shape = (batch_sizes[0], 33) if num_layers == 1 else (batch_sizes[0], num_layers, 33)
    token, h, c = torch.randint(35, (batch_sizes[0],)), normal(*shape), normal(*shape)
    after = decoder.steps(batch_sizes, token=token, h=h, c=c)
    h, c = (value.view(batch_sizes[0], num_layers, 33).transpose(0, 1) for value in (h, c))
    start = 0
    for rows in batch_sizes:
        before = (h[:, :rows].contiguous(), c[:, :rows].contiguous())
        top, (h, c) = recurrent(table(token[:rows])[None], before)
        here = slice(start, start + rows)
        token = after.token[here]
        logits = projection(top[0])
        # Among logits equal within the tolerance any choice is right.
        assert_close(logits.gather(1, token[:, None])[:, 0], logits.max(dim=1).values, 1e-4)
        assert_close(after.h[here].reshape(rows, -1), h.transpose(0, 1).reshape(rows, -1))
        assert_close(after.c[here].reshape(rows, -1), c.transpose(0, 1).reshape(rows, -1))
        start += rows
    assert torch.equal(after.stop, after.token == 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [EmbeddingLSTMDecoder, EmbeddingGRUDecoder])
@torch.inference_mode()
def test_half_precision_is_close_to_single(kind, dtype):
    decoder = kind(35, 20, 33, end_token=3)
    states = [normal(6, 33) for _ in range(2 if kind is EmbeddingLSTMDecoder else 1)]
    token = torch.arange(6)
    expected = decoder(token, *states)
    actual = decoder.to(dtype)(token, *(state.to(dtype) for state in states))
    assert actual.h.dtype is dtype
    assert_close(actual.h.float(), expected.h, 2e-2)


@pytest.mark.parametrize("kind", [EmbeddingLSTMDecoder, EmbeddingGRUDecoder])
@torch.inference_mode()
def test_sampling_uses_the_decoders_logits(kind):
    decoder, sample = kind(11, 6, 8, end_token=3), Sample(3, temperature=0.7)
    sampling = SamplingDecoder(decoder, sample)
    states = [normal(5, 8) for _ in range(2 if kind is EmbeddingLSTMDecoder else 1)]
    token, seed, step = torch.arange(5), torch.tensor([9, 9, 1, 2, 3]), torch.tensor([0, 1, 0, 5, 0])
    after = sampling(token, seed, step, *states)
    greedy = decoder(token, *states)
    assert torch.equal(after["h"], greedy.h)
    expected = sample(nn.functional.linear(greedy.h, decoder.projection.weight, decoder.projection.bias), seed, step)
    assert torch.equal(after["token"], expected.token)
    assert torch.equal(after["step"], step + 1)


def test_modules_that_do_not_fit_are_refused():
    table, projection = nn.Embedding(9, 4), nn.Linear(5, 9)
    for module in (nn.GRUCell(4, 5), nn.LSTM(4, 5, bidirectional=True), nn.LSTM(4, 5, proj_size=2)):
        with pytest.raises(DefinitionError):
            EmbeddingLSTMDecoder.from_torch(table, module, projection, 1)
    with pytest.raises(DefinitionError, match="expected a projection"):
        EmbeddingLSTMDecoder.from_torch(table, nn.LSTM(4, 5), nn.Linear(5, 8), 1)
    with pytest.raises(DefinitionError, match="ends at token"):
        SamplingDecoder(EmbeddingLSTMDecoder(9, 4, 5, end_token=1), Sample(end_token=2))
