"""How many rows a ready-made model's request needs: what the page about models says of memory."""

import pytest
import torch

import cellrt
from cellrt import cells, unfolders
from tests.engine.helpers import small_engine

HIDDEN, TOKENS, STEPS = 32, 50, 1000
ARENA_BYTES = 1 << 13
"""64 rows of a state at a worker, 256 in the host's memory; 1,024 and 4,096 tokens."""


@pytest.fixture
def engine():
    with small_engine(arena_bytes=ARENA_BYTES) as made:
        yield made


def test_a_chain_holds_all_of_its_states_only_if_its_steps_are_results(engine):
    gru = cellrt.cell(
        cells.EmbeddingGRUCell(TOKENS, 4, HIDDEN), {"token": cellrt.rows(dtype=torch.int64), "h": (HIDDEN,)}
    )

    @cellrt.unfold("last", example=[1, 2])
    def last(graph, tokens):
        return {"h": graph.chain(gru, token=tokens).last.h}

    engine.register(last)
    engine.register(unfolders.chain("all", gru, states=False))
    assert engine.submit("last", [1] * STEPS).result(60)["h"].shape == (HIDDEN,)
    assert engine.submit("all", [1] * 200).result(60)["output"].shape == (200, HIDDEN)
    with pytest.raises(cellrt.RequestTooLargeError):
        engine.submit("all", [1] * STEPS)


def story(name, max_steps, results):
    torch.manual_seed(0)
    decoder = cells.EmbeddingGRUDecoder(TOKENS, 4, HIDDEN, 1, return_logits=True, return_logprobs=True)
    made = cellrt.cell(decoder, decoder.input_specs())
    return unfolders.generate(name, made, max_steps=max_steps, start=0, results=results)


def test_a_loop_needs_a_row_of_each_result_for_each_step_that_there_may_be(engine):
    engine.register(story("short", 100, ("token", "logits")))
    found = engine.submit("short", {}).result(60)
    assert found["logits"].shape == (len(found["token"]), TOKENS)
    with pytest.raises(cellrt.DefinitionError, match="'long': the request needs .* and 1,000 at the host"):
        engine.register(story("long", STEPS, ("token", "logits")))


def test_logprobs_need_a_number_for_each_step(engine):
    engine.register(story("long", STEPS, ("token", "logprob")))
    found = engine.submit("long", {}).result(60)
    assert found["logprob"].shape == found["token"].shape
