"""API keys: a check in constant time of whether a request has one."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

BEARER = "bearer "


class Keys:
    """The keys of a server. If there are none, every request is accepted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def came_with(self, headers: Mapping[str, str]) -> bool:
        """Return whether ``X-API-Key`` or ``Authorization: Bearer`` has one of the keys.

        Header names are in lower case.
        """
        if not self._keys:
            return True
        given = headers.get("x-api-key") or headers.get("authorization", "")
        if given.lower().startswith(BEARER):
            given = given[len(BEARER) :]
        found = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return any(found)
