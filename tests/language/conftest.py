"""What tests of language models share: an engine for the tests of a file, and a tiny model in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cellrt
from cellrt.language import served
from cellrt.language.model import LanguageModel
from tests.language import tiny


@pytest.fixture(scope="module")
def engine() -> Iterator[cellrt.Engine]:
    with cellrt.Engine(workers=1, page_bytes=1 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def model(engine: cellrt.Engine) -> LanguageModel:
    return LanguageModel(served.served(tiny.checkpoint()), engine)
