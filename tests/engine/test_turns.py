"""Who takes turns: nothing that is told while a turn is taken is forgotten after it."""

from __future__ import annotations

from cellrt.engine.turns import Turns
from cellrt.worker.turn_words import make_words


def test_the_end_of_a_worker_that_is_told_in_a_turn_has_another_turn_look():
    seen: list[int] = []

    def step() -> None:
        seen.append(len(list(turns.take_messages())))
        if len(seen) == 1:
            turns.note_end()

    turns = Turns([], make_words(1), step, lambda: None, lambda error: None, lambda: None)
    turns.take()
    assert seen == [0, 1]
