"""The tree-LSTM cells against the equations, node by node in float64, on the fused path and on the plain one."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cellrt
from cellrt.cells import (
    BinaryTreeLSTMCell,
    ChildSumTreeLSTMCell,
    EmbeddingChildSumTreeLSTMCell,
    EmbeddingTreeLSTMLeaf,
    NaryTreeLSTMCell,
    TreeLSTMLeaf,
)
from cellrt.definition.spec import RaggedRows
from cellrt.errors import DefinitionError
from tests.cells.gated import SIZES, assert_close, normal
from tests.effort import examples

ROWS = (1, 2, 7, 49, 130)
TOKEN = cellrt.rows(dtype=torch.int64)


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def path(request):
    """Run under ``inference_mode``, where the kernels are used, and with gradients, where they are not."""
    with torch.inference_mode(request.param):
        yield request.param


def sigmoid(value):
    return 1 / (1 + np.exp(-value))


def numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def gate_of(cell, gate: int, x, child_states) -> np.ndarray:
    """The sum of one gate of one node: its rows of the weights times what they act on."""
    units = cell.hidden_size
    rows = slice(gate * units, (gate + 1) * units)
    total = numbers(cell.bias)[rows].copy()
    if x is not None:
        input_rows = slice(min(gate, 3) * units, (min(gate, 3) + 1) * units)
        total += numbers(cell.weight_ih)[input_rows] @ x
    for k, h in enumerate(child_states):
        total += numbers(cell.weight_hh)[rows, k * units : (k + 1) * units] @ h
    return total


def finish(i, o, u, kept) -> tuple[np.ndarray, np.ndarray]:
    c = sigmoid(i) * np.tanh(u) + kept
    return sigmoid(o) * np.tanh(c), c


def leaf_node(cell, x) -> tuple[np.ndarray, np.ndarray]:
    return finish(*(gate_of(cell, gate, x, []) for gate in range(3)), 0.0)


def nary_node(cell, x, children) -> tuple[np.ndarray, np.ndarray]:
    """Equations 9 to 14 for one node; ``children`` are (h, c) in order."""
    states = [h for h, _ in children]
    kept = sum(sigmoid(gate_of(cell, 3 + k, x, states)) * c for k, (_, c) in enumerate(children))
    return finish(*(gate_of(cell, gate, x, states) for gate in range(3)), kept)


def child_sum_node(cell, x, children) -> tuple[np.ndarray, np.ndarray]:
    """Equations 2 to 8 for one node."""
    total = sum((h for h, _ in children), np.zeros(cell.hidden_size))
    kept = sum((sigmoid(gate_of(cell, 3, x, [h])) * c for h, c in children), np.zeros(cell.hidden_size))
    return finish(*(gate_of(cell, gate, x, [total]) for gate in range(3)), kept)


def assert_rows(actual, expected: list[tuple[np.ndarray, np.ndarray]], tolerance: float = 1e-5) -> None:
    for value, rows in zip(actual, zip(*expected), strict=True):
        assert_close(value.detach().float(), torch.tensor(np.stack(rows)).float(), tolerance)


def ragged_pair(counts: list[int], hidden: int) -> tuple[RaggedRows, RaggedRows]:
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int64)
    total = int(offsets[-1])
    return RaggedRows(normal(total, hidden), offsets), RaggedRows(normal(total, hidden), offsets.clone())


def children_of(h: RaggedRows, c: RaggedRows, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
    span = range(int(h.offsets[row]), int(h.offsets[row + 1]))
    return [(numbers(h.values[k]), numbers(c.values[k])) for k in span]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "hidden"), SIZES)
def test_leaves_follow_the_equations(path, inputs, hidden, rows):
    cell, x = TreeLSTMLeaf(inputs, hidden), normal(rows, inputs)
    assert_rows(cell(x), [leaf_node(cell, numbers(row)) for row in x])


@pytest.mark.parametrize("fold", [True, False])
def test_token_leaves_are_leaves_of_their_embedding(path, fold):
    cell, token = EmbeddingTreeLSTMLeaf(11, 20, 33, fold=fold), torch.randint(11, (50,))
    assert_rows(cell(token), [leaf_node(cell, numbers(cell.embedding.weight[k])) for k in token])


@pytest.mark.parametrize("with_input", [True, False])
@pytest.mark.parametrize(("inputs", "hidden"), SIZES)
def test_binary_nodes_follow_the_equations(path, inputs, hidden, with_input):
    cell = BinaryTreeLSTMCell(inputs if with_input else None, hidden)
    for rows in (1, 7, 49):
        h_left, c_left, h_right, c_right = (normal(rows, hidden) for _ in range(4))
        x = normal(rows, inputs) if with_input else None
        actual = cell(h_left=h_left, c_left=c_left, h_right=h_right, c_right=c_right, x=x)
        expected = []
        for row in range(rows):
            children = [(numbers(h[row]), numbers(c[row])) for h, c in ((h_left, c_left), (h_right, c_right))]
            expected.append(nary_node(cell, None if x is None else numbers(x[row]), children))
        assert_rows(actual, expected)


@pytest.mark.parametrize("with_input", [True, False])
@pytest.mark.parametrize("num_children", [1, 3, 8])
def test_nodes_of_n_children_follow_the_equations(path, num_children, with_input):
    cell = NaryTreeLSTMCell(num_children, 6 if with_input else None, 20)
    h, c = ([normal(5, 20) for _ in range(num_children)] for _ in range(2))
    given = {f"{name}_{k}": value for name, values in (("h", h), ("c", c)) for k, value in enumerate(values)}
    x = normal(5, 6) if with_input else None
    expected = []
    for row in range(5):
        children = [(numbers(left[row]), numbers(right[row])) for left, right in zip(h, c)]
        expected.append(nary_node(cell, None if x is None else numbers(x[row]), children))
    assert_rows(cell(**given, x=x), expected)


@pytest.mark.parametrize(("inputs", "hidden"), SIZES)
@pytest.mark.parametrize(
    "counts",
    [[0], [1], [0, 0, 0], [3, 0, 2, 1], [0, 100, 0, 1], [1, 2] * 30],
    ids=["leaf", "one", "leaves", "mixed", "wide", "many"],
)
def test_child_sums_follow_the_equations(path, inputs, hidden, counts):
    cell, x = ChildSumTreeLSTMCell(inputs, hidden), normal(len(counts), inputs)
    h, c = ragged_pair(counts, hidden)
    expected = [child_sum_node(cell, numbers(x[row]), children_of(h, c, row)) for row in range(len(counts))]
    assert_rows(cell(x, h, c), expected, 3e-5)


@pytest.mark.parametrize("fold", [True, False])
def test_token_child_sums_are_those_of_their_embedding(path, fold):
    cell, token = EmbeddingChildSumTreeLSTMCell(11, 20, 33, fold=fold), torch.randint(11, (60,))
    h, c = ragged_pair([0, 3, 1] * 20, 33)
    rows = numbers(cell.embedding.weight[token])
    expected = [child_sum_node(cell, row, children_of(h, c, k)) for k, row in enumerate(rows)]
    assert_rows(cell(token, h, c), expected, 3e-5)


@settings(deadline=None, max_examples=examples(40))
@given(
    st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=70), st.integers(0, 2**31)
)
def test_fused_child_sums_equal_plain(inputs, hidden, counts, seed):
    torch.manual_seed(seed)
    cell, x = ChildSumTreeLSTMCell(inputs, hidden), normal(len(counts), inputs)
    h, c = ragged_pair(counts, hidden)
    plain = cell(x, h, c)
    with torch.inference_mode():
        fused = cell(x, h, c)
    for actual, expected in zip(fused, plain):
        assert_close(actual, expected.detach(), 3e-5)


def test_the_order_of_children_counts_for_nary_cells_alone(path):
    binary, child_sum = BinaryTreeLSTMCell(None, 20), ChildSumTreeLSTMCell(3, 20)
    h, c = ragged_pair([2], 20)
    straight = binary(h.values[:1], c.values[:1], h.values[1:], c.values[1:])
    swapped = binary(h.values[1:], c.values[1:], h.values[:1], c.values[:1])
    assert not torch.allclose(straight.h, swapped.h, atol=1e-3)
    x = normal(1, 3)
    turned = [RaggedRows(value.values.flip(0), value.offsets) for value in (h, c)]
    assert_close(child_sum(x, h, c).h, child_sum(x, *turned).h)


def test_rows_do_not_depend_on_each_other(path):
    binary, child_sum = BinaryTreeLSTMCell(5, 33), ChildSumTreeLSTMCell(5, 33)
    states, x, order = [normal(61, 33) for _ in range(4)], normal(61, 5), torch.randperm(61)
    together = binary(*states, x)
    assert_close(binary(*(state[order] for state in states), x[order]).h, together.h[order])
    assert_close(binary(*(state[:7] for state in states), x[:7]).c, together.c[:7])
    h, c = ragged_pair([3, 0, 1] * 20 + [2], 33)
    together = child_sum(x, h, c)
    end = int(h.offsets[7])
    first = [RaggedRows(value.values[:end], value.offsets[:8]) for value in (h, c)]
    assert_close(child_sum(x[:7], *first).h, together.h[:7])
    alone = [RaggedRows(value.values[end - 3 : end], torch.tensor([0, 3])) for value in (h, c)]
    assert_close(child_sum(x[6:7], *alone).c, together.c[6:7])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_other_types(dtype, tolerance):
    binary, child_sum, leaf = BinaryTreeLSTMCell(None, 33), ChildSumTreeLSTMCell(5, 33), EmbeddingTreeLSTMLeaf(7, 5, 33)
    h, c = ragged_pair([3, 0, 1], 33)
    x, states, token = normal(3, 5), [normal(3, 33) for _ in range(4)], torch.tensor([1, 6])
    with torch.inference_mode():
        wide = [*binary(*states), *child_sum(x, h, c), *leaf(token)]
        for cell in (binary, child_sum, leaf):
            cell.to(dtype)
        h, c = (RaggedRows(value.values.to(dtype), value.offsets) for value in (h, c))
        narrow = [*binary(*(state.to(dtype) for state in states)), *child_sum(x.to(dtype), h, c), *leaf(token)]
    for actual, expected in zip(narrow, wide):
        assert actual.dtype is dtype
        assert_close(actual.float(), expected.float(), max(tolerance, 1e-5))


def test_many_children_do_not_lose_their_sum_in_half_precision():
    cell = ChildSumTreeLSTMCell(1, 8).bfloat16()
    offsets = torch.tensor([0, 2000])
    h, c = (RaggedRows(torch.full((2000, 8), value, dtype=torch.bfloat16), offsets) for value in (0.0, 1.0))
    x = torch.zeros(1, 1, dtype=torch.bfloat16)
    with torch.inference_mode():
        total = cell(x, h, c).c.float()
    gate = torch.sigmoid(cell.bias[24:].float())
    torch.testing.assert_close(total, 2000 * gate[None], rtol=2e-2, atol=1.0)


def test_no_rows():
    with torch.inference_mode():
        assert BinaryTreeLSTMCell(None, 5)(*(normal(0, 5) for _ in range(4))).h.shape == (0, 5)
        assert TreeLSTMLeaf(3, 5)(normal(0, 3)).c.shape == (0, 5)
        assert ChildSumTreeLSTMCell(3, 5)(normal(0, 3), *ragged_pair([], 5)).h.shape == (0, 5)


def test_inputs_are_left_alone_and_may_be_strided():
    cell = BinaryTreeLSTMCell(None, 33)
    states = [normal(33, 9).t() for _ in range(4)]
    before = [state.clone() for state in states]
    expected = cell(*states)
    with torch.inference_mode():
        assert_close(cell(*states).h, expected.h.detach())
    assert all(torch.equal(state, copied) for state, copied in zip(states, before))


def test_not_finite_inputs_stay_in_their_row():
    cell = BinaryTreeLSTMCell(None, 8)
    states = [normal(4, 8) for _ in range(4)]
    states[0][1] = float("nan")
    with torch.inference_mode():
        after = cell(*states)
    assert after.h[1].isnan().all() and after.h[[0, 2, 3]].isfinite().all()


def test_gradients_reach_every_weight():
    h, c = ragged_pair([2, 1], 5)
    for cell, inputs in (
        (EmbeddingTreeLSTMLeaf(7, 4, 5), (torch.tensor([1, 2]),)),
        (BinaryTreeLSTMCell(3, 5), (*(normal(2, 5) for _ in range(4)), normal(2, 3))),
        (EmbeddingChildSumTreeLSTMCell(7, 4, 5), (torch.tensor([1, 2]), h, c)),
    ):
        (cell(*inputs).h.sum() + cell(*inputs).c.sum()).backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in cell.parameters())


def test_changed_weights_are_noticed():
    leaf, binary = EmbeddingTreeLSTMLeaf(7, 4, 5), BinaryTreeLSTMCell(None, 5)
    token, states = torch.tensor([1, 2]), [normal(2, 5) for _ in range(4)]
    with torch.inference_mode():
        before = leaf(token).h, binary(*states).h
    others = EmbeddingTreeLSTMLeaf(7, 4, 5), BinaryTreeLSTMCell(None, 5)
    leaf.load_state_dict(others[0].state_dict())
    binary.load_state_dict(others[1].state_dict())
    with torch.inference_mode():
        after, expected = (leaf(token).h, binary(*states).h), (others[0](token).h, others[1](*states).h)
    assert all(map(torch.equal, after, expected)) and not any(map(torch.equal, after, before))


def test_packed_weights_are_neither_saved_nor_copied():
    cell = EmbeddingChildSumTreeLSTMCell(7, 4, 5)
    token, (h, c) = torch.tensor([1, 2]), ragged_pair([2, 0], 5)
    with torch.inference_mode():
        expected = cell(token, h, c).h
        copies = copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))
        assert set(cell.state_dict()) == {"weight_ih", "weight_hh", "bias", "embedding.weight"}
        cell.weight_hh.zero_()
        assert not torch.equal(cell(token, h, c).h, expected)
        assert all(torch.equal(twin(token, h, c).h, expected) for twin in copies)


STATE, CHILDREN = (5,), cellrt.ragged(5)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (EmbeddingTreeLSTMLeaf(7, 4, 5), {"token": TOKEN}),
        (BinaryTreeLSTMCell(None, 5), dict.fromkeys(["h_left", "c_left", "h_right", "c_right"], STATE)),
        (NaryTreeLSTMCell(2, 3, 5), {"x": (3,), **dict.fromkeys(["h_0", "h_1", "c_0", "c_1"], STATE)}),
        (ChildSumTreeLSTMCell(3, 5), {"x": (3,), "h": CHILDREN, "c": CHILDREN}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_cells_can_be_defined_saved_and_loaded(tmp_path, module, inputs):
    made = cellrt.cell(module, inputs)
    assert {name: spec.shape for name, spec in made.outputs.items()} == {"h": (5,), "c": (5,)}
    made.save(tmp_path)
    loaded = cellrt.load_cell(tmp_path)
    given = made.example_inputs(3)
    with torch.inference_mode():
        for actual, expected in zip(loaded.run(*given), made.run(*given), strict=True):
            assert_close(actual, expected)


def test_wrong_inputs_are_refused():
    binary, child_sum, words = BinaryTreeLSTMCell(None, 5), ChildSumTreeLSTMCell(3, 5), EmbeddingTreeLSTMLeaf(7, 4, 5)
    state, (h, c) = normal(2, 5), ragged_pair([2, 1], 5)
    with torch.inference_mode():
        with pytest.raises(ValueError, match="no input x, got 2 h, 2 c and an x"):
            binary(state, state, state, state, normal(2, 3))
        with pytest.raises(ValueError, match="expected 3 children"):
            NaryTreeLSTMCell(3, None, 5)(state, state)
        with pytest.raises(ValueError, match="c of child 1 has shape"):
            binary(state, state, state, normal(3, 5))
        with pytest.raises(ValueError, match="x has shape"):
            child_sum(normal(2, 4), h, c)
        for offsets in ([0, 1, 3], [0, 2, 2], [1, 2, 3], [0, 4, 3], [-1, 2, 3]):
            with pytest.raises(ValueError, match="expected equal offsets"):
                child_sum(normal(2, 3), h, RaggedRows(c.values, torch.tensor(offsets)))
        with pytest.raises(ValueError, match="h.offsets has shape"):
            child_sum(normal(3, 3), h, c)
        for token in (7, -1):
            with pytest.raises(IndexError):
                words(torch.tensor([0, token]))
            with pytest.raises(IndexError):
                EmbeddingChildSumTreeLSTMCell(7, 4, 5)(torch.tensor([0, token]), h, c)
        with pytest.raises(TypeError, match="float64"):
            BinaryTreeLSTMCell(None, 5).double()(*[state] * 4)
    for number in (0, 9):
        with pytest.raises(DefinitionError, match="expected 1 to 8 children"):
            NaryTreeLSTMCell(number, None, 5)
