"""The places where the trees of the Stanford Sentiment Treebank are expected, and where to get them."""

from __future__ import annotations

from pathlib import Path

ADDRESS = "https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip"
TRAIN, DEV = "data/trees/train.txt", "data/trees/dev.txt"
"""The places where the command of ``how_to_get`` puts the files, from the repository's root."""


def how_to_get(path: str | Path) -> str:
    """Say that a file is missing, and how to get the treebank."""
    return (
        f"There is no file {path}. This brings the Stanford Sentiment Treebank (research data, 0.8 MB):\n"
        f"curl -LO {ADDRESS} && unzip -d data {ADDRESS.rpartition('/')[2]}\n"
        f"The trees are then in {TRAIN} and {DEV}."
    )


def missing(*paths: str | Path) -> str | None:
    """Return how to get the first of these files that is not there; None if all are."""
    return next((how_to_get(path) for path in paths if not Path(path).is_file()), None)
