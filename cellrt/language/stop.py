"""Stop strings: texts that end an answer, wherever the borders of tokens are."""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.errors import RequestError

MOST_STOPS, LONGEST_STOP = 16, 256


class StopStrings:
    """A filter that cuts a text, which comes in pieces, before the first stop string that is complete.

    Of several that are complete with the same character, the longest counts. Text that may be the beginning of a stop
    string is held back until that is clear, and nothing else.

    Raises RequestError unless ``stops`` are a few texts that are not empty, or one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = [stops] if isinstance(stops, str) else stops
        if len(stops) > MOST_STOPS or not all(
            isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops
        ):
            raise RequestError(
                f"stop: expected at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters, got {stops!r:.200}"
            )
        self._stops = list(stops)
        self._held = ""
        self.is_stopped = False
        """True once a stop string was found."""

    def feed(self, text: str) -> str:
        """Return the part of the text so far that is to be shown now; nothing after a stop string was found."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a proper beginning of a stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
