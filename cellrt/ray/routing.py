"""Which replica a request goes to: of a session, always the same one as long as the same replicas are there.

The place of a session is a function of its name and of the replicas' (consistent hashing, of Ray Serve's own router),
so that all fronts agree without asking anybody, and when one replica comes or goes, only its share of sessions has
another place. Where they do not agree for a moment, a state moves more often than it must, and nothing else happens.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """A router of Ray Serve. Requests in no session go to the less busy of two replicas."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The replicas that may take a request; of each list, the one that has the fewest requests."""
        if pending_request is None or pending_request.metadata.session_id or not candidate_replicas:
            ranks: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
            return ranks
        pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
