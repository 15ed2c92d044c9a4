"""A client's end of the memory by which its requests join and leave the engine's work without a message.

``core/requests/region_entries.py`` has the other end, ``core/state/region_layout.py`` the layout. A request has a slot
of the region from when it is handed in until its results are taken out. One that finds no slot goes by a message.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from itertools import repeat
from struct import Struct
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.region_layout import (
    ANSWER_WORDS,
    ENTRIES,
    ENTRY_BYTES,
    HANDED,
    HEAD_BYTES,
    NUM_SLOTS,
    NUM_WORDS,
    RESTS,
    RING,
    SLOT_BYTES,
    WORD_BYTES,
    padded,
)
from cellrt.engine.answer_layout import Answers
from cellrt.engine.together import Reader
from cellrt.native.answer_wait import comes_soon, have_told, is_elsewhere, is_there, rouse, sleep_here
from cellrt.native.answer_word import ELSEWHERE, OPEN, THERE, TO_BE_TOLD
from cellrt.native.atomics import stored
from cellrt.native.region_calls import ended, handed_in
from cellrt.process.model_binding import RowFormat
from cellrt.process.outcomes import Arrived, Packed
from cellrt.process.recorded import Template, add_bytes
from cellrt.worker.turn_words import ASLEEP, AWAKE, CALLED, LINE, REST, line_of

_ENTRY = Struct("4q")


def _id_of(slot: int) -> int:
    return ENTRIES + slot * (ENTRY_BYTES // WORD_BYTES) + 1


_WHERE = RING, NUM_SLOTS, HANDED
_WORKERS, _WAKE = (line_of(1) + REST, LINE), (ASLEEP, AWAKE, CALLED)


def warm_up() -> None:
    """Load what a client calls of compiled code, so that no signal's handler comes between."""
    words: NDArray[np.int64] = np.zeros(NUM_WORDS, np.int64)
    at = words.ctypes.data
    handed_in(words, words, 0, *_WHERE, words, *_WORKERS, 0, *_WAKE)
    stored(words, ended(words, 0, 0, words), 0)
    if not is_there(at) and not have_told(at) and not is_elsewhere(at):
        sleep_here(at, at, -1, 0)
        rouse(at)
        comes_soon(at)


class SlotFuture(Protocol):
    """The future of a request that has a slot.

    Attributes:
        id: the client's number of the request.
        region, slot, word_at: where its results come; the word's address, or 0 once they came or come by a message.
    """

    id: int
    region: Region | None
    slot: int
    word_at: int

    @property
    def has_callbacks(self) -> bool:
        """True if it was given any."""

    @property
    def has_ended(self) -> bool:
        """True if it is known to have ended, or was cancelled."""

    def take_arrived(self, arrived: Arrived, number: int) -> None:
        """End the request with results, if it has not ended; its callbacks are called later."""

    def leave_region(self) -> None:
        """Record that the results have come from the region, or come by a message."""

    def call_back(self) -> None:
        """Call its callbacks, each once."""


class Requests(Protocol):
    """The requests of a client that have not ended."""

    def note_ended(self, id: int) -> None:
        """Remove a request that has ended."""


class SlotPlan:
    """The places of the tensors and results of requests of a template in a slot.

    Args:
        number: names the plan to the engine.
        template, formats: those of the requests.
    """

    def __init__(self, number: int, template: Template, formats: Sequence[RowFormat]) -> None:
        self.number, self.template, self._formats = number, template, formats
        self.tensors: list[tuple[int, int]] = []
        """The place where each tensor begins, and its bytes."""
        at = 0
        for kind, rows in template.externals:
            size = rows * formats[kind].num_bytes
            self.tensors.append((at, size))
            at += padded(size)
        self._answers = Answers([Reader(layout, formats[layout.kind].spec) for layout in template.results])
        self._begin, self._end = at, at + self._answers.num_bytes
        plain = [layout for layout in template.results if not layout.is_loop]
        counts = [-1 if layout.is_single else len(layout.positions) for layout in plain]
        sizes = [abs(count) * formats[layout.kind].num_bytes for count, layout in zip(counts, plain)]
        self._places: list[tuple[int, int]] | None = None
        """The indices and rows of results, if they lie as in a message."""
        if len(plain) == len(template.results) and not any(size % WORD_BYTES for size in sizes[:-1]):
            self._places = list(enumerate(counts))

    def packed(self, slot: memoryview) -> Packed:
        """Return a copy of the results in a slot."""
        results = slot[self._begin : self._end]
        if self._places is not None:
            return bytearray(results), self._places, self.template, self._formats
        parts: list[Any] = []
        found = self._answers.results_in(results, 1).bytes_of(0)
        for _, _, memory in found:
            add_bytes(parts, memory)
        places = [(index, rows) for index, rows, _ in found]
        return bytearray(b"".join(parts)), places, self.template, self._formats


class Region:
    """A client's region. Requests are handed in by one thread at a time, and taken in by any.

    An exception out of a signal's handler may come between any two steps. So a future ends before its slot is free, and
    what frees a slot is one step, which is done once: whoever comes later finds the request's number gone.

    Args:
        memory: the region's memory.
        turn_words: the words by which the engine's workers sleep and are woken (``worker/turn_words.py``).
        bell: the descriptor of an eventfd, which wakes the reader; it is closed when nobody has the region any more.
        num_workers: the number of the engine's workers.
        unanswered: the client's requests.
    """

    def __init__(
        self, memory: memoryview, turn_words: memoryview, bell: int, num_workers: int, unanswered: Requests
    ) -> None:
        warm_up()
        self.bell = bell
        weakref.finalize(self, os.close, bell).atexit = False
        self._memory, self._unanswered, self._num_workers = memory, unanswered, num_workers
        self._at = addressof(c_char.from_buffer(memory))
        self._head = memory[:HEAD_BYTES].cast("q")
        self._words: NDArray[np.int64] = np.frombuffer(memory, np.int64, NUM_WORDS)
        self._turn_words: NDArray[np.int64] = np.frombuffer(turn_words, np.int64)
        self._listed: NDArray[np.int64] = np.zeros(NUM_SLOTS, np.int64)
        self._numbers = dict[Template, int]()
        """The numbers of plans, as the engine names them."""
        self._plans = dict[Template, SlotPlan]()
        self._free = list(range(NUM_SLOTS - 1, -1, -1))
        self._slots: dict[int, int] = {}
        """The slot of each request that has one, by its number."""
        self._held: dict[int, tuple[SlotFuture, SlotPlan]] = {}
        """The future and plan of each request that has a slot, by its number."""
        self._written: list[int] = []
        """Slots that are about to be handed in."""
        self.num_drains = 0
        """The number of threads that wait for all requests: then the reader is told of each."""
        self._num_before = 0
        """The number of requests that were handed in before them."""
        self._to_call: deque[SlotFuture] = deque()
        """Futures whose callbacks the reader calls."""

    @property
    def has_plans(self) -> bool:
        """True once the engine has named what runs for requests."""
        return bool(self._numbers)

    def add_plan(self, template: Template, number: int) -> None:
        """Record how the engine names what runs for requests of a template."""
        self._numbers[template] = number

    def plan_of(self, template: Template, formats: Sequence[RowFormat]) -> SlotPlan | None:
        """Return the plan of a template whose rows have these formats; None if the engine has not named it."""
        plan = self._plans.get(template)
        if plan is None and template in self._numbers:
            plan = self._plans[template] = SlotPlan(self._numbers[template], template, formats)
        return plan

    def forget_plans(self, binding: int | None = None) -> None:
        """Forget the plans of a binding, or all: nothing more is handed in for them."""
        for known in (self._numbers, self._plans):
            for template in [its for its in known if binding in (None, its.binding)]:
                known.pop(template, None)

    def id_at(self, slot: int) -> int:
        """Return the address of the number of the last request in a slot."""
        return self._at + WORD_BYTES * _id_of(slot)

    def take_slots(self, count: int) -> Sequence[int]:
        """Return free slots, or none if there are fewer; by who holds the lock of those that hand in."""
        if self._written:
            self._take_back()
        if len(self._free) < count:
            self._reclaim()
            if len(self._free) < count:
                return ()
        self._num_before = self._head[HANDED]
        self._written.extend(map(list.pop, repeat(self._free, count)))  # one step, which nothing interrupts
        return self._written

    def _take_back(self) -> None:
        """Free the slots that somebody who was interrupted was about to hand in, unless they are handed in."""
        if self._head[HANDED] == self._num_before:
            written = set(self._written)
            for id in [id for id, slot in list(self._slots.items()) if slot in written]:
                self._slots.pop(id, None)
                self._held.pop(id, None)
            self._free.extend(slot for slot in self._written if slot not in self._free)
        self._written.clear()

    def write(
        self,
        slot: int,
        plan: SlotPlan,
        future: SlotFuture,
        tensors: Sequence[memoryview],
        number: int,
        now_ns: int,
        how: int,
        *,
        is_told: bool = False,
    ) -> None:
        """Write a request to a slot: the one of a number among several of one graph, whose tensors these are.

        ``how``: its priority and session (``how_of``). ``is_told``: whether the reader is to be told of its results.
        """
        begin = HEAD_BYTES + slot * SLOT_BYTES
        for (first, size), values in zip(plan.tensors, tensors):
            self._memory[begin + first : begin + first + size] = values[number * size : (number + 1) * size]
        at = (ENTRIES * WORD_BYTES) + slot * ENTRY_BYTES
        _ENTRY.pack_into(self._memory, at, plan.number, future.id, now_ns, how)
        # Behind the number, at which those look who wait for the request before; and before anybody finds the request.
        stored(self._words, ANSWER_WORDS + slot, TO_BE_TOLD if self.num_drains or is_told else OPEN)
        future.region, future.slot, future.word_at = self, slot, self._at + (ANSWER_WORDS + slot) * WORD_BYTES
        self._slots[future.id] = slot
        self._held[future.id] = future, plan

    def hand_in(self) -> None:
        """Hand in the requests that were written, and wake a worker."""
        slots, listed = self._written, self._listed
        for k, slot in enumerate(slots):
            listed[k] = slot
        handed_in(self._words, listed, len(slots), *_WHERE, self._turn_words, *_WORKERS, self._num_workers, *_WAKE)
        slots.clear()

    def take_in(self, future: SlotFuture, *, calls_back: bool = True) -> None:
        """End a future, if its results are there; from any thread, which looked before. Its callbacks are called by the
        reader, unless the caller does that."""
        arrived = Arrived()
        number = self._take(future.id, future.slot, arrived)
        if number is None:
            return
        if number >= 0:
            future.take_arrived(arrived, number)
            if calls_back and future.has_callbacks:
                self._to_call.append(future)
                self.ring()
            self._unanswered.note_ended(future.id)
        self.release(future.id)

    def _take(self, id: int, slot: int, arrived: Arrived) -> int | None:
        """Copy the results of a request that has a slot; return their number among those that arrived, -1 if they come
        by a message, or None if they are not there, or were taken. The slot may be another's by now: then the future
        has ended, and does not take them."""
        its, word = self._held.get(id), self._head[ANSWER_WORDS + slot]
        if its is None or word not in (THERE, ELSEWHERE):
            return None
        (future, plan), begin = its, HEAD_BYTES + slot * SLOT_BYTES
        packed = None if word == ELSEWHERE else plan.packed(self._memory[begin : begin + SLOT_BYTES])
        if self._head[_id_of(slot)] != id:  # it is another's by now, and the word may be, too
            return None
        if packed is None:
            future.leave_region()
            return -1
        return arrived.add(packed)

    def release(self, id: int) -> None:
        """Free the slot of a request whose future has ended, or waits for a message; once."""
        with suppress(KeyError):
            self._free.extend(map(self._slots.pop, (id,)))  # one step
        self._held.pop(id, None)

    def _ended(self) -> list[tuple[int, int]]:
        """Return the numbers of requests whose results are there, and their slots.

        A slot may be another request's since it was found: then the word is looked at once more, behind the number.
        """
        if not self._held:
            return []
        slots = np.empty(NUM_SLOTS, np.int64)
        found = slots[: ended(self._words, ANSWER_WORDS, NUM_SLOTS, slots)].tolist()
        its = [(self._head[_id_of(slot)], slot) for slot in found]
        return [(id, at) for id, at in its if id in self._held and self._head[ANSWER_WORDS + at] in (THERE, ELSEWHERE)]

    def take_all(self, arrived: Arrived) -> list[tuple[int, int]]:
        """Return the number of each of the results that are there among those that arrived, and of its request. The
        reader ends its future before it calls ``release``; those that were cancelled are released here."""
        taken: list[tuple[int, int]] = []
        for id, slot in self._ended():
            its = self._held.get(id)
            if its is not None and its[0].has_ended:
                self._unanswered.note_ended(id)
                self.release(id)
            elif (number := self._take(id, slot, arrived)) == -1:
                self.release(id)
            elif number is not None:
                taken.append((number, id))
        return taken

    def call_back(self) -> None:
        """Call the callbacks of futures that other threads have ended; by the reader."""
        while self._to_call:
            self._to_call.popleft().call_back()

    def _reclaim(self) -> None:
        """End futures that nobody asks for, to get their slots; those with callbacks are the reader's."""
        for id, _ in self._ended():
            its = self._held.get(id)
            if its is not None and (its[0].has_ended or not its[0].has_callbacks):
                self.take_in(its[0])

    def rest(self) -> bool:
        """Begin a rest, in which the bell rings when there are results for the client. Only the reader calls it.

        Return whether there are results already.
        """
        stored(self._words, RESTS, 1)
        return bool(self._to_call or self._ended())

    def wake(self, is_rung: bool) -> None:
        """End a rest: the reader looks itself from now on. ``is_rung``: whether its bell was rung."""
        self._head[RESTS] = 0
        if is_rung:
            with suppress(BlockingIOError):
                os.eventfd_read(self.bell)

    def ring(self) -> None:
        """Wake the reader; from any thread."""
        with suppress(BlockingIOError, OSError):
            os.eventfd_write(self.bell, 1)

    def have_all_told(self) -> None:
        """Have the reader told of everything that is handed in."""
        for slot in list(self._slots.values()):
            if have_told(self._at + (ANSWER_WORDS + slot) * WORD_BYTES):
                self.ring()

    def forget(self) -> None:
        """Have futures look at the region no more: the connection has ended, or is the parent's in a forked process."""
        for future, _ in list(self._held.values()):
            future.leave_region()
        self._held, self._slots, self._free = {}, {}, []
        self.forget_plans()
