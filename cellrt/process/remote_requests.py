"""Requests that a client in another process submitted, until they have ended; their results need no futures."""

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


class RemoteRequests:
    """Requests of one graph, as ``Ends``.

    Args:
        live: the group of each request of the client, by its id; a request that has left it gets no more results.
        tell: sends the client steps and results, or an id with an error.
        first_id: the first request's id; the others follow it.

    Attributes:
        requests: the group of them, once they are submitted.
    """

    __slots__ = ("_first_id", "_live", "_tell", "requests")

    def __init__(self, live: dict[int, RemoteRequests], tell: Callable[..., None], first_id: int) -> None:
        self._live, self._tell, self._first_id = live, tell, first_id

    def begin(self, group: RequestGroup) -> Self:
        """Record that the requests are submitted; from now on they may end."""
        self.requests = group
        self._live.update(dict.fromkeys(self.ids, self))
        return self

    @property
    def ids(self) -> range:
        """The ids of all the requests."""
        return range(self._first_id, self._first_id + self.requests.count)

    def cancel(self, id: int) -> None:
        """Cancel a request."""
        self.requests.cancel(id - self._first_id)

    def fail(self, number: int, error: CellrtError) -> None:
        """Send the error of a request (see ``Ends``)."""
        id = self._first_id + number
        if self._live.pop(id, None) is not None:
            self._tell((id, error))

    def note(self, numbers: Sequence[int], results: PackedResults, first: int, made: Made) -> None:
        """Send the results of requests (see ``Ends``), without making tensors of them."""
        live, first_id, told = self._live, self._first_id, list[Outcome]()
        for index, number in enumerate(numbers, first):
            if live.pop(first_id + number, None) is not None:
                told.append(Outcome(first_id + number, True, results.bytes_of(index)))
        self._tell(*told)


class RemoteChannel(Channel):
    """A channel that sends a stream's steps to the client; its end is the request's."""

    def __init__(self, tell: Callable[[Outcome], None], id: int, template: Template) -> None:
        super().__init__()
        self._tell, self._id, self._template = tell, id, template
        self._stepped = [index for index, layout in enumerate(template.results) if not layout.is_single]

    def put(self, results: Results, number: int) -> None:
        """Send a step."""
        if isinstance(results, Together):  # no tensor is made of what is only sent on
            parts = [(self._stepped[index], rows, memory) for index, rows, memory in results.bytes_of(number)]
        else:
            parts = parts_of(self._template, results.of(number), False)
        self._tell(Outcome(self._id, False, parts))

    def end(self) -> None:
        """Do nothing: the request's end also ends the stream."""
