"""Binary trees to serve: those of a treebank in Penn brackets, and the paper's complete tree of 16 leaves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TREEBANK_WORDS = 19_463
"""Different words of the Stanford Sentiment Treebank's training part."""
Numbers = NDArray[np.int64]
DRAWN = 5_000
Nested = str | tuple["Nested", "Nested"]
"""A word, or the two parts of a phrase."""


@dataclass(frozen=True)
class Tree:
    """One request: a binary tree whose nodes are numbered in postorder, so that the root is the last.

    Attributes:
        tokens: the leaves' words ``[leaves]``, from left to right.
        parents: ``[nodes]``, -1 for the root.
        children: of the inner nodes, left and right ``[inner, 2]``, in order of the inner nodes.
        levels: ``[nodes]``: 0 for a leaf, else one more than the higher child. It is not needed to serve a tree, but
            given to the peers that batch by level, which saves them the work.
    """

    tokens: Numbers
    parents: NDArray[np.int32]
    children: Numbers
    levels: NDArray[np.int16]


def number_nodes(nested: Nested, number_of: Callable[[str], int]) -> Tree:
    """Return the tree of a nested pair; ``number_of`` gives a word's number."""
    tokens: list[int] = []
    parents: list[int] = []
    children: list[tuple[int, int]] = []
    levels: list[int] = []

    def add(part: Nested) -> int:
        if isinstance(part, str):
            tokens.append(number_of(part))
            levels.append(0)
        else:
            left, right = add(part[0]), add(part[1])
            children.append((left, right))
            levels.append(1 + max(levels[left], levels[right]))
            parents[left] = parents[right] = len(parents)
        parents.append(-1)
        return len(parents) - 1

    add(nested)
    return Tree(
        np.array(tokens, np.int64),
        np.array(parents, np.int32),
        np.array(children, np.int64).reshape(-1, 2),
        np.array(levels, np.int16),
    )


def complete_trees(count: int, num_words: int, seed: int, leaves: int = 16) -> list[Tree]:
    """``count`` complete trees (section 2.7.5) with random words."""
    random = np.random.default_rng(seed)

    def build(words: Iterator[str], size: int) -> Nested:
        return next(words) if size == 1 else (build(words, size // 2), build(words, size // 2))

    drawn = random.integers(0, num_words, (count, leaves)).tolist()
    return [number_nodes(build(iter(map(str, words)), leaves), int) for words in drawn]


def read_trees(path: Path, limit: int | None = None) -> tuple[list[Tree], int]:
    """Return the trees of a file with one in Penn brackets a line, as ``(3 (2 A) (4 (2 real) (2 tree)))``, and the
    number of words. Labels are left out. Raise ValueError for a line that is no binary tree, OSError if there is no
    file.
    """
    numbers: dict[str, int] = {}

    def number_of(word: str) -> int:
        return numbers.setdefault(word, len(numbers))

    with path.open(encoding="utf-8") as lines:
        trees = [number_nodes(parse(line), number_of) for line in _first(lines, limit) if line.strip()]
    return trees, len(numbers)


def treebank_trees(path: Path | None, count: int | None = None) -> tuple[str, list[Tree], int]:
    """Return the name of a benchmark's case, its trees (at most ``count``) and the number of words.

    The trees are those of a file; without one, ``DRAWN`` trees (or ``count``) that are like the treebank's.
    """
    if path is not None:
        return "treebank", *read_trees(path, count)
    return "drawn trees, like the treebank's", parse_like_trees(count or DRAWN, TREEBANK_WORDS, 1), TREEBANK_WORDS


def parse_like_trees(count: int, num_words: int, seed: int) -> list[Tree]:
    """Return random binary trees about as long (mean 19 leaves, at most 52) and as deep as the Stanford treebank's."""
    random = np.random.default_rng(seed)

    def build(size: int) -> Nested:
        if size == 1:
            return str(random.integers(num_words))
        left = 1 + int(random.binomial(size - 2, random.beta(0.2, 0.5)))
        return build(left), build(size - left)

    lengths = np.clip(np.rint(random.gamma(4.3, 4.46, count)), 2, 52).astype(np.int64)
    return [number_nodes(build(int(length)), int) for length in lengths]


def parse(line: str) -> Nested:
    """Return a tree in Penn brackets. Raise ValueError where it is not binary."""
    stack: list[list[Nested]] = [[]]
    pieces = iter(re.findall(r"[()]|[^\s()]+", line))
    try:
        for piece in pieces:
            if piece == "(":
                next(pieces)  # the label
                stack.append([])
            elif piece == ")":
                parts = stack.pop()
                stack[-1].append(_join(parts))
            else:
                stack[-1].append(piece)
    except (StopIteration, IndexError):
        raise ValueError(f"brackets do not match: {line.strip()!r}") from None
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"not one tree: {line.strip()!r}")
    return stack[0][0]


def _join(parts: list[Nested]) -> Nested:
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return parts[0], parts[1]
    raise ValueError(f"a node has {len(parts)} children; the benchmark's trees are binary")


def _first(lines: Iterable[str], limit: int | None) -> Iterator[str]:
    for k, line in enumerate(lines):
        if k == limit:
            return
        yield line
