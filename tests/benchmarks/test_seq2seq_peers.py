"""The encoder-decoder benchmark's peers choose the tokens that a sentence decoded alone gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import workloads
from benchmarks.seq2seq_peers import GO, PEERS, Model, Pair, dropping, make_peer

WORDS, HIDDEN = 40, 12
PAIRS = [Pair([3, 1, 4], 5), Pair([1], 1), Pair([5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], 9), Pair([2, 2], 9)]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(5)
    return Model(WORDS, HIDDEN).requires_grad_(False)


def decode(model: Model, pair: Pair) -> list[int]:
    """Greedy decoding with ``nn.LSTM`` on the whole prefix at every step."""
    state = model.encoder(model.source(torch.tensor(pair.tokens)))[1]
    decoder = nn.LSTM(HIDDEN, HIDDEN)
    decoder.load_state_dict({f"{name}_l0": value for name, value in model.decoder.state_dict().items()})
    tokens = [GO]
    for _ in range(pair.steps):
        outputs: Tensor = decoder(model.target(torch.tensor(tokens)), state)[0]
        tokens.append(int(model.projection(outputs[-1]).argmax()))
    return tokens[1:]


@pytest.mark.parametrize("name", PEERS)
def test_peer_decodes_as_alone(name: str, model: Model) -> None:
    server = make_peer(name, model, threads=1)
    try:
        futures = [server.submit(pair) for pair in PAIRS]
        results = [future.result(60).tolist() for future in futures]
    finally:
        server.close()
    assert results == [decode(model, pair) for pair in PAIRS]


def test_rows_are_answered_in_the_order_they_end(model: Model) -> None:
    ended = [position for position, _ in dropping(model, 1)(PAIRS)]
    assert [PAIRS[k].steps for k in ended] == [1, 5, 9, 9]


def test_targets_are_about_as_long_as_their_sources() -> None:
    source, target = workloads.translation_lengths(100_000, seed=1)
    np.testing.assert_array_equal(source, workloads.europarl_lengths(100_000, seed=1))
    assert abs(target.mean() / source.mean() - 1.07) < 0.02
    assert np.corrcoef(source, target)[0, 1] > 0.9
    assert (target.min(), target.max()) == (1, 330)
