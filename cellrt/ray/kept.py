"""The directory as an actor of Ray: one for an application, which outlives all replicas that come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import exceptions
from ray.util.metrics import Counter

from cellrt.ray.directory import PARKED_S, Directory

NAMESPACE = "cellrt"
ANSWER_S = 5.0
"""A replica that does not say for so long whether it lives is taken to live."""
AT_ONCE = 100_000
LOOK_EVERY_S = 60.0


class KeptDirectory(Directory):
    """A directory as an actor of Ray, which asks Ray which replicas live. It ends when it is no longer used."""

    def __init__(self) -> None:
        moves = Counter("cellrt_session_moves", "States of sessions that moved from one replica to another.")
        super().__init__(_is_alive, moves.inc)
        self._ending: asyncio.Task[None] | None = None

    async def join(self, *args: Any) -> None:
        """Add a replica, as ``Directory.join`` does, and start to watch for an idle directory."""
        self._ending = self._ending or asyncio.create_task(self._end_when_idle())
        await super().join(*args)

    async def leave(self, *args: Any) -> None:  # type: ignore[override]  # Ray's actors of coroutines have nothing else
        """Remove a replica, as ``Directory.leave`` does."""
        super().leave(*args)

    async def park(self, *args: Any) -> None:  # type: ignore[override]
        """Store the states of a leaving replica, as ``Directory.park`` does."""
        super().park(*args)

    async def release(self, *args: Any) -> None:  # type: ignore[override]
        """Note that a session has ended, as ``Directory.release`` does."""
        super().release(*args)

    async def deliver(self, *args: Any) -> None:  # type: ignore[override]
        """Take a state that a replica gave up, as ``Directory.deliver`` does."""
        super().deliver(*args)

    async def counts(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the counts, as ``Directory.counts`` does."""
        return super().counts()

    async def _end_when_idle(self) -> None:
        idle_s = 0.0
        while idle_s < PARKED_S:
            await asyncio.sleep(LOOK_EVERY_S)
            idle_s = 0.0 if await self.num_living() else idle_s + LOOK_EVERY_S
        ray.kill(ray.get_runtime_context().current_actor)


async def _is_alive(actor: Any) -> bool:
    try:
        await asyncio.wait_for(actor.__ray_ready__.remote(), ANSWER_S)
    except exceptions.ActorUnavailableError:  # for the moment
        return True
    except exceptions.RayActorError:
        return False
    except TimeoutError:
        return True
    return True


def kept_directory(application: str) -> Any:
    """Return the handle of an application's directory, which is begun if there is none."""
    return (
        ray.remote(KeptDirectory)
        .options(
            name=f"directory of {application}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=AT_ONCE,
            num_cpus=0,
        )
        .remote()
    )
