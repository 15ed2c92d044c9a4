"""Encoders of sentences and encoder-decoders of attention alone, against torch's own Transformer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.cells.transformer_stack import sentence_encoder
from cellrt.errors import RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.unfolders.attention import embed, transduce
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.unfolders.attention_reference import CELLS, END, MAX_STEPS, REFERENCE, START, draw

SENTENCES = sentence_encoder(REFERENCE.encoder, max_batch=4, max_batch_rows=40)
LENGTHS = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40)), min_size=1, max_size=12)
THOROUGH = settings(suppress_health_check=list(HealthCheck), max_examples=examples(6), deadline=None)


@THOROUGH
@given(drawn=LENGTHS, workers=st.integers(1, 2))
def test_embeddings_are_those_of_each_sentence_alone_in_torch(drawn, workers):
    engine = small_engine(workers, debug=True)
    try:
        engine.register(embed("embed", SENTENCES), warm_up=False)
        futures = [engine.submit("embed", draw(*one)) for one in drawn]
        for one, future in zip(drawn, futures):
            with torch.no_grad():
                wanted = REFERENCE.sentence(draw(*one))
            torch.testing.assert_close(future.result(WAIT_S)["embedding"], wanted, atol=1e-5, rtol=1e-4)
    finally:
        close_and_check(engine)


@THOROUGH
@given(drawn=LENGTHS, workers=st.integers(1, 2))
def test_translations_are_those_of_each_source_alone_in_torch(drawn, workers):
    """64 pages at a worker, of which a source and its translation take up to 15."""
    engine = small_engine(workers, page_bytes=1, debug=True)
    try:
        engine.register(transduce("translate", CELLS, start=START, max_steps=MAX_STEPS), warm_up=False)
        futures = [engine.submit("translate", draw(*one)) for one in drawn]
        for one, future in zip(drawn, futures):
            with torch.no_grad():
                wanted = REFERENCE.translate(draw(*one))
            assert future.result(WAIT_S)["token"].tolist() == wanted
    finally:
        close_and_check(engine)


def test_translations_differ_and_some_end():
    with torch.no_grad():
        found = [REFERENCE.translate(draw(seed, 3 + seed)) for seed in range(12)]
    assert len({tuple(tokens) for tokens in found}) > 6
    assert any(tokens[-1] == END for tokens in found)


def test_mistakes_in_requests_are_named():
    translate = transduce("translate", CELLS, start=START, max_steps=MAX_STEPS)
    with pytest.raises(RequestError, match="at least one token"):
        run_one_by_one(translate, [])
    with pytest.raises(RequestError, match="max_steps from 1 to 20"):
        run_one_by_one(translate, {"source": [1], "max_steps": 21})
    with pytest.raises(RequestError, match="at least one token"):
        run_one_by_one(embed("embed", SENTENCES), [])
    with pytest.raises(RequestError, match="a sequence of 41 rows; its module has positions for 40"):
        run_one_by_one(embed("embed", SENTENCES), draw(0, 41))
