"""The GRU cells against torch, on the fused path (under ``inference_mode``) and on the plain one."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cellrt.cells import EmbeddingGRUCell, EmbeddingGRUDecoder, GRUCell, GRUInput, GRURecurrent
from cellrt.errors import DefinitionError
from tests.cells.gated import RUNS, SIZES, assert_close, final_rows, normal, packed
from tests.effort import examples


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def path(request):
    """Run under ``inference_mode``, where the kernels are used, and with gradients, where they are not."""
    with torch.inference_mode(request.param):
        yield request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "hidden"), SIZES)
def test_one_step_equals_torch(path, inputs, hidden, bias):
    reference = nn.GRUCell(inputs, hidden, bias=bias)
    cell = GRUCell.from_torch(reference)
    for rows in (1, 2, 3, 4, 7, 49, 130):
        x, h = normal(rows, inputs), normal(rows, hidden)
        assert_close(cell(x, h).h, reference(x, h))


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
@pytest.mark.parametrize(("inputs", "hidden"), SIZES)
def test_runs_equal_torch(path, inputs, hidden, batch_sizes):
    reference = nn.GRU(inputs, hidden)
    cell = GRUCell.from_torch(reference)
    x, h = normal(sum(batch_sizes), inputs), normal(batch_sizes[0], hidden)
    after = cell.steps(batch_sizes, x=x, h=h).h
    expected, last = reference(packed(batch_sizes, x), h[None])
    assert_close(after, expected.data)
    assert_close(final_rows(batch_sizes, after), last[0])


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
def test_halves_equal_the_whole(path, batch_sizes):
    whole = nn.GRUCell(20, 33)
    cell, first, second = (kind.from_torch(whole) for kind in (GRUCell, GRUInput, GRURecurrent))
    x, h = normal(sum(batch_sizes), 20), normal(batch_sizes[0], 33)
    gates = first(x).gates
    expected = cell.steps(batch_sizes, x=x, h=h).h
    assert_close(second.steps(batch_sizes, gates=gates, h=h).h, expected)
    assert_close(second(gates[: batch_sizes[0]], h).h, expected[: batch_sizes[0]])


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
@pytest.mark.parametrize("fold", [True, False])
def test_tokens_equal_embedding_and_torch(path, fold, batch_sizes):
    table, reference = nn.Embedding(11, 20), nn.GRU(20, 33)
    cell = EmbeddingGRUCell.from_torch(table, reference, fold=fold)
    token, h = torch.randint(11, (sum(batch_sizes),)), normal(batch_sizes[0], 33)
    expected, _ = reference(packed(batch_sizes, table(token)), h[None])
    assert_close(cell.steps(batch_sizes, token=token, h=h).h, expected.data)
    assert_close(cell(token[: batch_sizes[0]], h).h, expected.data[: batch_sizes[0]])


@settings(deadline=None, max_examples=examples(60))
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.lists(st.integers(1, 60), min_size=1, max_size=9).map(lambda sizes: sorted(sizes, reverse=True)),
    st.integers(0, 2**31),
)
def test_fused_equals_plain(inputs, hidden, batch_sizes, seed):
    torch.manual_seed(seed)
    cell = GRUCell(inputs, hidden)
    x, h = normal(sum(batch_sizes), inputs), normal(batch_sizes[0], hidden)
    plain = cell.steps(batch_sizes, x=x, h=h).h
    with torch.inference_mode():
        assert_close(cell.steps(batch_sizes, x=x, h=h).h, plain.detach())


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
@pytest.mark.parametrize("fold", [True, False])
def test_decoder_feeds_its_tokens_back(path, fold, batch_sizes):
    table, recurrent, projection = nn.Embedding(35, 20), nn.GRUCell(20, 33), nn.Linear(33, 35)
    decoder = EmbeddingGRUDecoder.from_torch(table, recurrent, projection, end_token=3, fold=fold)
    token, h = torch.randint(35, (batch_sizes[0],)), normal(batch_sizes[0], 33)
    after = decoder.steps(batch_sizes, token=token, h=h)
    start = 0
    for rows in batch_sizes:
        h = recurrent(table(token[:rows]), h[:rows])
        token = after["token"][start : start + rows]
        logits = projection(h)
        # Among logits equal within the tolerance any choice is right.
        assert_close(logits.gather(1, token[:, None])[:, 0], logits.max(dim=1).values, 1e-4)
        assert_close(after["h"][start : start + rows], h)
        start += rows
    assert torch.equal(after["stop"], after["token"] == 3)
    first = decoder(torch.zeros(4, dtype=torch.int64), torch.zeros(4, 33))
    assert first["token"].dtype is torch.int64
    assert first["stop"].dtype is torch.bool
    assert len(set(first["token"].tolist())) == 1


def test_decoder_export_and_meta():
    decoder = EmbeddingGRUDecoder(9, 4, 5, end_token=3)
    arguments = (torch.randint(9, (3,)), normal(3, 5))
    rows = torch.export.Dim("rows", min=1, max=512)
    with torch.no_grad():
        program = torch.export.export(decoder, arguments, dynamic_shapes=({0: rows},) * 2)
        expected = decoder(*arguments)
    actual = program.module()(*arguments)
    assert torch.equal(actual["token"], expected["token"])
    assert_close(actual["h"].detach(), expected["h"])
    shapes = copy.deepcopy(decoder).to("meta")(*(value.to("meta") for value in arguments))
    assert [tuple(output.shape) for output in shapes.values()] == [(3,), (3,), (3, 5)]


def test_rows_do_not_depend_on_each_other(path):
    cell = GRUCell(20, 33)
    x, h = normal(61, 20), normal(61, 33)
    order = torch.randperm(61)
    together = cell(x, h).h
    assert_close(cell(x[order], h[order]).h, together[order])
    assert_close(cell(x[:7], h[:7]).h, together[:7])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_take_the_plain_path(dtype):
    reference = nn.GRUCell(20, 33).to(dtype)
    cell = GRUCell.from_torch(reference)
    x, h = normal(6, 20).to(dtype), normal(6, 33).to(dtype)
    with torch.inference_mode():
        assert_close(cell(x, h).h, reference(x, h), 1e-6 if dtype is torch.float64 else 2e-2)


def test_wrong_shapes_tokens_and_modules_are_refused():
    decoder, h = EmbeddingGRUDecoder(7, 4, 5, end_token=3), normal(2, 5)
    with torch.inference_mode():
        with pytest.raises(IndexError):
            decoder(torch.tensor([0, 7]), h)
        with pytest.raises(ValueError, match="token has shape"):
            decoder.steps([2, 1], token=torch.tensor([0, 1, 2]), h=h)
        with pytest.raises(ValueError, match="h has shape"):
            GRUCell(3, 5)(normal(2, 3), normal(2, 6))
    for module in (nn.LSTMCell(3, 5), nn.GRU(3, 5, 2)):
        with pytest.raises(DefinitionError):
            GRUCell.from_torch(module)
