"""Train a Tree-LSTM on the Stanford Sentiment Treebank, in about a minute on one core; ``sentiment.py`` serves it.

    curl -LO https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip && unzip -d data trainDevTestTrees_PTB.zip
    python examples/train_sentiment.py data/trees/train.txt data/trees/dev.txt --out sentiment-model

Both files have a tree a line, such as ``(3 (2 a) (4 (4 lovely) (2 film)))``. Training sentences that are also in the
second file are left out.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from rich.progress import track
from torch.nn.functional import cross_entropy

from models.sentiment import (
    UNKNOWN,
    LabelledTree,
    SentimentModel,
    Vocabulary,
    binary_accuracy,
    in_levels,
    read_trees,
    save_model,
)
from models.treebank import DEV, TRAIN, missing

EMBEDDING, HIDDEN, BATCH, LEARNING_RATE = 64, 128, 25, 0.003
FORGOTTEN = 0.02
"""Share of words that are taken for unknown ones, so that the model learns what to do with them."""


def train(trees: Sequence[LabelledTree], epochs: int, seed: int = 0) -> tuple[SentimentModel, Vocabulary]:
    """Train on every labelled node. The vocabulary is the words that occur at least twice."""
    torch.manual_seed(seed)
    counts = Counter(word.lower() for tree in trees for word in tree.words)
    vocabulary = Vocabulary(sorted(word for word, count in counts.items() if count > 1))
    model = SentimentModel(len(vocabulary) + 1, EMBEDDING, HIDDEN)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    batches = [batch for _ in range(epochs) for batch in torch.randperm(len(trees)).split(BATCH)]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(batches))
    for batch in track(batches, "training"):
        levels = in_levels([trees[number] for number in batch.tolist()], vocabulary)
        tokens = levels.tokens.masked_fill(torch.rand(len(levels.tokens)) < FORGOTTEN, UNKNOWN)
        loss = cross_entropy(model(tokens, levels.pairs), levels.labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    return model.eval(), vocabulary


def evaluate(model: SentimentModel, vocabulary: Vocabulary, trees: Sequence[LabelledTree]) -> float:
    """Return the share of the sentences not labelled neutral that the model puts on the right side."""
    levels = in_levels(trees, vocabulary)
    with torch.no_grad():
        roots = model(levels.tokens, levels.pairs)[levels.roots].softmax(1)
    return binary_accuracy(roots, levels.labels[levels.roots])


def without_sentences_of(held_out: Sequence[LabelledTree], trees: Sequence[LabelledTree]) -> list[LabelledTree]:
    """Return the trees whose words are not those of a held-out one."""
    seen = {tuple(tree.words) for tree in held_out}
    return [tree for tree in trees if tuple(tree.words) not in seen]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", nargs="?", default=TRAIN, help=f"trees to learn (default: {TRAIN})")
    parser.add_argument("dev", nargs="?", default=DEV, help=f"trees to see how well it learnt (default: {DEV})")
    parser.add_argument("--out", default="sentiment-model", help="folder for the weights and the vocabulary")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if what := missing(options.train, options.dev):
        sys.exit(what)
    dev = read_trees(options.dev)
    made = train(without_sentences_of(dev, read_trees(options.train)), options.epochs, options.seed)
    save_model(*made, options.out)
    print(f"binary accuracy on {options.dev}: {evaluate(*made, dev):.1%}; saved in {options.out}")
