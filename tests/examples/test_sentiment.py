"""The sentiment Tree-LSTM: what is served is what the equations say, and training learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cellrt
from cellrt.errors import RequestError
from examples import sentiment
from examples.train_sentiment import evaluate, train, without_sentences_of
from models.sentiment import (
    LabelledTree,
    SentimentModel,
    Vocabulary,
    binary_accuracy,
    in_levels,
    load_model,
    make_sentiment,
    read_tree,
    read_trees,
    save_model,
)
from models.treebank import ADDRESS, TRAIN, missing

ROOT = Path(__file__).resolve().parents[2]
TREEBANK = Path(os.environ.get("CELLRT_TREEBANK", ROOT / TRAIN))
DEVELOPMENT = TREEBANK.with_name(TREEBANK.name.replace("train", "dev"))
WORDS = ("good", "bad", "film", "plot", "the", "a")
HIDDEN = 6


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def root_probabilities(model: SentimentModel, vocabulary: Vocabulary, tree: LabelledTree) -> np.ndarray:
    """Equations 9 to 14 of the paper, node by node in float64."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    tokens = iter(vocabulary.tokens(tree.words))
    states: list[tuple[np.ndarray, np.ndarray]] = []
    for children in tree.children():
        if children:
            below = np.concatenate([states[child][0] for child in children])
            i, o, u, left, right = np.split(weights["inner.weight_hh"] @ below + weights["inner.bias"], 5)
            kept = sigmoid(left) * states[children[0]][1] + sigmoid(right) * states[children[1]][1]
        else:
            x = weights["embedding.weight"][next(tokens)]
            i, o, u = np.split(weights["leaf.weight_ih"] @ x + weights["leaf.bias"], 3)
            kept = np.zeros_like(i)
        c = sigmoid(i) * np.tanh(u) + kept
        states.append((sigmoid(o) * np.tanh(c), c))
    logits = weights["output.weight"] @ states[-1][0] + weights["output.bias"]
    return np.exp(logits) / np.exp(logits).sum()


def random_tree(generator: np.random.Generator, leaves: int) -> str:
    """A tree whose nodes are labelled by what is in them: 4 with a good, 0 with a bad, else 2."""
    if leaves == 1:
        word = str(generator.choice(WORDS))
        return f"({ {'good': 4, 'bad': 0}.get(word, 2) } {word})"
    split = int(generator.integers(1, leaves))
    left, right = random_tree(generator, split), random_tree(generator, leaves - split)
    label = 0 if "bad" in left + right else 4 if "good" in left + right else 2
    return f"({label} {left} {right})"


@pytest.fixture
def lines() -> list[str]:
    generator = np.random.default_rng(3)
    return [random_tree(generator, leaves) for leaves in (1, 2, 3, 7, 12, 20, 5, 1)]


@pytest.fixture
def trees(lines: list[str]) -> list[LabelledTree]:
    return [read_tree(line) for line in lines]


@pytest.fixture
def model() -> SentimentModel:
    torch.manual_seed(1)
    return SentimentModel(len(WORDS), 5, HIDDEN).eval()


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(WORDS[:-1])  # one word is unknown


def test_a_tree_is_read_children_first() -> None:
    tree = read_tree("(3 (2 a) (4 (4 lovely) (2 8\xa01/2)))\n")
    assert tree == LabelledTree(["a", "lovely", "8\xa01/2"], [4, 3, 3, 4, -1], [2, 4, 2, 4, 3])
    assert tree.children() == [[], [], [], [1, 2], [0, 3]]


@pytest.mark.parametrize(
    "line", ["", "(", ")", "(3 a", "(3 a))", "(9 a)", "(3)", "(a)", "(3 (2 a))", "(3 a b)", "x (3 a)"]
)
def test_what_is_not_a_tree_is_refused(line: str) -> None:
    with pytest.raises(RequestError, match="expected"):
        read_tree(line)


def test_levels_give_what_the_equations_say(
    model: SentimentModel, vocabulary: Vocabulary, trees: list[LabelledTree]
) -> None:
    levels = in_levels(trees, vocabulary)
    with torch.no_grad():
        roots = model(levels.tokens, levels.pairs).softmax(1)[levels.roots]
    expected = np.stack([root_probabilities(model, vocabulary, tree) for tree in trees])
    np.testing.assert_allclose(roots, expected, atol=1e-6)
    assert levels.labels[levels.roots].tolist() == [tree.labels[-1] for tree in trees]


def test_served_trees_are_as_the_equations_say_after_saving_and_loading(
    model: SentimentModel, vocabulary: Vocabulary, lines: list[str], tmp_path: Path
) -> None:
    save_model(model, vocabulary, tmp_path)
    with cellrt.Engine() as engine:
        engine.register(make_sentiment(*load_model(tmp_path)))
        served = [future.result(timeout=60)["probabilities"] for future in engine.submit_many("sentiment", lines)]
    for line, probabilities in zip(lines, served, strict=True):
        np.testing.assert_allclose(probabilities, root_probabilities(model, vocabulary, read_tree(line)), atol=1e-6)


def test_accuracy_leaves_out_neutral_sentences() -> None:
    probabilities = torch.tensor([[0.0, 0.4, 0.3, 0.1, 0.2], [0.0, 0.0, 0.1, 0.9, 0.0], [0.3, 0.3, 0.1, 0.3, 0.0]])
    assert binary_accuracy(probabilities, torch.tensor([1, 2, 4])) == 0.5


def test_sentences_of_the_dev_split_are_not_trained_on() -> None:
    a, b, other_labels = (read_tree(line) for line in ("(2 (2 a) (2 film))", "(4 good)", "(1 (2 a) (1 film))"))
    assert without_sentences_of([a], [b, a, other_labels]) == [b]


def test_training_learns_what_the_labels_follow() -> None:
    generator = np.random.default_rng(0)
    made = [read_tree(random_tree(generator, int(generator.integers(2, 9)))) for _ in range(400)]
    model, vocabulary = train(made[:300], epochs=8)
    assert sorted(vocabulary) == sorted(WORDS)
    assert evaluate(model, vocabulary, made[300:]) > 0.95


@pytest.mark.slow
def test_training_without_trees_says_where_to_get_them(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_sentiment.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith(f"There is no file {TRAIN}.")
    assert ADDRESS in done.stderr
    assert "Traceback" not in done.stderr


def test_serving_without_trees_says_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="There is no file .*absent.txt"):
        sentiment.main(str(tmp_path), str(tmp_path / "absent.txt"))


def test_serving_without_a_model_fails_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no trained model in .*: python examples/train_sentiment.py"):
        sentiment.main(str(tmp_path / "absent"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_treebank_is_learnt_and_served(tmp_path: Path) -> None:
    """At least 78% of the sentences of the dev split on the right side, by what the engine answers."""
    if what := missing(TREEBANK, DEVELOPMENT):
        pytest.skip(f"{what} Or name train.txt, with dev.txt beside it: CELLRT_TREEBANK=FILE")
    lines = DEVELOPMENT.read_text(encoding="utf-8").splitlines()
    dev = [read_tree(line) for line in lines]
    save_model(*train(without_sentences_of(dev, read_trees(TREEBANK)), epochs=3), tmp_path)
    model, vocabulary = load_model(tmp_path)
    with cellrt.Engine() as engine:
        engine.register(make_sentiment(model, vocabulary))
        served = [future.result(timeout=60)["probabilities"] for future in engine.submit_many("sentiment", lines)]
    assert binary_accuracy(torch.stack(served), torch.tensor([tree.labels[-1] for tree in dev])) >= 0.78
    for tree, probabilities in list(zip(dev, served, strict=True))[:50]:
        np.testing.assert_allclose(probabilities, root_probabilities(model, vocabulary, tree), atol=1e-5)
