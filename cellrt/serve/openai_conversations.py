"""The conversations of a front end, by the ids that clients give them. They belong to its event loop.

Each front end has its own: only the front end that read a conversation knows its tokens. A request whose conversation
another front end has is answered without one, and so are those whose conversation was dropped for newer ones.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from cellrt.language.conversation import Conversation
from cellrt.process.client import Client
from cellrt.serve.backend import Backend
from cellrt.serve.described import Described


class Conversations:
    """The conversations of a front end. ``backend``: the engine with their sessions."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: OrderedDict[tuple[str, str, str], Conversation] = OrderedDict()
        self._client: Client | None = None
        self._opening = asyncio.Lock()

    async def of(self, described: Described, id: str) -> Conversation:
        """Return the conversation of an id with a model, or a new one. Raise what ``Client.session`` raises."""
        name, key = described.name, (described.name, described.version, id)
        async with self._opening:
            client = self._backend.client
            if client is not self._client:  # sessions have ended with the engine that they were in
                self._client = client
                self._known.clear()
            found = self._known.get(key)
            if found is None:
                found = await asyncio.to_thread(Conversation, lambda: client.session(name))
                self._known[key] = found
            self._known.move_to_end(key)
            if len(self._known) > self._backend.settings.limits.max_sessions:
                _, oldest = self._known.popitem(last=False)
                await asyncio.to_thread(oldest.close)
            return found
