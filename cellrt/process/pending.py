"""What a client keeps of a request that runs in another process, until it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cellrt.engine.future import Owner, RequestFuture
from cellrt.engine.stream import Channel
from cellrt.process.binding import RowFormat
from cellrt.process.recorded import Template


class RemoteFuture(RequestFuture):
    """A future whose request runs in another process; ``id`` is its number on the connection."""

    def __init__(self, owner: Owner, id: int) -> None:
        super().__init__(owner)
        self.id = id


class Kindred(NamedTuple):
    """What requests of one submission and one graph have in common."""

    template: Template
    formats: Sequence[RowFormat]
    channel: Channel | None


Pending = tuple[RemoteFuture, Kindred]
"""A request that has not ended."""
