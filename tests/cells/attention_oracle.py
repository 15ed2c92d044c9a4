"""Attention and recurrent steps one row at a time, in float64 and plain loops."""

import math

import torch
from torch import Tensor

from cellrt.definition.spec import RaggedRows


def ragged_of(parts: list[Tensor]) -> RaggedRows:
    """The memories of several nodes, one after the other."""
    counts = torch.tensor([0, *(len(part) for part in parts)])
    return RaggedRows(torch.cat(parts), counts.cumsum(0))


def attend_one(query, memory, score):
    """The context of one query over the rows of ``memory``; ``score(query, row)`` is a number."""
    size = memory.shape[1]
    context = [0.0] * size
    if not len(memory):
        return context
    scores = [score(query, row) for row in memory]
    highest = max(scores)
    weights = [math.exp(value - highest) for value in scores]
    for weight, row in zip(weights, memory.tolist()):
        for k in range(size):
            context[k] += weight / sum(weights) * row[k]
    return context


def dot(query, row):
    return sum(a * b for a, b in zip(query.tolist(), row.tolist()))


def general(weight):
    return lambda query, row: dot(query.double() @ weight.double(), row)


def additive(query_weight, key_weight, vector):
    def score(query, row):
        sums = query_weight.double() @ query.double() + key_weight.double() @ row.double()
        return sum(v * math.tanh(value) for v, value in zip(vector.tolist(), sums.tolist()))

    return score
