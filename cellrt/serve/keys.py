"""API keys: whether one of them came, found out in the same time however much of it is right."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

BEARER = "bearer "


class Keys:
    """The keys of a server; any request has one if there are none."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def came_with(self, headers: Mapping[str, str]) -> bool:
        """Whether ``X-API-Key`` or ``Authorization: Bearer`` has one of them; names are in lower case."""
        if not self._keys:
            return True
        given = headers.get("x-api-key") or headers.get("authorization", "")
        if given.lower().startswith(BEARER):
            given = given[len(BEARER) :]
        found = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return any(found)
