"""The LSTM cells against torch, on the fused path (under ``inference_mode``) and on the plain one."""

import copy
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cellrt.cells import EmbeddingLSTMCell, LSTMCell, LSTMInput, LSTMRecurrent
from cellrt.cells.lstm import LSTMState
from cellrt.errors import DefinitionError
from tests.cells.gated import RUNS, SIZES, assert_close, final_rows, normal, packed
from tests.effort import examples


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def path(request):
    """Run under ``inference_mode``, where the kernels are used, and with gradients, where they are not."""
    with torch.inference_mode(request.param):
        yield request.param


def state(rows: int, hidden: int) -> LSTMState:
    return LSTMState(normal(rows, hidden), normal(rows, hidden))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "hidden"), SIZES)
def test_one_step_equals_torch(path, inputs, hidden, bias):
    reference = nn.LSTMCell(inputs, hidden, bias=bias)
    cell = LSTMCell.from_torch(reference)
    for rows in (1, 2, 3, 7, 49, 130):
        x, before = normal(rows, inputs), state(rows, hidden)
        after = cell(x, before.h, before.c)
        h, c = reference(x, tuple(before))
        assert_close(after.h, h)
        assert_close(after.c, c)


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
@pytest.mark.parametrize(("inputs", "hidden"), SIZES)
def test_runs_equal_torch(path, inputs, hidden, batch_sizes):
    reference = nn.LSTM(inputs, hidden)
    cell = LSTMCell.from_torch(reference)
    x, before = normal(sum(batch_sizes), inputs), state(batch_sizes[0], hidden)
    after = cell.steps(batch_sizes, x=x, h=before.h, c=before.c)
    expected, (h, c) = reference(packed(batch_sizes, x), (before.h[None], before.c[None]))
    assert_close(after.h, expected.data)
    assert_close(final_rows(batch_sizes, after.h), h[0])
    assert_close(final_rows(batch_sizes, after.c), c[0])


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
def test_halves_equal_the_whole(path, batch_sizes):
    whole = nn.LSTMCell(20, 33)
    cell, first, second = (kind.from_torch(whole) for kind in (LSTMCell, LSTMInput, LSTMRecurrent))
    x, before = normal(sum(batch_sizes), 20), state(batch_sizes[0], 33)
    gates = first(x).gates
    assert gates.shape == (sum(batch_sizes), 4 * 33)
    expected = cell.steps(batch_sizes, x=x, h=before.h, c=before.c)
    actual = second.steps(batch_sizes, gates=gates, h=before.h, c=before.c)
    assert_close(actual.h, expected.h)
    assert_close(actual.c, expected.c)
    rows = batch_sizes[0]
    assert_close(second(gates[:rows], before.h, before.c).c, expected.c[:rows])


@pytest.mark.parametrize("batch_sizes", RUNS, ids=str)
@pytest.mark.parametrize("fold", [True, False])
def test_tokens_equal_embedding_and_torch(path, fold, batch_sizes):
    table, reference = nn.Embedding(11, 20), nn.LSTM(20, 33)
    cell = EmbeddingLSTMCell.from_torch(table, reference, fold=fold)
    token, before = torch.randint(11, (sum(batch_sizes),)), state(batch_sizes[0], 33)
    after = cell.steps(batch_sizes, token=token, h=before.h, c=before.c)
    expected, _ = reference(packed(batch_sizes, table(token)), (before.h[None], before.c[None]))
    assert_close(after.h, expected.data)
    rows = batch_sizes[0]
    assert_close(cell(token[:rows], before.h, before.c).h, expected.data[:rows])


@settings(deadline=None, max_examples=examples(60))
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.lists(st.integers(1, 60), min_size=1, max_size=9).map(lambda sizes: sorted(sizes, reverse=True)),
    st.integers(0, 2**31),
)
def test_fused_equals_plain(inputs, hidden, batch_sizes, seed):
    torch.manual_seed(seed)
    cell = LSTMCell(inputs, hidden)
    x, before = normal(sum(batch_sizes), inputs), state(batch_sizes[0], hidden)
    plain = cell.steps(batch_sizes, x=x, h=before.h, c=before.c)
    with torch.inference_mode():
        fused = cell.steps(batch_sizes, x=x, h=before.h, c=before.c)
    assert_close(fused.h, plain.h.detach())
    assert_close(fused.c, plain.c.detach())


def test_rows_do_not_depend_on_each_other(path):
    cell = LSTMCell(20, 33)
    x, before = normal(61, 20), state(61, 33)
    order = torch.randperm(61)
    together = cell(x, before.h, before.c)
    assert_close(cell(x[order], before.h[order], before.c[order]).h, together.h[order])
    assert_close(cell(x[:7], before.h[:7], before.c[:7]).c, together.c[:7])


def test_inputs_are_left_alone_and_may_be_strided():
    cell = LSTMCell(20, 33)
    x, h, c = normal(9, 40)[:, ::2], normal(33, 9).t(), normal(18, 33)[::2]
    before = [tensor.clone() for tensor in (x, h, c)]
    expected = cell(x, h, c)
    with torch.inference_mode():
        actual = cell(x, h, c)
    assert_close(actual.c, expected.c.detach())
    assert all(torch.equal(tensor, copied) for tensor, copied in zip((x, h, c), before, strict=True))


def test_no_rows():
    cell = LSTMCell(3, 5)
    with torch.inference_mode():
        assert cell(normal(0, 3), normal(0, 5), normal(0, 5)).h.shape == (0, 5)


def test_large_and_not_finite_inputs():
    reference = nn.LSTMCell(4, 8)
    cell = LSTMCell.from_torch(reference)
    x = torch.tensor([[1e30] * 4, [-1e30] * 4, [float("nan")] * 4, [float("inf")] * 4])
    with torch.inference_mode():
        after, expected = (
            cell(x, torch.zeros(4, 8), torch.ones(4, 8)),
            reference(x, (torch.zeros(4, 8), torch.ones(4, 8))),
        )
        torch.testing.assert_close(after.h, expected[0], equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_take_the_plain_path(dtype):
    reference = nn.LSTMCell(20, 33).to(dtype)
    cell = LSTMCell.from_torch(reference)
    x, h, c = (normal(6, size).to(dtype) for size in (20, 33, 33))
    with torch.inference_mode():
        assert_close(cell(x, h, c).h, reference(x, (h, c))[0], 1e-6 if dtype is torch.float64 else 2e-2)
        assert cell.steps([4, 2], x=x, h=h[:4], c=c[:4]).c.dtype is dtype


def test_meta_tensors_give_shapes():
    cell = LSTMCell(20, 33).to("meta")
    with torch.inference_mode():
        after = cell(*(torch.empty(6, size, device="meta") for size in (20, 33, 33)))
    assert after.h.shape == after.c.shape == (6, 33)


def test_fused_path_keeps_to_float32_under_another_default():
    cell = LSTMCell(3, 5)
    x, before = normal(2, 3), state(2, 5)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            assert cell(x, before.h, before.c).h.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_flow():
    cell = EmbeddingLSTMCell(7, 4, 5)
    cell.steps([2, 1], token=torch.tensor([1, 2, 3]), h=normal(2, 5), c=normal(2, 5)).h.sum().backward()
    assert all(parameter.grad is not None for parameter in cell.parameters())


@pytest.mark.parametrize("kind", [LSTMCell, LSTMRecurrent, EmbeddingLSTMCell])
def test_export(kind):
    cell = kind(7, 4, 5) if kind is EmbeddingLSTMCell else kind(7, 5) if kind is LSTMCell else kind(5)
    first = torch.randint(7, (3,)) if kind is EmbeddingLSTMCell else normal(3, 7 if kind is LSTMCell else 20)
    arguments = (first, normal(3, 5), normal(3, 5))
    with torch.inference_mode():
        expected = cell(*arguments)
    rows = torch.export.Dim("rows", min=1, max=512)
    with torch.no_grad():
        program = torch.export.export(cell, arguments, dynamic_shapes=({0: rows},) * 3)
    more = [torch.cat([value, value]) for value in arguments]
    assert_close(program.module()(*more)[0][:3].detach(), expected.h.clone())


def test_changed_weights_are_noticed():
    cell = EmbeddingLSTMCell(7, 4, 5)
    token, before = torch.tensor([1, 2]), state(2, 5)
    with torch.inference_mode():
        first = cell(token, before.h, before.c).h
    other = EmbeddingLSTMCell(7, 4, 5)
    cell.load_state_dict(other.state_dict())
    with torch.inference_mode():
        second, expected = cell(token, before.h, before.c).h, other(token, before.h, before.c).h
    assert torch.equal(second, expected)
    assert not torch.equal(first, second)


def test_packed_weights_are_neither_saved_nor_copied():
    cell = LSTMCell(3, 5)
    x, before = normal(2, 3), state(2, 5)
    with torch.inference_mode():
        expected = cell(x, before.h, before.c).h
        copies = copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))
        assert set(cell.state_dict()) == {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
        cell.weight_hh.zero_()
        for twin in copies:
            assert torch.equal(twin(x, before.h, before.c).h, expected)


def test_threads_share_a_cell():
    cell = LSTMCell(20, 33)
    x, before = normal(61, 20), state(30, 33)
    with torch.inference_mode():
        expected = copy.deepcopy(cell).steps([30, 20, 11], x=x, h=before.h, c=before.c)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            with torch.inference_mode():
                after = cell.steps([30, 20, 11], x=x, h=before.h, c=before.c)
            if not (torch.equal(after.h, expected.h) and torch.equal(after.c, expected.c)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_wrong_shapes_and_tokens_are_refused():
    cell, words = LSTMCell(3, 5), EmbeddingLSTMCell(7, 4, 5)
    h = normal(2, 5)
    with torch.inference_mode():
        for batch_sizes in ([], [1, 2], [2, 0]):
            with pytest.raises(ValueError, match="batch_sizes must be positive"):
                cell.steps(batch_sizes, x=normal(3, 3), h=h, c=h)
        with pytest.raises(ValueError, match="have 4 rows"):
            cell.steps([2, 1], x=normal(4, 3), h=h, c=h)
        with pytest.raises(ValueError, match="x has shape"):
            cell(normal(2, 4), h, h)
        with pytest.raises(ValueError, match="c has shape"):
            cell(normal(2, 3), h, normal(3, 5))
        for token in (7, -1):
            with pytest.raises(IndexError):
                words(torch.tensor([0, token]), h, h)
        with pytest.raises(ValueError, match="gates has shape"):
            LSTMRecurrent(5)(normal(2, 21), h, h)


def test_weights_of_another_type_are_refused():
    h = normal(2, 5)
    with torch.inference_mode():
        for cell in (LSTMCell(3, 5).double(), LSTMCell(3, 5).to("meta")):
            with pytest.raises((TypeError, RuntimeError)):
                cell(normal(2, 3), h, h)
        with pytest.raises((TypeError, RuntimeError)):
            EmbeddingLSTMCell(7, 4, 5).double()(torch.tensor([0, 1]), h, h)


@pytest.mark.parametrize(
    "module",
    [nn.GRUCell(3, 5), nn.LSTM(3, 5, 2), nn.LSTM(3, 5, bidirectional=True), nn.LSTM(3, 5, proj_size=2)],
)
def test_other_modules_are_refused(module):
    with pytest.raises(DefinitionError):
        LSTMCell.from_torch(module)
