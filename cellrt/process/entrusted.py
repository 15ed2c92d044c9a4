"""What a client in another process submitted, until it has ended: how it does is told without a future for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from cellrt.engine.future import PackedResults, Results
from cellrt.engine.futures import Made
from cellrt.engine.request_group import RequestGroup
from cellrt.engine.stream import Channel
from cellrt.engine.together import Together
from cellrt.errors import CellrtError
from cellrt.process.outcomes import Outcome, parts_of
from cellrt.process.recorded import Template


class Entrusted:
    """Requests of one graph, as ``Ends``.

    Args:
        live: to which of these each request of the client belongs, by its id; who has left it is told nothing.
        tell: has the client told, of steps and results, or with an id of an error.
        first_id: the first's id; the others follow it.

    Attributes:
        requests: the group of them, once they are handed in.
    """

    __slots__ = ("_first_id", "_live", "_tell", "requests")

    def __init__(self, live: dict[int, Entrusted], tell: Callable[..., None], first_id: int) -> None:
        self._live, self._tell, self._first_id = live, tell, first_id

    def begin(self, group: RequestGroup) -> Self:
        """Takes in that they are handed in; from now on they may end."""
        self.requests = group
        self._live.update(dict.fromkeys(self.ids, self))
        return self

    @property
    def ids(self) -> range:
        """Of them all."""
        return range(self._first_id, self._first_id + self.requests.count)

    def cancel(self, id: int) -> None:
        """Has a request ended early."""
        self.requests.cancel(id - self._first_id)

    def fail(self, number: int, error: CellrtError) -> None:
        """As of ``Ends``."""
        id = self._first_id + number
        if self._live.pop(id, None) is not None:
            self._tell((id, error))

    def note(self, numbers: Sequence[int], results: PackedResults, first: int, made: Made) -> None:
        """As of ``Ends``: no tensor is made of what is only sent on."""
        live, first_id, told = self._live, self._first_id, list[Outcome]()
        for place, number in enumerate(numbers, first):
            if live.pop(first_id + number, None) is not None:
                told.append(Outcome(first_id + number, True, results.bytes_of(place)))
        self._tell(*told)


class GuestChannel(Channel):
    """Hands a stream's steps on; its end is the request's."""

    def __init__(self, tell: Callable[[Outcome], None], id: int, template: Template) -> None:
        super().__init__()
        self._tell, self._id, self._template = tell, id, template
        self._stepped = [index for index, layout in enumerate(template.results) if not layout.is_single]

    def put(self, results: Results, number: int) -> None:
        """Hands a step on."""
        if isinstance(results, Together):  # no tensor is made of what is only sent on
            parts = [(self._stepped[index], rows, memory) for index, rows, memory in results.bytes_of(number)]
        else:
            parts = parts_of(self._template, results.of(number), False)
        self._tell(Outcome(self._id, False, parts))

    def end(self) -> None:
        """Nothing: the request's end says it."""
