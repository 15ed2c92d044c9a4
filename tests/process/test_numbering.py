"""The numbers of templates mean the same at both ends, wherever a client is interrupted."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from cellrt.process.numbering import Numbering
from cellrt.process.recorded import Template, template_parts
from cellrt.process.wire import Kind, Message

FIRST, SECOND = (Template(0, program, (), (), ()) for program in (b"first---", b"second--"))


class InterruptError(BaseException):
    """What a signal's handler raises."""


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
        is_interrupted = _interrupted(numbering, place)
        for template in (SECOND, FIRST):
            messages, (number,) = numbering.number([template])
            engine.take(messages)
            numbering.note_sent()
            assert engine.knows(number, template), f"interrupted at {place}"
    assert place > 3


def _interrupted(numbering: Numbering, place: int) -> bool:
    """Numbers another template, interrupted at the ``place``-th place; False if there are not so many."""
    seen = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == place:
                raise InterruptError

    try:
        sys.setprofile(look)
        numbering.number([SECOND])
    except InterruptError:
        return True
    finally:
        sys.setprofile(None)
    return False
