"""Captured CUDA graphs of recurring signatures, within a budget of memory."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.worker.device.capturable import NotCapturableError
from cellrt.worker.device.device import Captured, Device, DoneEvent, Work
from cellrt.worker.device.packing import RunSteps
from cellrt.worker.device.signature import Signature
from cellrt.worker.failed_rows import describe_error

MAX_COUNTED = 4096
STALE_AFTER = 1024
"""The number of tasks without use after which a capture may be evicted where memory is short."""
ASKED_AGAIN = 16
"""The runs by steps between two checks of the budget, for a run that should be captured as a whole."""


@dataclass
class Side:
    """Captured work, with the words that it reads.

    ``numbers``: its addresses for compiled code, in the layout of ``launch.py``, if that may launch it.
    """

    words: torch.Tensor
    captured: Captured
    done: DoneEvent | None
    numbers: NDArray[np.int64] | None


@dataclass
class Capture:
    """The capture of a signature: one side, or for compiled code two, each with its own words.

    While one side runs, the words of the other are uploaded.
    """

    sides: list[Side]
    num_bytes: int
    last_used: int
    """The number of the last task that used this."""

    def next_numbers(self) -> NDArray[np.int64] | None:
        """Return the numbers of the side whose turn it is; None if it must be replayed."""
        sides = self.sides
        sides.append(sides.pop(0))
        return sides[-1].numbers

    def replay(self, words: torch.Tensor) -> None:
        """Repeat it with these words, inside ``work``."""
        self.sides[0].words.copy_(words)
        self.sides[0].captured.replay()


class CapturedSteps:
    """Captured steps of runs, one for each number of rows. They share one array of words.

    They run one after the other, and each copies its words from the ring, from where the first of the shared words
    says.

    Attributes:
        numbers: the addresses for compiled code, in the layout of ``launch.py``: of the words, and a graph for each
            size,
            or 0.
    """

    def __init__(self, words: torch.Tensor, sizes: Sequence[int], num_tasks: int) -> None:
        self.words, self.num_bytes, self.last_used = words, 0, num_tasks
        self.numbers = np.zeros(1 + len(sizes), np.int64)
        self.numbers[0] = words.data_ptr()
        self._sizes = list(sizes)
        self._captured: dict[int, Captured] = {}

    def add(self, rows: int, captured: Captured, num_bytes: int) -> None:
        """Add the capture of another number of rows."""
        self._captured[rows] = captured
        self.numbers[1 + self._sizes.index(rows)] = captured.handle
        self.num_bytes += num_bytes

    def has(self, rows: int) -> bool:
        """Return whether steps of this many rows were captured."""
        return rows in self._captured

    def point_at(self, at: int) -> None:
        """Set where the next step takes its words from: word ``at`` of the ring. Call it inside ``work``."""
        self.words[:1].fill_(at)

    def replay(self, rows: int, at: int) -> None:
        """Repeat a step whose words begin at word ``at`` of the ring, inside ``work``."""
        self.point_at(at)
        self._captured[rows].replay()


class Captures:
    """The choice of signatures to capture, and their captures. Belongs to the thread that runs the device's work.

    Args:
        device: captures.
        budget_bytes: device memory that captures may take in all; 0 captures nothing.
        after: the runs of a signature before it is captured, at least 1, which warms its cell up.
        whole_after: the runs by steps, of a run that may go by steps, before it is captured as a whole; None: it never
            is.

    Attributes:
        counts: ``captures`` made, ``captures_refused`` by work that cannot be captured, ``captures_failed`` on the
            device, ``captures_evicted``, and tasks that were ``replayed``.
    """

    COUNTED = ("replayed", "captures", "captures_refused", "captures_failed", "captures_evicted")

    def __init__(self, device: Device, budget_bytes: int, after: int = 2, whole_after: int | None = 0) -> None:
        self._device, self._budget_bytes, self._after = device, budget_bytes, max(1, after)
        self._whole_after = whole_after
        self._by_steps: Counter[Signature] = Counter()
        """The number of runs by steps of each signature that may be captured as a whole."""
        self._by_steps_now: Signature | None = None
        """The signature of the run that ``goes_whole`` was last called for, if it goes by steps."""
        self._refusing: set[int] = set()
        """Cell types with work that was refused."""
        self._known: dict[Signature, Capture | CapturedSteps | None] = {}
        """Captures by signature; None for those that cannot be captured."""
        self._seen: OrderedDict[Signature, int] = OrderedDict()
        self._num_tasks = 0
        self._lost_bytes = 0
        """The bytes that failed captures took, which are never freed."""
        self.counts: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        """The device memory that captures have taken."""
        return self._lost_bytes + sum(capture.num_bytes for capture in list(self._known.values()) if capture)

    def find(self, signature: Signature) -> Capture | None:
        """Return the capture of a signature, if there is one."""
        capture = self._use(signature)
        return capture if isinstance(capture, Capture) else None

    def goes_whole(self, signature: Signature) -> bool:
        """Return whether a run that may go by steps goes as a whole.

        It does if it is captured, may not go by captured steps, or has gone by steps often enough to be captured now. A
        graph
        for each size of a run takes long to make, and saves little of a run.
        """
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
        """Count a task; if it is the run that ``goes_whole`` was last called for, count it as one by steps."""
        self._num_tasks += 1
        if self._by_steps_now is not None:
            if len(self._by_steps) > MAX_COUNTED:
                self._by_steps.clear()
            self._by_steps[self._by_steps_now] += 1
            self._by_steps_now = None  # the next may be of a cell that is not asked about

    def find_steps(self, signature: Signature) -> CapturedSteps | None:
        """Return the captured steps of a signature of all sizes, if there are any."""
        capture = self._use(signature)
        return capture if isinstance(capture, CapturedSteps) else None

    def _use(self, signature: Signature) -> Capture | CapturedSteps | None:
        capture = self._known.get(signature)
        if capture is not None:
            capture.last_used = self._num_tasks
        return capture

    def is_due(self, signature: Signature) -> bool:
        """Count a run of a signature without a capture; return whether it should be captured now.

        Where memory is short, captures that were not used for long are evicted.
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
        """Capture a signature's work; return False if it cannot be captured. Raise an error that loses the device.

        Work that is not captured runs as before. ``words`` are those of a task that has just run. No row is read and
        written in
        one task, so a device that runs the work while capturing it does no harm.
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
        """Capture a step, which has just run and whose words begin at word ``at`` of the ring, like ``make``.

        ``of_all`` is its signature without its size. ``work_of`` gets words of its own, of which the first says where
        the
        others are to be copied from.
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
        """Call ``make`` with the memory that is in use; if it fails the signature is not captured.

        Return False if the work cannot be captured.
        """
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
        """Drop the captures of a cell type without tasks, while others are found and made."""
        for signature in [signature for signature in list(self._known) if signature.type_id == type_id]:
            self._known.pop(signature, None)
        for signature in [signature for signature in list(self._by_steps) if signature.type_id == type_id]:
            self._by_steps.pop(signature, None)
        self._refusing.discard(type_id)

    def _has_room(self) -> bool:
        """Return whether the budget allows one more capture, for which others may be evicted."""
        made = [(signature, capture) for signature, capture in list(self._known.items()) if capture is not None]
        for signature, capture in sorted(made, key=lambda known: known[1].last_used):
            if self.used_bytes < self._budget_bytes or self._num_tasks - capture.last_used < STALE_AFTER:
                break
            self._known.pop(signature, None)
            self.counts["captures_evicted"] += 1
        return self.used_bytes < self._budget_bytes
