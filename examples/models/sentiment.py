"""Sentiment of parse trees: a binary Tree-LSTM (Tai, Socher and Manning 2015, sections 3.2 and 5.1).

Words are the leaves of a tree; each inner node combines its two children. Every node has a label from 0 (very negative)
to 4 (very positive), and an output layer reads it off the node's state. Training takes whole levels of many trees at
once; serving takes what is ready, whatever tree it comes from, and asks for the root alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import dropout

from cellrt import RequestError, Unfolder, cell, rows
from cellrt.cells import BinaryTreeLSTMCell, EmbeddingTreeLSTMLeaf, TreeLSTMLeaf
from cellrt.unfolders import penn_tree

SENTIMENTS = ("very negative", "negative", "neutral", "positive", "very positive")
NEUTRAL = SENTIMENTS.index("neutral")
UNKNOWN = 0
"""The token of a word outside the vocabulary."""


class LabelledTree(NamedTuple):
    """A binary tree. Its nodes are numbered children first, left before right, so the root is the last.

    Attributes:
        words: of the leaves, in order.
        parents: ``[nodes]``: each node's parent, -1 for the root.
        labels: ``[nodes]``, positions in ``SENTIMENTS``.
    """

    words: list[str]
    parents: list[int]
    labels: list[int]

    def children(self) -> list[list[int]]:
        """Return the children of each node: none, or left and right."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[:-1]):
            children[parent].append(node)
        return children


class TreeLevels(NamedTuple):
    """Trees to be computed together, nodes in order of height.

    Attributes:
        tokens: ``[leaves]``.
        pairs: of each height from 1, ``[nodes, 2]``: the positions of the left and right children.
        labels: ``[nodes]``.
        roots: ``[trees]``: positions of the roots.
    """

    tokens: Tensor
    pairs: list[Tensor]
    labels: Tensor
    roots: Tensor


def read_tree(line: str) -> LabelledTree:
    """Read a tree of the treebank, such as ``(3 (2 a) (4 (4 lovely) (2 film)))``.

    Raise RequestError if the line is not one binary tree with labels 0 to 4.
    """
    words: list[str] = []
    parents: list[int] = []
    labels: list[int] = []
    open_nodes: list[list[str | int]] = [[]]
    for piece in re.findall(r"[()]|[^() \n]+", line):
        if piece == "(":
            open_nodes.append([])
        elif piece != ")":
            open_nodes[-1].append(piece)
        else:
            label, *rest = open_nodes.pop() or [""]
            if label not in ("0", "1", "2", "3", "4") or not open_nodes:
                raise RequestError(f"expected a label from 0 to 4 after each bracket: {line!r}")
            match rest:
                case [str(word)]:
                    words.append(word)
                case [int(left), int(right)]:
                    parents[left] = parents[right] = len(parents)
                case _:
                    raise RequestError(f"expected one word or two nodes after the label, got {len(rest)}: {line!r}")
            open_nodes[-1].append(len(parents))
            parents.append(-1)
            labels.append(int(label))
    if open_nodes != [[len(parents) - 1]]:
        raise RequestError(f"expected one tree with as many brackets closed as opened: {line!r}")
    return LabelledTree(words, parents, labels)


def read_trees(path: str | Path) -> list[LabelledTree]:
    """Read a file of the treebank, a tree a line."""
    with open(path, encoding="utf-8", newline="\n") as file:
        return [read_tree(line) for line in file if line.strip()]


class Vocabulary(Mapping[str, int]):
    """The token of each word, whatever its case, from 1; token 0 is any other word."""

    def __init__(self, words: Sequence[str]) -> None:
        self._tokens = {word: token for token, word in enumerate(words, start=1)}

    def __getitem__(self, word: str) -> int:
        return self._tokens[word.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, words: Sequence[str]) -> list[int]:
        """Return the token of each word."""
        return [self.get(word, UNKNOWN) for word in words]


class Sentiment(NamedTuple):
    """The ``probabilities`` of ``SENTIMENTS``, ``[rows, 5]``."""

    probabilities: Tensor


class Classifier(nn.Linear):
    """Reads the sentiment off a node's state ``h`` ``[rows, hidden_size]``."""

    def forward(self, h: Tensor) -> Sentiment:  # type: ignore[override]
        """Return the probabilities."""
        return Sentiment(super().forward(h).softmax(dim=-1))


class SentimentModel(nn.Module):
    """The network: ``embedding``, the cells ``leaf`` and ``inner``, and ``output``, of logits ``[rows, 5]``."""

    def __init__(self, num_tokens: int, embedding_size: int, hidden_size: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, embedding_size)
        self.leaf = TreeLSTMLeaf(embedding_size, hidden_size)
        self.inner = BinaryTreeLSTMCell(None, hidden_size)
        self.output = nn.Linear(hidden_size, len(SENTIMENTS))
        self.dropout = dropout
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.ones_(self.inner.bias.data[3 * hidden_size :])  # the forget gates begin open

    def forward(self, tokens: Tensor, pairs: Sequence[Tensor]) -> Tensor:
        """Return the logits ``[nodes, 5]`` of all nodes of ``TreeLevels``, level by level."""
        h, c = self.leaf(dropout(self.embedding(tokens), self.dropout, self.training))
        for children in pairs:
            left, right = children.unbind(1)
            above = self.inner(h[left], c[left], h[right], c[right])
            h, c = torch.cat([h, above.h]), torch.cat([c, above.c])
        logits: Tensor = self.output(dropout(h, self.dropout, self.training))
        return logits

    def embedded_leaf(self) -> EmbeddingTreeLSTMLeaf:
        """Return embedding and leaf as one cell."""
        table = self.embedding
        leaf = EmbeddingTreeLSTMLeaf(table.num_embeddings, table.embedding_dim, self.leaf.hidden_size)
        leaf.load_state_dict({**self.leaf.state_dict(), "embedding.weight": table.weight})
        return leaf

    def classifier(self) -> Classifier:
        """Return the output layer as a cell."""
        classifier = Classifier(self.output.in_features, self.output.out_features)
        classifier.load_state_dict(self.output.state_dict())
        return classifier


def in_levels(trees: Sequence[LabelledTree], vocabulary: Vocabulary) -> TreeLevels:
    """Sort the nodes of some trees by height."""
    levels: list[list[tuple[int, int]]] = []
    children = [tree.children() for tree in trees]
    for number, below in enumerate(children):
        heights: list[int] = []
        for node, pair in enumerate(below):
            heights.append(1 + max((heights[child] for child in pair), default=-1))
            levels += [[] for _ in range(heights[node] + 1 - len(levels))]
            levels[heights[node]].append((number, node))
    places = {place: position for position, place in enumerate(place for level in levels for place in level)}
    return TreeLevels(
        torch.tensor([token for tree in trees for token in vocabulary.tokens(tree.words)]),
        [
            torch.tensor([[places[number, child] for child in children[number][node]] for number, node in level])
            for level in levels[1:]
        ],
        torch.tensor([trees[number].labels[node] for number, node in places]),
        torch.tensor([places[number, len(tree.parents) - 1] for number, tree in enumerate(trees)]),
    )


def is_positive(probabilities: Tensor) -> Tensor:
    """Return whether ``[rows, 5]`` says rather positive than negative."""
    return probabilities[:, NEUTRAL + 1 :].sum(1) > probabilities[:, :NEUTRAL].sum(1)


def binary_accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Return the share of the rows not labelled neutral whose side ``[rows, 5]`` gets right."""
    counted = labels != NEUTRAL
    return float((is_positive(probabilities) == (labels > NEUTRAL))[counted].float().mean())


def save_model(model: SentimentModel, vocabulary: Vocabulary, folder: str | Path) -> None:
    """Write ``weights.safetensors`` and ``vocabulary.json``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "weights.safetensors")
    (folder / "vocabulary.json").write_text(json.dumps(list(vocabulary), ensure_ascii=False, indent=0))


def load_model(folder: str | Path) -> tuple[SentimentModel, Vocabulary]:
    """Read what ``save_model`` wrote."""
    folder = Path(folder)
    with safe_open(folder / "weights.safetensors", framework="pt") as file:
        weights: Mapping[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    num_tokens, embedding_size = weights["embedding.weight"].shape
    model = SentimentModel(num_tokens, embedding_size, weights["output.weight"].shape[1])
    model.load_state_dict(weights)
    vocabulary = Vocabulary(json.loads((folder / "vocabulary.json").read_text()))
    return model.eval(), vocabulary


def make_sentiment(model: SentimentModel, vocabulary: Vocabulary, *, max_batch: int = 512) -> Unfolder:
    """Return the model ``"sentiment"``: a request is a line of the treebank (its labels are not read), its result
    ``probabilities`` those of the root's ``SENTIMENTS``, float32 ``[5]``.
    """
    state = (model.inner.hidden_size,)
    leaf = cell(model.embedded_leaf(), {"token": rows(dtype=torch.int64)}, name="leaf", max_batch=max_batch)
    children = dict.fromkeys(("h_left", "c_left", "h_right", "c_right"), state)
    inner = cell(model.inner, children, name="inner", max_batch=max_batch)
    output = cell(model.classifier(), {"h": state}, name="output", max_batch=max_batch)
    return penn_tree("sentiment", leaf=leaf, inner=inner, output=output, vocabulary=vocabulary, unknown=UNKNOWN)
