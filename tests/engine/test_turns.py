"""Who takes turns: nothing that is told while a turn is taken is forgotten after it."""

from __future__ import annotations

from cellrt.engine.turns import Turns
from cellrt.worker.turn_words import NUM_TURNS, make_words


def test_the_end_of_a_worker_that_is_told_in_a_turn_has_another_turn_look():
    seen: list[int] = []

    def step() -> None:
        seen.append(len(list(turns.take_messages())))
        if len(seen) == 1:
            turns.note_end()

    turns = Turns([], make_words(1), step, bool, bool, lambda: None, lambda error: None, lambda: None)
    turns.take()
    assert seen == [0, 1]


def test_who_reads_the_addresses_of_tables_during_a_turn_finds_that_they_may_have_changed() -> None:
    words = make_words(1)
    in_turn: list[int] = []
    calls = lambda: in_turn.append(int(words[NUM_TURNS])), bool, bool, lambda: None, lambda _: None, lambda: None
    turns = Turns([], words, *calls)
    turns.take()
    assert words[NUM_TURNS] != in_turn[0]
