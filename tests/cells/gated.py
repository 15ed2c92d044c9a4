"""What the tests of the LSTM and GRU cells share."""

import torch
from torch import Tensor

SIZES = [(1, 1), (3, 5), (16, 8), (20, 33), (64, 64)]
"""Input and hidden sizes: below, at and off a whole number of vector lanes."""

RUNS = [[1], [4], [1, 1, 1], [5, 5, 3, 1], [50, 49, 26, 25, 24, 3, 2, 1], [100, 97]]
"""Rows of each step: one, few, several chunks, and every remainder of a tile."""

TOLERANCE = 1e-5


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def packed(batch_sizes: list[int], x: Tensor) -> torch.nn.utils.rnn.PackedSequence:
    return torch.nn.utils.rnn.PackedSequence(x, torch.tensor(batch_sizes))


def final_rows(batch_sizes: list[int], values: Tensor) -> Tensor:
    """Each row's value at its last step, ``[batch_sizes[0], ...]``."""
    starts = [sum(batch_sizes[:step]) for step in range(len(batch_sizes))]
    last = [max(step for step, rows in enumerate(batch_sizes) if row < rows) for row in range(batch_sizes[0])]
    return torch.stack([values[starts[step] + row] for row, step in enumerate(last)])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=True)
