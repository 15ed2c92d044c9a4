"""Captured work: that of each signature that recurs, while there is memory for them."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.worker.blame import describe_error
from cellrt.worker.device.capturable import NotCapturableError
from cellrt.worker.device.device import Captured, Device, DoneEvent, Work
from cellrt.worker.device.packing import RunSteps
from cellrt.worker.device.signature import Signature

MAX_COUNTED = 4096
STALE_AFTER = 1024
"""A capture that so many tasks did without gives way to another where memory is short."""
ASKED_AGAIN = 16
"""For a run that should be captured as a whole room is looked for again behind so many that went by steps."""


@dataclass
class Side:
    """Work that was captured, with the words that it reads.

    ``numbers``: as compiled code launches it (``launch.py``), where it can.
    """

    words: torch.Tensor
    captured: Captured
    done: DoneEvent | None
    numbers: NDArray[np.int64] | None


@dataclass
class Capture:
    """What was captured of a signature: once, or for compiled code twice, with words of their own: while one side runs
    the words of the other are uploaded."""

    sides: list[Side]
    num_bytes: int
    last_used: int
    """The number of the last task that this was looked up for."""

    def next_numbers(self) -> NDArray[np.int64] | None:
        """Of the side whose turn it is; None: it must be replayed."""
        sides = self.sides
        sides.append(sides.pop(0))
        return sides[-1].numbers

    def replay(self, words: torch.Tensor) -> None:
        """Inside ``work``: repeats it with these words."""
        self.sides[0].words.copy_(words)
        self.sides[0].captured.replay()


class CapturedSteps:
    """What was captured of steps of runs, which differ in their numbers of rows alone: one after the other, they read
    the same words, which each takes from where the first of these words says.

    Attributes:
        numbers: as compiled code launches it (``launch.py``): where the words are, and a graph for each size, or 0.
    """

    def __init__(self, words: torch.Tensor, sizes: Sequence[int], num_tasks: int) -> None:
        self.words, self.num_bytes, self.last_used = words, 0, num_tasks
        self.numbers = np.zeros(1 + len(sizes), np.int64)
        self.numbers[0] = words.data_ptr()
        self._sizes = list(sizes)
        self._captured: dict[int, Captured] = {}

    def add(self, rows: int, captured: Captured, num_bytes: int) -> None:
        """Another size."""
        self._captured[rows] = captured
        self.numbers[1 + self._sizes.index(rows)] = captured.handle
        self.num_bytes += num_bytes

    def has(self, rows: int) -> bool:
        """Whether steps of so many rows were captured."""
        return rows in self._captured

    def point_at(self, at: int) -> None:
        """Inside ``work``: has the next step take its words from word ``at`` of the ring on."""
        self.words[:1].fill_(at)

    def replay(self, rows: int, at: int) -> None:
        """Inside ``work``: repeats a step whose words begin at word ``at`` of the ring."""
        self.point_at(at)
        self._captured[rows].replay()


class Captures:
    """Decides which signatures are captured. Belongs to whoever runs the device's work.

    Args:
        device: that captures.
        budget_bytes: device memory that captures may take in all; 0 captures nothing.
        after: how often a signature runs before it is captured, at least 1, which warms its cell up.
        whole_after: how often a run that may go by steps does so before it is captured as a whole; None: always.

    Attributes:
        counts: ``captures`` made, ``captures_refused`` by work that cannot be captured, ``captures_failed`` on the
            device, ``captures_evicted``, and tasks that were ``replayed``.
    """

    COUNTED = ("replayed", "captures", "captures_refused", "captures_failed", "captures_evicted")

    def __init__(self, device: Device, budget_bytes: int, after: int = 2, whole_after: int | None = 0) -> None:
        self._device, self._budget_bytes, self._after = device, budget_bytes, max(1, after)
        self._whole_after = whole_after
        self._by_steps: Counter[Signature] = Counter()
        """How often a run of a signature that may be captured as a whole went by steps."""
        self._by_steps_now: Signature | None = None
        """That of the run that was asked about last, if it goes by steps."""
        self._refusing: set[int] = set()
        """Cell types some of whose work was refused."""
        self._known: dict[Signature, Capture | CapturedSteps | None] = {}
        """Those that cannot be captured have none."""
        self._seen: OrderedDict[Signature, int] = OrderedDict()
        self._num_tasks = 0
        self._lost_bytes = 0
        """What captures took that failed: nobody gives it back."""
        self.counts: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        """Device memory that captures have taken."""
        return self._lost_bytes + sum(capture.num_bytes for capture in list(self._known.values()) if capture)

    def find(self, signature: Signature) -> Capture | None:
        """The capture of a signature, if there is one."""
        capture = self._use(signature)
        return capture if isinstance(capture, Capture) else None

    def goes_whole(self, signature: Signature) -> bool:
        """Whether a run that may go by steps is captured, may not go by captured steps, or has gone by steps often
        enough to be captured now: a graph for each size of a run takes long to make, and saves little of a run."""
        self._by_steps_now = None
        if signature.type_id in self._refusing:
            return True
        if signature in self._known:
            return self._known[signature] is not None  # else its capture failed; those of its steps are there
        if self._whole_after is None:
            return False
        count = self._by_steps[signature]
        if count < self._whole_after or (count - self._whole_after) % ASKED_AGAIN or not self._has_room():
            self._by_steps_now = signature
            return False
        if count >= self._after:
            self._seen.setdefault(signature, self._after - 1)
        return True

    def note_task(self) -> None:
        """A task was begun; if it is the run that was asked about last, it goes by steps."""
        self._num_tasks += 1
        if self._by_steps_now is not None:
            if len(self._by_steps) > MAX_COUNTED:
                self._by_steps.clear()
            self._by_steps[self._by_steps_now] += 1
            self._by_steps_now = None  # the next may be of a cell that is not asked about

    def find_steps(self, signature: Signature) -> CapturedSteps | None:
        """What was captured of steps, by the signature of all."""
        capture = self._use(signature)
        return capture if isinstance(capture, CapturedSteps) else None

    def _use(self, signature: Signature) -> Capture | CapturedSteps | None:
        capture = self._known.get(signature)
        if capture is not None:
            capture.last_used = self._num_tasks
        return capture

    def is_due(self, signature: Signature) -> bool:
        """Counts a signature that has run without a capture; whether it should be captured now.

        Where there is no memory, captures that nobody used for long give way, if there are such.
        """
        if signature in self._known or not self._budget_bytes:
            return False
        count = self._seen.pop(signature, 0) + 1
        self._seen[signature] = count
        if len(self._seen) > MAX_COUNTED:
            self._seen.popitem(last=False)
        return count >= self._after and self._has_room()

    def make(
        self,
        signature: Signature,
        words: torch.Tensor,
        operations_of: Callable[[torch.Tensor], Work],
        has_download: bool,
    ) -> bool:
        """Captures a signature's work, unless that is refused (False). What is not captured runs as before; what loses
        the device raises.

        ``words`` are those of a task that has just run. No row is read and written in one task, so a device that runs
        what it captures does it no harm.
        """

        def make(before: int) -> None:
            sides = [self._side(words.clone(), operations_of, has_download)]
            if sides[0].numbers is not None:
                sides.append(self._side(words.clone(), operations_of, has_download))
            num_bytes = max(0, self._device.memory_in_use() - before)
            self._known[signature] = Capture(sides, num_bytes, self._num_tasks)

        return self._try(signature, make)

    def make_step(
        self, signature: Signature, steps: RunSteps, of_all: Signature, at: int, work_of: Callable[[torch.Tensor], Work]
    ) -> None:
        """Captures a step, which has just run and whose words begin at word ``at`` of the ring; as ``make``.

        ``of_all`` is its signature without its size. ``work_of`` is given words of its own, of which the first says
        where the others are to be copied from.
        """
        rows = signature.sizes[0]

        def make(before: int) -> None:
            found = self._known.get(of_all)
            if not isinstance(found, CapturedSteps):
                most = steps.num_words(steps.sizes[-1])
                words = torch.zeros(most, dtype=torch.int64, device=self._device.torch_device)
                found = CapturedSteps(words, steps.sizes, self._num_tasks)
            work = work_of(found.words[: signature.num_words])
            captured = self._device.capture(work, before=lambda: found.point_at(at))
            found.add(rows, captured, max(0, self._device.memory_in_use() - before))
            self._known[of_all] = found
            del self._known[signature]

        self._try(signature, make)

    def _try(self, signature: Signature, make: Callable[[int], None]) -> bool:
        """Calls ``make`` with the memory that is in use; if it fails the signature is not captured. False: it does what
        cannot be captured."""
        before = self._device.memory_in_use()
        self._seen.pop(signature, None)
        self._known[signature] = None
        try:
            make(before)
        except NotCapturableError:
            self.counts["captures_refused"] += 1
            self._refusing.add(signature.type_id)
            return False
        except BaseException as error:  # the cell's own code runs meanwhile
            self._device.check()
            self._lost_bytes += max(0, self._device.memory_in_use() - before)
            self.counts["captures_failed"] += 1
            logging.getLogger("cellrt").warning("a task was not captured and runs as it is: %s", describe_error(error))
        else:
            self.counts["captures"] += 1
        return True

    def _side(self, words: torch.Tensor, operations_of: Callable[[torch.Tensor], Work], has_download: bool) -> Side:
        captured = self._device.capture(operations_of(words), not has_download)
        if not captured.handle or self._device.direct is None:
            return Side(words, captured, None, None)
        done = self._device.make_event()
        numbers = np.array([words.data_ptr(), captured.handle, done.cuda_event], np.int64)
        return Side(words, captured, done, numbers)

    def forget(self, type_id: int) -> None:
        """Drops the captures of a cell type that no task has; while others are found and made."""
        for signature in [signature for signature in list(self._known) if signature.type_id == type_id]:
            self._known.pop(signature, None)
        for signature in [signature for signature in list(self._by_steps) if signature.type_id == type_id]:
            self._by_steps.pop(signature, None)
        self._refusing.discard(type_id)

    def _has_room(self) -> bool:
        """Whether the budget allows one more, for which others may be dropped."""
        made = [(signature, capture) for signature, capture in list(self._known.items()) if capture is not None]
        for signature, capture in sorted(made, key=lambda known: known[1].last_used):
            if self.used_bytes < self._budget_bytes or self._num_tasks - capture.last_used < STALE_AFTER:
                break
            self._known.pop(signature, None)
            self.counts["captures_evicted"] += 1
        return self.used_bytes < self._budget_bytes
