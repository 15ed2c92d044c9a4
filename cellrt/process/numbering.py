"""The numbers by which messages name templates that the engine's process has."""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.process.recorded import LENGTH, Template, template_parts
from cellrt.process.wire import Kind, Message


class Numbering:
    """The templates that the engine's process has, by number. Both sides forget them together."""

    MAX_TEMPLATES, MAX_BYTES = 4096, 1 << 24

    def __init__(self) -> None:
        self._numbers: dict[Template, int] = {}
        self._templates: list[Template] = []
        self._generation = 0
        """The number of times that they were forgotten."""
        self._num_bytes = 0
        self._is_in_doubt = False
        """True if the last messages may not have been sent: then the next ones begin anew."""

    def template_of(self, generation: int, number: int) -> Template | None:
        """Return the template of a number; None if it was forgotten since."""
        if generation != self._generation or self._is_in_doubt or number >= len(self._templates):
            return None
        return self._templates[number]

    def note_sent(self) -> None:
        """Record that the last messages were sent."""
        self._is_in_doubt = False

    def number(self, templates: Sequence[Template]) -> tuple[list[Message], list[int]]:
        """Return the messages that send new templates, and the numbers of all templates.

        After these messages are sent, ``note_sent`` must be called.
        """
        begins_anew = self._is_in_doubt or len(self._numbers) > self.MAX_TEMPLATES or self._num_bytes > self.MAX_BYTES
        self._is_in_doubt = True  # before anything changes: an interrupted call has sent nothing
        messages: list[Message] = []
        if begins_anew:
            self._numbers, self._templates, self._num_bytes = {}, [], 0
            self._generation += 1
            messages.append(Message(Kind.FORGET, (LENGTH.pack(self._generation),)))
        numbers = []
        for template in templates:
            number = self._numbers.get(template)
            if number is None:
                number = self._numbers[template] = len(self._numbers)
                self._templates.append(template)
                self._num_bytes += template.num_bytes
                messages.append(Message(Kind.TEMPLATE, template_parts(template)))
            numbers.append(number)
        return messages, numbers
