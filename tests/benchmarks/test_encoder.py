"""Layouts of an encoder's batch hold what they may and answer alike; orders are those of the policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.encoder import ETA, NAMES, Q, Work, draw_lengths, forming_us, in_order
from benchmarks.encoder_layouts import LAYOUTS, LONGEST, PLACES, PlainEncoder
from cellrt.cells.transformer_stack import StackSizes, TransformerStack
from tests.core.test_das import Request, algorithm_1

LENGTHS = st.lists(st.integers(3, LONGEST), min_size=1, max_size=60)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths=LENGTHS)
def test_a_batch_has_each_sentence_once_and_no_more_places_than_it_may(layout: str, lengths: list[int]) -> None:
    rows, longest = LAYOUTS[layout](list(range(len(lengths))), lengths)
    chosen = [one for row in rows for one in row]
    assert chosen and len(set(chosen)) == len(chosen)
    assert max(sum(lengths[one] for one in row) for row in rows) <= longest
    assert len(rows) * longest <= PLACES


def test_every_layout_gives_a_sentence_the_same_embedding() -> None:
    with torch.inference_mode():
        encoder = PlainEncoder(TransformerStack(StackSizes(50, LONGEST, 16, 32, 2, 2)).eval().requires_grad_(False))
        sentences = [torch.randint(0, 50, (size,)) for size in (3, 9, 30, 4)]
        expected = {one: encoder([[one], []][:1], sentences)[one] for one in range(4)}
        for rows in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[2], [3, 0, 1]]):
            for one, found in encoder(rows, sentences).items():
                torch.testing.assert_close(found, expected[one], rtol=1e-4, atol=1e-5)


@given(lengths=st.lists(st.integers(3, LONGEST), min_size=30, max_size=60), seed=st.integers(0, 9))
def test_the_order_of_das_is_that_of_the_pseudo_code(lengths: list[int], seed: int) -> None:
    begin_by_s = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    work = Work([torch.zeros(size) for size in lengths], [0.0] * len(lengths), begin_by_s)
    requests = [Request(k, 0, begin_by_s[k], size) for k, size in enumerate(lengths)]
    ((*expected,),) = algorithm_1(requests, 1, PLACES, ETA, Q)
    left, found = PLACES, list[int]()
    for one in in_order("DAS", range(len(lengths)), work, lengths):
        if lengths[one] <= left:
            found.append(one)
            left -= lengths[one]
    assert found == [each.number for each in expected]


def test_lengths_are_those_of_the_paper() -> None:
    lengths = draw_lengths(10_000, 100, seed=0)
    assert lengths.min() == 3 and lengths.max() <= LONGEST
    assert abs(lengths.mean() - 20) < 0.5 and abs(lengths.var() - 100) < 10


@pytest.mark.parametrize("policy", NAMES)
def test_the_cost_of_a_policy_is_measured(policy: str) -> None:
    assert forming_us(policy, 60) > 0
