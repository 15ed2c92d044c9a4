"""Arabic text with its vowel marks: the trained tagger of the package arabic-diacritizer, as cells and an unfolder.

Three layers of LSTMs in both directions read the letters; each letter attends to all (additive attention, Bahdanau, Cho
and Bengio 2015), and one of 15 marks is chosen for it.

The weights (MIT) are read from the installed package's file; the package itself is never imported.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cellrt import DefinitionError, Graph, RaggedRows, Unfolder, cell, ragged, unfold
from cellrt.demo.g2p import package_folder
from cellrt.unfolders import from_torch

TO_INSTALL = "--no-deps arabic-diacritizer==1.0.0"
SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")
LETTERS = tuple(map(chr, (*range(0x621, 0x63B), *range(0x640, 0x649), 0x64A)))
"""The letters from hamza to yeh; alef maksura is not among them."""
CHARACTERS = (*SPECIAL, *LETTERS, *" .,\u060c\u061b:\u061f!()-\"'\n")
"""The vocabulary: an id is a position in it."""

FATHATAN, DAMMATAN, KASRATAN, FATHA, DAMMA, KASRA, SHADDA, SUKUN = map(chr, range(0x64B, 0x653))
VOWELS = (FATHA, DAMMA, KASRA)
NUNATIONS = (FATHATAN, DAMMATAN, KASRATAN)
MARKS = ("", *VOWELS, SUKUN, SHADDA, *NUNATIONS, *(SHADDA + mark for mark in (*VOWELS, *NUNATIONS)))
"""The marks above and below a letter, in the order of the classes."""

_IDS = {character: index for index, character in enumerate(CHARACTERS)}


class AttentionWeights(nn.Module):
    """The weights of additive attention, by the names that the file has for them: of the letter that asks, of those
    that are found, and of the score."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.W = nn.Linear(size, size, bias=False)
        self.U = nn.Linear(size, size, bias=False)
        self.v = nn.Linear(size, 1, bias=False)


class TorchDiacritizer(nn.Module):
    """The model in plain torch: ids int64 ``[letters]`` -> logits ``[letters, 15]``."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        num_tokens, embedding_size = weights["embedding.weight"].shape
        hidden = weights["lstm.weight_hh_l0"].shape[1]
        self.embedding = nn.Embedding(num_tokens, embedding_size)
        self.lstm = nn.LSTM(embedding_size, hidden, num_layers=3, bidirectional=True)
        self.attention = AttentionWeights(2 * hidden)
        self.classifier = nn.Linear(2 * hidden, len(MARKS))
        self.load_state_dict(weights)
        self.eval().requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of each letter."""
        states, _ = self.lstm(self.embedding(ids))
        sums = self.attention.W(states)[:, None] + self.attention.U(states)
        weights = self.attention.v(sums.tanh())[:, :, 0].softmax(dim=1)
        logits: Tensor = self.classifier(weights @ states)
        return logits


class Projected(NamedTuple):
    """A letter as attention needs it: as the one that asks (``query``) and the one that is found (``key``), ``[rows,
    512]`` each, and the logits that it stands for (``vote``, ``[rows, 15]``)."""

    query: Tensor
    key: Tensor
    vote: Tensor


class Project(nn.Module):
    """The states of both directions, ``left`` and ``right`` ``[rows, 256]`` -> ``Projected``.

    The classifier is linear and attention's weights add up to 1, so what is averaged are its logits: 15 numbers a
    letter rather than 512.
    """

    def __init__(self, model: TorchDiacritizer) -> None:
        super().__init__()
        parts = (model.attention.W.weight, model.attention.U.weight, model.classifier.weight)
        self.sizes = [part.shape[0] for part in parts]
        self.weight = nn.Parameter(torch.cat(parts))
        self.bias = nn.Parameter(nn.functional.pad(model.classifier.bias, (sum(self.sizes[:2]), 0)))

    def forward(self, left: Tensor, right: Tensor) -> Projected:
        """Multiply by all three weights at once."""
        both = torch.cat([left, right], dim=1)
        return Projected(*nn.functional.linear(both, self.weight, self.bias).split(self.sizes, dim=1))


class Attend(nn.Module):
    """The logits of a letter, ``[rows, 15]``: the votes of all letters, as heavy as ``score . tanh(query + key)`` says.

    ``query`` ``[rows, 512]``; ``key`` and ``vote`` ragged, of the same letters.
    """

    def __init__(self, model: TorchDiacritizer) -> None:
        super().__init__()
        self.score = nn.Parameter(model.attention.v.weight[0])

    def forward(self, query: Tensor, key: RaggedRows, vote: RaggedRows) -> Tensor:
        """Return the logits; every row has at least one key."""
        counts = key.offsets.diff()
        rows = torch.arange(query.shape[0], device=query.device)
        asking = torch.repeat_interleave(rows, counts, output_size=key.values.shape[0])
        scores = query.index_select(0, asking).add_(key.values).tanh_() @ self.score
        highest = torch.segment_reduce(scores, "max", offsets=key.offsets, unsafe=True)
        weights = (scores - highest.index_select(0, asking)).exp_()
        sums = vote.values.new_zeros(query.shape[0], vote.values.shape[1] + 1)
        sums.index_add_(0, asking, torch.cat([vote.values, torch.ones_like(scores)[:, None]], dim=1) * weights[:, None])
        return sums[:, :-1] / sums[:, -1:]


def read_weights() -> dict[str, Tensor]:
    """Return the trained weights. Raise DefinitionError if the package arabic-diacritizer is not installed."""
    path = package_folder("diacritize", TO_INSTALL) / "assets" / "bilstm_best.pt"
    if not path.exists():
        raise DefinitionError(f"{path} is missing: pip install --force-reinstall {TO_INSTALL}")
    return dict(torch.load(path, weights_only=True, map_location="cpu"))


def make_diacritizer(model: TorchDiacritizer | None = None, *, max_batch: int = 256) -> Unfolder:
    """Return the model ``"diacritizer"``: a request is ``letter_ids`` of a text, its result ``logits`` ``[letters,
    15]``.

    Raise DefinitionError if arabic-diacritizer is not installed.
    """
    model = model or TorchDiacritizer(read_weights())
    layers = from_torch(model.lstm, embedding=model.embedding, max_batch=max_batch)
    half, both, marks = model.lstm.hidden_size, 2 * model.lstm.hidden_size, len(MARKS)
    project = cell(Project(model), {"left": (half,), "right": (half,)}, name="project", max_batch=max_batch)
    inputs = {"query": (both,), "key": ragged(both), "vote": ragged(marks)}
    attend = cell(Attend(model), inputs, name="attend", max_batch=64)

    @unfold("diacritizer", example=[LETTERS.index("\u0628")] * 2)
    def diacritizer(graph: Graph, ids: Sequence[int]) -> object:
        left, right = layers(graph, ids).steps
        letters = graph.chain(project, left=left, right=right)
        return {"logits": graph.chain(attend, query=letters.query, key=letters.key, vote=letters.vote).output}

    return diacritizer


def without_marks(text: str) -> str:
    """Return a text in the form that the model knows (NFKC), without any marks."""
    return "".join(character for character in unicodedata.normalize("NFKC", text) if character not in MARKS[1:9])


def letter_ids(text: str) -> list[int]:
    """Return the id of each character of a text without marks."""
    return [_IDS.get(character, SPECIAL.index("<unk>")) for character in text]


def with_marks(text: str, logits: Tensor) -> str:
    """Return a text without marks, with the likeliest under ``logits`` ``[characters, 15]`` behind each character."""
    marked = (character + MARKS[mark] for character, mark in zip(text, logits.argmax(1).tolist(), strict=True))
    return unicodedata.normalize("NFKC", "".join(marked))
