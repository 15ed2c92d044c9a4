"""Spelling to phonemes: the trained GRU encoder-decoder of the package g2p-en, as two cells and an unfolder.

The weights (Apache-2.0) are read from the installed package's file. The package itself is never imported: it tries to
download data when it is, and would bring along much that is not needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from cellrt.cells import EmbeddingGRUCell, EmbeddingGRUDecoder
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.errors import DefinitionError
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder, unfold

VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = (*"BDFGKLMNPRSTVWYZ", "CH", "DH", "HH", "JH", "NG", "SH", "TH", "ZH")

LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
"""The encoder's vocabulary: an id is a position in it."""

PHONEMES = (
    *("<pad>", "<unk>", "<s>", "</s>"),
    *sorted([vowel + stress for vowel in VOWELS for stress in "012"] + [*CONSONANTS, "UW"]),
)
"""The decoder's vocabulary: four marks, then ARPAbet (a digit is a vowel's stress)."""

UNKNOWN_LETTER = LETTERS.index("<unk>")
END_OF_WORD = LETTERS.index("</s>")
START = PHONEMES.index("<s>")
STOP = PHONEMES.index("</s>")
MAX_STEPS = 20
_LETTER_IDS = {letter: index for index, letter in enumerate(LETTERS)}


class GRUWeights(NamedTuple):
    """One GRU layer behind an embedding, as torch lays it out: ``embedding`` ``[vocabulary, 256]``, ``w_ih`` and
    ``w_hh`` ``[768, 256]``, ``b_ih`` and ``b_hh`` ``[768]``, all float32."""

    embedding: torch.Tensor
    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor
    b_hh: torch.Tensor


class Weights(NamedTuple):
    """The model: encoder, decoder, and the decoder's output ``projection`` ``[74, 256]`` with ``bias`` ``[74]``."""

    encoder: GRUWeights
    decoder: GRUWeights
    projection: torch.Tensor
    bias: torch.Tensor


class Modules(NamedTuple):
    """The model as plain torch modules, steps first; ``projection`` gives the logits of the next phoneme."""

    letters: nn.Embedding
    encoder: nn.GRU
    phonemes: nn.Embedding
    decoder: nn.GRUCell
    projection: nn.Linear


def package_folder(package: str, to_install: str) -> Path:
    """Return the folder of an installed package, without importing it.

    Raise DefinitionError saying how to install it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DefinitionError(f"the package {package} is not installed: pip install {to_install}")
    return Path(spec.submodule_search_locations[0])


def read_weights() -> Weights:
    """Return the trained weights. Raise DefinitionError if the package g2p-en is not installed."""
    path = package_folder("g2p_en", "--no-deps g2p-en==2.1.0") / "checkpoint20.npz"
    if not path.exists():
        raise DefinitionError(f"{path} is missing: pip install --force-reinstall --no-deps g2p-en==2.1.0")
    with np.load(path, allow_pickle=False) as arrays:
        read = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}

    def layer(side: str) -> GRUWeights:
        return GRUWeights(*(read[f"{side}_{part}"] for part in ("emb", "w_ih", "w_hh", "b_ih", "b_hh")))

    return Weights(layer("enc"), layer("dec"), read["fc_w"], read["fc_b"])


def torch_modules(weights: Weights | None = None) -> Modules:
    """Return the model as torch's own modules, for comparisons."""
    weights = weights or read_weights()
    encoder = nn.GRU(weights.encoder.w_ih.shape[1], weights.encoder.w_hh.shape[1])
    encoder.load_state_dict({f"{name}_l0": value for name, value in _named(weights.encoder).items()})
    decoder = nn.GRUCell(weights.decoder.w_ih.shape[1], weights.decoder.w_hh.shape[1])
    decoder.load_state_dict(_named(weights.decoder))
    projection = nn.Linear(weights.projection.shape[1], weights.projection.shape[0])
    projection.load_state_dict({"weight": weights.projection, "bias": weights.bias})
    letters, phonemes = (nn.Embedding.from_pretrained(side.embedding) for side in (weights.encoder, weights.decoder))
    modules = Modules(letters, encoder, phonemes, decoder, projection)
    for module in modules:
        module.eval().requires_grad_(False)
    return modules


def _named(weights: GRUWeights) -> dict[str, torch.Tensor]:
    """Return the weights of the layer itself by torch's names."""
    return dict(weight_ih=weights.w_ih, weight_hh=weights.w_hh, bias_ih=weights.b_ih, bias_hh=weights.b_hh)


def make_g2p(weights: Weights | None = None, *, fold: bool = True, max_batch: int = 512) -> Unfolder:
    """Return the model ``"g2p"``: a request is a word (a string), its result ``phonemes`` is int64 ``[1 to 20]``.

    Args:
        weights: default: those of the installed package g2p-en.
        fold: whether the input half of each GRU is folded into its embedding.
        max_batch: most rows of a task, for both cells.

    Raise DefinitionError if g2p-en is not installed.
    """
    modules = torch_modules(weights)
    hidden = (modules.encoder.hidden_size,)
    inputs = {"token": rows(dtype=torch.int64), "h": hidden}
    encoder = cell(
        EmbeddingGRUCell.from_torch(modules.letters, modules.encoder, fold=fold),
        inputs,
        name="encoder",
        max_batch=max_batch,
    )
    decoder = cell(
        EmbeddingGRUDecoder.from_torch(modules.phonemes, modules.decoder, modules.projection, STOP, fold=fold),
        inputs,
        name="decoder",
        max_batch=max_batch,
    )

    @unfold("g2p", example="cell")
    def g2p(graph: Graph, word: str) -> object:
        letters = graph.chain(encoder, token=letter_ids(word))
        start = graph.constant(START)
        sounds = graph.loop(decoder, until="stop", max_steps=MAX_STEPS, h=letters.last.h, token=start)
        return {"phonemes": sounds.token}

    return g2p


def letter_ids(word: str) -> list[int]:
    """Return the encoder's input: an id for each letter, whatever its case, then the end mark."""
    return [_LETTER_IDS.get(letter, UNKNOWN_LETTER) for letter in word.lower()] + [END_OF_WORD]


def arpabet(ids: torch.Tensor | Sequence[int]) -> str:
    """Return phoneme ids as text, such as "T AO1 R CH", up to but without the stop mark."""
    names = [PHONEMES[index] for index in torch.as_tensor(ids).tolist()]
    return " ".join(names[: names.index("</s>")] if "</s>" in names else names)
