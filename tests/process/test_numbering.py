"""The numbers of templates mean the same at both ends, wherever a client is interrupted."""

from __future__ import annotations

from functools import partial

import pytest

from cellrt.process.numbering import Numbering
from cellrt.process.recorded import Template, template_parts
from cellrt.process.wire import Kind, Message
from tests.engine.test_interrupts import interrupted_at

FIRST, SECOND = (Template(0, program, (), (), ()) for program in (b"first---", b"second--"))


class Engine:
    """What the engine's process takes in of messages."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            if message.kind == Kind.FORGET:
                self.told = []
            else:
                self.told.append(b"".join(map(bytes, message.parts)))

    def knows(self, number: int, template: Template) -> bool:
        return self.told[number] == b"".join(map(bytes, template_parts(template)))


@pytest.mark.parametrize("most", [0, 4096])
def test_a_client_that_is_interrupted_while_it_numbers_sends_what_the_engine_understands(most, monkeypatch):
    monkeypatch.setattr(Numbering, "MAX_TEMPLATES", most)
    place, is_interrupted = 0, True
    while is_interrupted:
        place += 1
        numbering, engine = Numbering(), Engine()
        engine.take(numbering.number([FIRST])[0])
        numbering.note_sent()
        is_interrupted = interrupted_at(place, partial(numbering.number, [SECOND]))
        for template in (SECOND, FIRST):
            messages, (number,) = numbering.number([template])
            engine.take(messages)
            numbering.note_sent()
            assert engine.knows(number, template), f"interrupted at {place}"
    assert place > 3
