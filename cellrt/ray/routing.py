"""Chooses the replica for a request. A session keeps its replica while the same replicas are there.

The place of a session depends on its name and the names of the replicas alone (consistent hashing, of Ray Serve's own
router). So all fronts agree without asking anybody. When one replica comes or goes, only its share of sessions moves.
While fronts disagree for a moment, a state moves more often than it must, and nothing else happens.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """A router of Ray Serve. Requests in no session go to the less busy of two replicas."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas that may take a request; of each list, the one that has the fewest requests."""
        if pending_request is None or pending_request.metadata.session_id or not candidate_replicas:
            ranks: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
            return ranks
        pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
