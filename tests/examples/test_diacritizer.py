"""The served marks are those that torch and the package's own code give with the same weights."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

import cellrt
from examples.diacritics import TEXTS
from models import diacritizer
from models.diacritizer import letter_ids, with_marks, without_marks

if importlib.util.find_spec("diacritize") is None:
    pytest.skip(f"needs the trained weights: pip install {diacritizer.TO_INSTALL}", allow_module_level=True)

MARKED = "بِسْمِ اللَّهِ"
LENGTHS = (1, 2, 75)
SENTENCES = [*(without_marks(text) for text in TEXTS), *((" ".join(TEXTS))[:length] for length in LENGTHS), "abc ى!"]


@pytest.fixture(scope="module")
def model() -> diacritizer.TorchDiacritizer:
    return diacritizer.TorchDiacritizer(diacritizer.read_weights())


@pytest.fixture(scope="module")
def engine(model: diacritizer.TorchDiacritizer) -> Iterator[cellrt.Engine]:
    with cellrt.Engine() as engine:
        engine.register(diacritizer.make_diacritizer(model))
        yield engine


def test_served_logits_are_torchs(engine: cellrt.Engine, model: diacritizer.TorchDiacritizer) -> None:
    futures = engine.submit_many("diacritizer", [letter_ids(text) for text in SENTENCES])
    for text, future in zip(SENTENCES, futures, strict=True):
        torch.testing.assert_close(
            future.result(timeout=60)["logits"], model(torch.tensor(letter_ids(text))), rtol=1e-4, atol=1e-3
        )


def test_served_texts_are_the_packages_own(engine: cellrt.Engine) -> None:
    package = importlib.import_module("diacritize.baseline.model").BiLSTMDiacritizer.from_pretrained()
    for text in SENTENCES:
        logits = engine.submit("diacritizer", letter_ids(text)).result(timeout=60)["logits"]
        assert with_marks(text, logits) == package.diacritize(text)


def test_the_vocabulary_and_the_marks_are_the_packages_own() -> None:
    tokenizer = importlib.import_module("diacritize.tokenizer").CharTokenizer()
    labels = importlib.import_module("diacritize.config").LABEL_MAP
    assert tokenizer.encode("".join(diacritizer.CHARACTERS[4:]), add_special=False) == list(range(4, 54))
    assert {mark: index for index, mark in enumerate(diacritizer.MARKS)} == labels


def test_marks_are_taken_off_and_put_back() -> None:
    bare = without_marks(MARKED)
    assert bare == "بسم الله"
    marks = ["\u0650", "\u0652", "\u0650", "", "", "", "\u0651\u064e", "\u0650"]
    logits = torch.nn.functional.one_hot(torch.tensor([diacritizer.MARKS.index(mark) for mark in marks]), 15)
    assert without_marks(with_marks(bare, logits)) == bare
    assert sorted(with_marks(bare, logits)) == sorted(MARKED)
