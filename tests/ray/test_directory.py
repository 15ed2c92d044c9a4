"""Who has which session: one owner at a time, whatever replicas come, leave and die; and how a state moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.ray.directory import MOST_BEGUN, Directory, Grant, Order, ReleasedState
from tests.effort import examples

KEY = "kept/caller"
TIME_S = 20.0


class Replicas:
    """Replicas that keep texts as states and do what the directory says; ``dead``: those that do nothing any more."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.moves = 0
        self.states: dict[str, dict[str, bytes]] = {}
        self.grants: dict[str, dict[str, int]] = {}
        self.begun: dict[str, list[str]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.directory = Directory(self._is_alive, self._note_move)

    async def _is_alive(self, actor: object) -> bool:
        return actor not in self.dead

    def _note_move(self) -> None:
        self.moves += 1

    async def begin(self, name: str) -> None:
        self.states[name], self.grants[name] = {}, {}
        await self.directory.join(name, name, {})
        self.tasks[name] = asyncio.create_task(self._hear(name))

    async def _hear(self, name: str) -> None:
        while True:
            for order in await self.directory.orders(name) or ():
                state = self.states[name].pop(order.key, None)
                self.grants[name].pop(order.key, None)
                self.directory.deliver(order, None if state is None else ReleasedState(state, self._begun(order.key)))

    def _begun(self, key: str) -> tuple[str, ...]:
        return tuple(self.begun.pop(key, ())[-MOST_BEGUN:])

    async def ask(self, name: str, key: str = KEY, *, is_start: bool = False) -> bytes | None:
        """Appends a letter to the state at a replica; None if nobody has it."""
        if is_start or key not in self.states[name]:
            grant = await self.directory.take(key, name, is_start=is_start)
            if not grant.number:
                return None
            self.states[name][key], self.grants[name][key] = grant.state or b"", grant.number
        self.states[name][key] += b"."
        return self.states[name][key]

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.tasks.pop(name).cancel()

    def leave(self, name: str) -> None:
        self.tasks.pop(name).cancel()
        grants = self.grants[name]
        states = self.states[name].items()
        left = {Order(key, grants[key]): ReleasedState(state, self._begun(key)) for key, state in states}
        self.directory.park(name, left)
        self.directory.leave(name)

    def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()


def run(body: Callable[[Replicas], Awaitable[None]]) -> Replicas:
    """Runs a story with two replicas."""
    replicas = Replicas()

    async def bounded() -> None:
        async with asyncio.timeout(TIME_S):
            await replicas.begin("one")
            await replicas.begin("two")
            await body(replicas)
            replicas.end()

    asyncio.run(bounded())
    return replicas


def test_a_state_goes_to_the_replica_that_is_asked_and_back() -> None:
    async def story(replicas: Replicas) -> None:
        assert await replicas.ask("one", is_start=True) == b"."
        assert await replicas.ask("two") == b".."
        assert await replicas.ask("one") == b"..."

    assert run(story).moves == 2


def test_a_session_that_nobody_began_is_nowhere() -> None:
    async def story(replicas: Replicas) -> None:
        assert await replicas.directory.take(KEY, "one", is_start=False) == Grant(0)

    run(story)


def test_the_state_of_a_replica_that_died_is_lost_and_said_to_be() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        assert await replicas.directory.state_lacks(KEY, "another")
        replicas.kill("one")
        assert not await replicas.directory.state_lacks(KEY, "another")
        assert await replicas.directory.take(KEY, "two", is_start=False) == Grant(0, is_lost=True)
        assert await replicas.directory.take(KEY, "two", is_start=False) == Grant(0)
        assert await replicas.ask("two", is_start=True) == b"."
        assert replicas.directory.counts()["lost"] == 1

    run(story)


def test_a_session_that_begins_anew_after_its_replica_died_was_lost_too() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        replicas.kill("one")
        assert await replicas.ask("two", is_start=True) == b"."
        assert replicas.directory.counts()["lost"] == 1

    run(story)


def test_a_replica_that_leaves_leaves_its_states_to_who_is_asked_next() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        replicas.leave("one")
        assert replicas.directory.counts()["parked"] == 1 and await replicas.directory.state_lacks(KEY, "another")
        assert await replicas.ask("two") == b".."
        assert replicas.directory.counts() == {"sessions": {"two": 1}, "parked": 0, "moves": 1, "lost": 0}

    run(story)


def test_what_a_replica_leaves_goes_to_who_asks_for_it_though_an_actor_s_methods_are_coroutines() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        hearing = replicas.tasks["one"]
        hearing.cancel()  # as one that leaves: it hears no orders any more
        asking = asyncio.create_task(replicas.ask("two"))
        while not replicas.directory._awaited:
            await asyncio.sleep(0)
        replicas.directory.deliver = lambda *_: asyncio.sleep(0)  # type: ignore[assignment]
        replicas.leave("one")
        assert await asyncio.wait_for(asking, 5) == b".."

    run(story)


def test_a_request_is_outside_of_a_state_only_if_nobody_began_it_who_had_the_state() -> None:
    async def story(replicas: Replicas) -> None:
        directory = replicas.directory
        await replicas.ask("one", is_start=True)
        replicas.begun[KEY] = ["first", "second"]
        replicas.leave("one")
        for _ in range(2):  # left, and then at the next replica
            assert not await directory.state_lacks(KEY, "first") and not await directory.state_lacks(KEY, "second")
            assert await directory.state_lacks(KEY, "third")
            await replicas.ask("two")
        replicas.begun[KEY] = ["third"]
        await replicas.begin("three")
        await replicas.ask("three")
        assert [await directory.state_lacks(KEY, name) for name in ("first", "third", "fourth")] == [
            False,
            False,
            True,
        ]
        assert not await directory.state_lacks("kept/nobody", "first")

    run(story)


def test_who_leaves_while_a_state_is_awaited_gives_it() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        replicas.tasks["one"].cancel()
        taking = asyncio.create_task(replicas.ask("two"))
        await asyncio.sleep(0.01)
        replicas.leave("one")
        assert await taking == b".."

    run(story)


def test_who_leaves_while_one_asks_whether_it_lives_has_given_its_state() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        replicas.tasks["one"].cancel()
        is_alive = replicas._is_alive

        async def leaving(actor: object) -> bool:
            if actor == "one" and "one" in replicas.tasks:
                replicas.leave("one")
                replicas.dead.add("one")
            return await is_alive(actor)

        replicas.directory._is_alive = leaving
        assert await replicas.ask("two") == b".."

    run(story)


def test_a_new_directory_learns_who_has_what() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        successor = Directory(replicas._is_alive, replicas._note_move)
        assert await successor.orders("one") is None
        await successor.join("one", "one", replicas.grants["one"])
        assert successor.counts()["sessions"] == {"one": 1}
        assert (await successor.take(KEY, "one", is_start=False)).number > replicas.grants["one"][KEY]

    run(story)


def test_an_old_owner_s_word_ends_nothing() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        old = replicas.grants["one"][KEY]
        await replicas.ask("two")
        replicas.directory.release(KEY, old)
        assert await replicas.ask("one") == b"..."

    run(story)


NAMES = ("one", "two", "three")
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(NAMES), st.sampled_from(["a", "b"])),
        st.tuples(st.sampled_from(["kill", "leave"]), st.sampled_from(NAMES), st.just("")),
    ),
    max_size=14,
)


@settings(max_examples=examples(60))
@given(ACTS)
def test_each_request_sees_all_before_it_unless_a_replica_died(acts: list[tuple[str, str, str]]) -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.begin("three")
        expected, home = {"a": 0, "b": 0}, {"a": "one", "b": "one"}
        for key in expected:
            await replicas.ask("one", key, is_start=True)
            expected[key] = 1
        for act, name, key in acts:
            if name not in replicas.tasks:
                continue
            if act == "ask":
                seen = await replicas.ask(name, key)
                assert seen == (b"." * (expected[key] + 1) if expected[key] else None)
                if seen:
                    expected[key], home[key] = len(seen), name
            elif act == "kill":
                replicas.kill(name)
                expected |= {key: 0 for key in expected if home[key] == name}
            else:
                replicas.leave(name)
                home |= {key: "parked" for key in home if home[key] == name}

    run(story)


def test_requests_of_one_session_at_all_replicas_at_once_lose_nothing() -> None:
    async def story(replicas: Replicas) -> None:
        await replicas.ask("one", is_start=True)
        seen: list[bytes | None] = []
        for _ in range(20):
            seen += await asyncio.gather(replicas.ask("one"), replicas.ask("two"))
        assert max(len(state or b"") for state in seen) == 41

    run(story)
