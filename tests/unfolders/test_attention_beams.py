"""Beam search over pages: each source's search is the naive one, which computes every hypothesis anew with torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.cells.transformer_beams import pages_of_beams
from cellrt.cells.transformer_stack import EncoderDecoder
from cellrt.definition.spans import PagedRows
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.unfolders.attention import transduce, transduce_with_beams
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, small_engine, watch_suspensions
from tests.oracles.beam import Hypothesis, rank, search
from tests.unfolders.attention_reference import CELLS, END, MAX_STEPS, OTHER_CELLS, REFERENCE, START, draw

NUM_SOURCES = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Search(NamedTuple):
    """What a model searches with."""

    beams: int
    best: int
    length_penalty: float = 0.0


SEARCHES = [Search(1, 1), Search(2, 2, 0.7), Search(4, 3)]


@functools.cache
def model(wanted: Search, cells: EncoderDecoder = CELLS) -> Unfolder:
    return transduce_with_beams(f"beams {wanted.beams}", cells, start=START, max_steps=MAX_STEPS, **wanted._asdict())


def request_of(source: int) -> dict[str, object]:
    """Sources of 1 to 40 tokens; some may make fewer tokens than others."""
    return {"source": draw(source, 1 + (source * 17) % 40), "max_steps": MAX_STEPS - 5 * (source % 3)}


@functools.cache
def naive(source: int, wanted: Search) -> list[Hypothesis]:
    request = request_of(source)
    with torch.no_grad():
        memory = REFERENCE.encoded(request["source"])

        def advance(token: int, tokens: tuple[int, ...]):
            tokens = (*tokens, token)
            return REFERENCE.logits(memory, tokens), tokens

        return search(advance, (), START, END, wanted.beams, request["max_steps"], wanted.length_penalty)


@functools.cache
def alone(source: int, wanted: Search) -> dict[str, torch.Tensor]:
    """A request node by node, without an engine."""
    return run_one_by_one(model(wanted), request_of(source))


def sequences(found) -> list[tuple[int, ...]]:
    return [tuple(tokens[:length]) for tokens, length in zip(found["tokens"].tolist(), found["length"].tolist())]


@pytest.mark.parametrize("wanted", SEARCHES, ids=str)
def test_each_search_is_the_naive_one(wanted):
    for source in range(NUM_SOURCES):
        found, expected = alone(source, wanted), naive(source, wanted)[: wanted.best]
        assert sequences(found) == [each.tokens for each in expected]
        ranks = [rank(each.tokens, each.score, wanted.length_penalty) for each in expected]
        torch.testing.assert_close(found["score"], torch.tensor(ranks), **CLOSE)


def serve(requests: Sequence[tuple[int, Search]], cells: EncoderDecoder, workers: int, page_bytes: int) -> list[bool]:
    """Serves sources together, and checks that each has the bits that it has alone; whether some were suspended."""
    engine = small_engine(workers, page_bytes=page_bytes, debug=True)
    told = watch_suspensions(engine)
    try:
        for wanted in {wanted for _, wanted in requests}:
            engine.register(model(wanted, cells), warm_up=False)
        futures = [engine.submit(model(wanted).name, request_of(source)) for source, wanted in requests]
        for request, future in zip(requests, futures):
            found, expected = future.result(WAIT_S), alone(*request)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), request
    finally:
        close_and_check(engine)
    return told


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(6), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, NUM_SOURCES - 1), st.sampled_from(SEARCHES)), min_size=1, max_size=12),
    workers=st.integers(1, 2),
    page_bytes=st.sampled_from([1, 1 << 20]),
)
def test_results_have_the_same_bits_in_any_company(requests, workers, page_bytes):
    """``page_bytes`` of 1 are 64 pages of each kind at a worker."""
    serve(requests, CELLS, workers, page_bytes)


def test_searches_that_were_suspended_have_the_same_bits():
    """Each takes a page a step, of 64."""
    told = serve([(source, SEARCHES[2]) for source in (0, 0, 3, 0, 0, 0)], OTHER_CELLS, 1, page_bytes=1)
    assert any(told)


def test_one_beam_is_greedy():
    greedy = transduce("greedy", CELLS, start=START, max_steps=MAX_STEPS)
    for source in range(NUM_SOURCES):
        wanted = run_one_by_one(greedy, request_of(source))
        found = alone(source, SEARCHES[0])
        assert sequences(found) == [tuple(wanted["token"].tolist())]
        torch.testing.assert_close(found["score"][0], wanted["logprob"].sum(), **CLOSE)


def test_the_sources_try_what_a_search_can_do():
    """Some end early, some are cut, and the likeliest sequence is not always the greedy one."""
    found = [naive(source, SEARCHES[2]) for source in range(NUM_SOURCES)]
    ends = [each[0].tokens[-1] == END for each in found]
    assert any(ends) and not all(ends)
    assert any(each[0].tokens != naive(source, SEARCHES[0])[0].tokens for source, each in enumerate(found))


def test_pages_of_beams_are_views_of_the_entries_that_hypotheses_continue():
    """Two requests, three beams, pages of two rows: numbers say where they lie."""
    any_pages, layers, page_size, beams, heads, size = 5, 2, 2, 3, 1, 2
    pages = torch.arange(any_pages * layers * 2 * page_size * beams * heads * size, dtype=torch.float32)
    pages = pages.view(any_pages, layers, 2, page_size, beams, heads, size)
    numbers = torch.tensor([0, 1], dtype=torch.int32)
    kv = PagedRows(
        pages,
        torch.tensor([[4, 1], [2, 0]], dtype=torch.int32),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        numbers,
        torch.tensor([2, 0], dtype=torch.int32),
        torch.ones(2, dtype=torch.bool),
        page_dim=2,
    )
    ancestors = torch.randint(0, beams, (2 * beams, 7), dtype=torch.int32)
    for layer, found in enumerate(pages_of_beams(kv, ancestors)):
        for each, kept in ((found.keys, 0), (found.values, 1)):
            assert each.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
            for hypothesis in range(2 * beams):
                request = hypothesis // beams
                assert found.lengths[hypothesis] == kv.lengths[request]
                for step in range(int(kv.lengths[request])):
                    page, row = kv.tables[request, step // 2], step % 2
                    wanted = pages[page, layer, kept, row, ancestors[hypothesis, step]]
                    assert torch.equal(each[found.tables[hypothesis, step], 0], wanted)


def test_mistakes_are_named():
    with pytest.raises(RequestError, match="max_steps from 1 to 20"):
        run_one_by_one(model(SEARCHES[0]), {"source": [1], "max_steps": 21})
    with pytest.raises(DefinitionError, match="1 <= best <= beams"):
        transduce_with_beams("beams", CELLS, start=START, max_steps=4, beams=2, best=3)
    with pytest.raises(DefinitionError, match="max_steps of at most 40, its positions, got 41"):
        transduce_with_beams("beams", CELLS, start=START, max_steps=41)
    with pytest.raises(DefinitionError, match="as encoder_decoder_cells makes it"):
        transduce_with_beams("beams", CELLS._replace(decoder=CELLS.encoder), start=START, max_steps=4)
