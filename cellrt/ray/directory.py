"""The directory of sessions: it knows which replica has which session's state, and moves states between replicas.

There is one directory. Replicas call it when a session begins or ends, and when a request comes to a replica that does
not have its session's state. For other requests they do not call it. The directory never calls a replica: each replica
waits for ``orders``.

A session has one owner at a time. Each grant of ownership has a number. An order to give a state up has the number of
the grant that it ends. So a replica can tell if the answer with that grant is still on its way. A directory belongs to
one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CHECK_EVERY_S = 0.25
"""The interval at which the directory checks that a replica is alive while it waits for a state from it."""
MOVE_S = 120.0
"""The time that giving a state up may take: requests that were submitted before run first."""
POLL_S = 5.0
"""The time that a replica waits for orders before it asks again."""
MOST_BEGUN = 64
"""The number of a session's newest requests that are remembered as part of its state."""
PARKED_S = 3600.0
"""The longest time for which states of a replica that left are kept, unless another replica asks for them."""


class Order(NamedTuple):
    """An order to a replica: give up the session that the grant with this number gave it."""

    key: str
    grant: int


class Grant(NamedTuple):
    """A message to a replica that asked for a session: it owns the session now.

    Attributes:
        number: the grant's number; 0: no replica has the session.
        state: the session's exported state; None if the session is new, or the replica has the state already.
        is_lost: whether the state is lost, as the replica that had it died.
    """

    number: int
    state: bytes | None = None
    is_lost: bool = False


class ReleasedState(NamedTuple):
    """The state of a session that a replica gives up, exported. ``begun``: the newest requests that are part of it."""

    state: bytes
    begun: tuple[str, ...] = ()


class Owner(NamedTuple):
    """The owner of a session: a replica and its grant. ``begun``: requests that earlier owners began."""

    replica: str
    grant: int
    begun: tuple[str, ...] = ()


class Parked(NamedTuple):
    """The state of a session whose replica has left, and when the directory got it."""

    left: ReleasedState
    since_s: float


@dataclass
class Peer:
    """A replica; ``actor``: its Ray actor, to check that it is alive."""

    actor: Any
    orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)


class Directory:
    """The directory of sessions; the module describes its protocol.

    Args:
        is_alive: returns whether a replica's actor is alive.
        note_move: called when a state has moved.
    """

    def __init__(self, is_alive: Callable[[Any], Awaitable[bool]], note_move: Callable[[], None]) -> None:
        self._is_alive, self._note_move = is_alive, note_move
        self._peers: dict[str, Peer] = {}
        self._owners: dict[str, Owner] = {}
        self._parked: dict[str, Parked] = {}
        self._awaited: dict[Order, asyncio.Future[ReleasedState | None]] = {}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._last_grant = time.time_ns()  # so a new directory's numbers are greater than an old one's
        self._moves = self._lost = 0

    async def join(self, replica: str, actor: Any, held: Mapping[str, int]) -> None:
        """Add a replica, with the sessions that it has and the numbers of their grants."""
        self._peers[replica] = Peer(actor)
        for key, number in held.items():
            if key not in self._owners or self._owners[key].grant < number:
                self._owners[key] = Owner(replica, number)
        await self.num_living()

    async def num_living(self) -> int:
        """Return how many replicas there are; forget those that have died."""
        for name, peer in list(self._peers.items()):
            if not await self._is_alive(peer.actor):
                self._peers.pop(name, None)
        return len(self._peers)

    async def orders(self, replica: str) -> list[Order] | None:
        """Wait for orders to a replica to give states up, and return them; None if it must join first."""
        peer = self._peers.get(replica)
        if peer is None:
            return None
        orders = []
        try:
            async with asyncio.timeout(POLL_S):
                orders.append(await peer.orders.get())
        except TimeoutError:
            return []
        while not peer.orders.empty():
            orders.append(peer.orders.get_nowait())
        return orders

    async def take(self, key: str, replica: str, *, is_start: bool) -> Grant:
        """Make a replica the owner of a session, which may be new or have another owner."""
        lock, waiting = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, waiting + 1
        try:
            async with lock:
                return await self._take(key, replica, is_start)
        finally:
            lock, waiting = self._locks.pop(key)
            if waiting > 1:
                self._locks[key] = lock, waiting - 1

    async def _take(self, key: str, replica: str, is_start: bool) -> Grant:
        owner, left = self._owners.get(key), None
        if owner is not None and owner.replica != replica:
            left = await self._fetch(key, owner)
            if left is None:
                self._lost += 1
                if not is_start:
                    self._owners.pop(key, None)
                    return Grant(0, is_lost=True)
        if owner is None and not is_start:
            return Grant(0)
        self._last_grant += 1
        begun = (*(owner.begun if owner else ()), *(left.begun if left else ()))
        self._owners[key] = Owner(replica, self._last_grant, begun[-MOST_BEGUN:])
        if left is None or is_start:
            return Grant(self._last_grant)
        self._moves += 1
        self._note_move()
        return Grant(self._last_grant, left.state)

    async def _fetch(self, key: str, owner: Owner) -> ReleasedState | None:
        """Return the state of a session from its owner; None if it is lost."""
        parked = self._parked.pop(key, None)
        if parked is not None:
            return parked.left
        peer, order = self._peers.get(owner.replica), Order(key, owner.grant)
        if peer is None:
            return None
        given = self._awaited[order] = asyncio.get_running_loop().create_future()
        peer.orders.put_nowait(order)
        try:
            async with asyncio.timeout(MOVE_S):
                while not given.done():
                    await asyncio.wait([given], timeout=CHECK_EVERY_S)
                    if given.done() or await self._is_alive(peer.actor):
                        continue
                    self._peers.pop(owner.replica, None)
                    if not given.done():  # it may have delivered the state before it left
                        return None
            left: ReleasedState | None = given.result()
        except TimeoutError:
            return None
        finally:
            del self._awaited[order]
        return left

    def deliver(self, order: Order, left: ReleasedState | None) -> None:
        """Receive the state that an order asked for; None if the replica did not have it."""
        self._hand_on(order, left)

    def _hand_on(self, order: Order, left: ReleasedState | None) -> None:
        """Pass a state to the call of ``take`` that waits for it."""
        given = self._awaited.get(order)
        if given is not None and not given.done():
            given.set_result(left)

    def release(self, key: str, grant: int) -> None:
        """Forget a session that has ended."""
        owner = self._owners.get(key)
        if owner is not None and owner.grant == grant:
            del self._owners[key]

    def leave(self, replica: str) -> None:
        """Forget a replica that ends, after it has parked its sessions."""
        self._peers.pop(replica, None)

    def park(self, replica: str, sessions: Mapping[Order, ReleasedState]) -> None:
        """Keep the states of a replica that is about to leave, until other replicas get requests of their sessions."""
        now_s = time.monotonic()
        self._parked = {k: parked for k, parked in self._parked.items() if now_s - parked.since_s < PARKED_S}
        for order, left in sessions.items():
            owner = self._owners.get(order.key)
            if order in self._awaited:
                self._hand_on(order, left)  # not by ``deliver``, which an actor makes a coroutine
            elif owner is not None and (owner.replica, owner.grant) == (replica, order.grant):
                self._parked[order.key] = Parked(left, now_s)

    async def state_lacks(self, key: str, request: str) -> bool:
        """Return whether the state of a session still exists, and a request is not part of it.

        Then the request can be repeated although the replica died that had it: another replica has the state.
        """
        owner = self._owners.get(key)
        peer = None if owner is None else self._peers.get(owner.replica)
        is_held = key in self._parked or (peer is not None and await self._is_alive(peer.actor))
        owner, parked = self._owners.get(key), self._parked.get(key)  # the owner may have changed meanwhile
        if owner is None or not (is_held or parked):
            return False
        return request not in owner.begun and (parked is None or request not in parked.left.begun)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of sessions by replica, of parked states, and of moves and losses since the start."""
        sessions = dict.fromkeys(self._peers, 0)
        for key, owner in self._owners.items():
            if owner.replica in sessions and key not in self._parked:
                sessions[owner.replica] += 1
        return {"sessions": sessions, "parked": len(self._parked), "moves": self._moves, "lost": self._lost}
