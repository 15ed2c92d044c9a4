"""A trained encoder-decoder, spelling to phonemes, one word at a time in plain NumPy.

The weights are those of the package g2p-en (Apache-2.0): a one-layer GRU encoder and a one-layer GRU
decoder with hidden size 256. They are read from the installed package's file; the package itself is never
imported, because it downloads data when it is. Install with ``pip install --no-deps g2p-en==2.1.0``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = (*"BDFGKLMNPRSTVWYZ", "CH", "DH", "HH", "JH", "NG", "SH", "TH", "ZH")

GRAPHEMES = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
"""The encoder's vocabulary: an id is a position in it."""

PHONEMES = (
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    *sorted([vowel + stress for vowel in VOWELS for stress in "012"] + [*CONSONANTS, "UW"]),
)
"""The decoder's vocabulary: four marks, then ARPAbet in alphabetical order, with one unstressed extra, UW."""

UNKNOWN_GRAPHEME = GRAPHEMES.index("<unk>")
END_OF_WORD = GRAPHEMES.index("</s>")
START = PHONEMES.index("<s>")
STOP = PHONEMES.index("</s>")
MAX_STEPS = 20


def checkpoint_path() -> Path | None:
    """The weight file inside the installed package g2p-en, or None where it is not installed."""
    spec = importlib.util.find_spec("g2p_en")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "checkpoint20.npz"


def grapheme_ids(word: str) -> list[int]:
    """The encoder's input for a word: an id for each letter, whatever its case, then the end mark."""
    known = {letter: index for index, letter in enumerate(GRAPHEMES)}
    return [known.get(letter, UNKNOWN_GRAPHEME) for letter in word.lower()] + [END_OF_WORD]


def phoneme_names(ids: list[int]) -> list[str]:
    """The names of phoneme ids, in order, up to but without the stop mark."""
    stop = ids.index(STOP) if STOP in ids else len(ids)
    return [PHONEMES[index] for index in ids[:stop]]


@dataclass(frozen=True)
class GRUWeights:
    """One GRU layer with an embedding in front; gates in torch's order: reset, update, new.

    Shapes: ``embedding [vocabulary, hidden]``, ``w_ih`` and ``w_hh`` ``[3 * hidden, hidden]``,
    ``b_ih`` and ``b_hh`` ``[3 * hidden]``.
    """

    embedding: Array
    w_ih: Array
    w_hh: Array
    b_ih: Array
    b_hh: Array

    def step(self, symbol: int, h: Array) -> Array:
        """The state ``[hidden]`` after reading one symbol in state ``h [hidden]``."""
        from_input = self.w_ih @ self.embedding[symbol] + self.b_ih
        from_state = self.w_hh @ h + self.b_hh
        input_reset, input_update, input_new = np.split(from_input, 3)
        state_reset, state_update, state_new = np.split(from_state, 3)
        reset = _sigmoid(input_reset + state_reset)
        update = _sigmoid(input_update + state_update)
        new = np.tanh(input_new + reset * state_new)
        after: Array = (1 - update) * new + update * h
        return after


class Oracle:
    """The trained model; its float32 weights are ``encoder``, ``decoder``, ``fc_w [74, 256]``, ``fc_b [74]``.

    Raises FileNotFoundError where the package g2p-en is not installed.
    """

    def __init__(self, path: Path | None = None) -> None:
        path = path or checkpoint_path()
        if path is None:
            raise FileNotFoundError("the weights are missing: pip install --no-deps g2p-en==2.1.0")
        with np.load(path, allow_pickle=False) as arrays:
            self.encoder = _read_gru(arrays, "enc")
            self.decoder = _read_gru(arrays, "dec")
            self.fc_w: Array = arrays["fc_w"]
            self.fc_b: Array = arrays["fc_b"]

    def encode(self, word: str) -> Array:
        """The encoder's last state ``[256]`` for a word."""
        h = np.zeros(self.encoder.w_hh.shape[1], dtype=np.float32)
        for symbol in grapheme_ids(word):
            h = self.encoder.step(symbol, h)
        return h

    def pronounce_ids(self, word: str) -> list[int]:
        """The ids decoded greedily for a word; the last is the stop mark unless 20 come before it."""
        h = self.encode(word)
        ids: list[int] = []
        symbol = START
        while symbol != STOP and len(ids) < MAX_STEPS:
            h = self.decoder.step(symbol, h)
            symbol = int(np.argmax(self.fc_w @ h + self.fc_b))
            ids.append(symbol)
        return ids

    def pronounce(self, word: str) -> list[str]:
        """The phonemes of a word, such as ``["T", "AO1", "R", "CH"]`` for "torch"."""
        return phoneme_names(self.pronounce_ids(word))


def _sigmoid(x: Array) -> Array:
    return (1 / (1 + np.exp(-x))).astype(np.float32, copy=False)


def _read_gru(arrays: np.lib.npyio.NpzFile, prefix: str) -> GRUWeights:
    return GRUWeights(
        embedding=arrays[f"{prefix}_emb"],
        w_ih=arrays[f"{prefix}_w_ih"],
        w_hh=arrays[f"{prefix}_w_hh"],
        b_ih=arrays[f"{prefix}_b_ih"],
        b_hh=arrays[f"{prefix}_b_hh"],
    )
