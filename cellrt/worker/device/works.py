"""The work of a device for a task that compiled code does not launch: call by call, or a replay of its capture.

A task that ran often enough is captured after its run, and so is each step of a run that goes step by step
(``steps_reading.py``).
"""

from __future__ import annotations

from collections import Counter

import torch

from cellrt.worker.device import step_words
from cellrt.worker.device.captures import Captures
from cellrt.worker.device.device import Device, Work
from cellrt.worker.device.fused_loops import FusedLoopOperations
from cellrt.worker.device.fused_operations import FusedOperations
from cellrt.worker.device.in_flight import InFlight
from cellrt.worker.device.nodes import NodeOperations
from cellrt.worker.device.operations import Counts, Memory, Operations
from cellrt.worker.device.packing import RunSteps
from cellrt.worker.device.placement import PlacedCell
from cellrt.worker.device.signature import Signature
from cellrt.worker.device.steps_reading import at_rows
from cellrt.worker.failed_rows import Failures

WORD_BYTES = 8


class Works:
    """A maker of the work of tasks.

    Args:
        device: does the work.
        memory: the memory of the worker's location.
        captures: the captured graphs of tasks.

    Attributes:
        counts: tasks that ran call by call (``eager``), all or some of their steps.
    """

    def __init__(self, device: Device, memory: Memory, captures: Captures) -> None:
        self._device, self._memory, self._captures = device, memory, captures
        self.counts: Counter[str] = Counter()

    def of(self, begun: InFlight, placed: PlacedCell) -> Work:
        """Return all the work of a task that lies in the rings."""
        up, down, up_block, down_block = begun.up, begun.down, begun.up_block, begun.down_block
        up_bytes, down_bytes = slice(up_block.first, up_block.end), slice(down_block.first, down_block.end)
        is_own = up is not self._memory.up
        memory = self._memory._replace(up=up, down=down) if is_own else self._memory
        can_capture, steps = begun.plan.packing.can_capture and not is_own, begun.plan.packing.steps
        run = self._whole(begun, placed, memory, can_capture)
        if steps is not None:
            run = self._by_steps(begun, placed, memory, can_capture, steps)

        def work() -> None:
            self._device.upload(up.device[up_bytes], up.host[up_bytes])
            run()
            if begun.plan.has_download:
                self._device.download(down.host[down_bytes], down.device[down_bytes])

        return work

    def _whole(self, begun: InFlight, placed: PlacedCell, memory: Memory, can_capture: bool) -> Work:
        signature, start = begun.plan.packing.signature, begun.up_block.starts[0]
        words_bytes = slice(start, start + WORD_BYTES * signature.num_words)
        task, captures = begun.task, self._captures
        offsets = tuple(task.spans.tolist()) if placed.cell.has_spans else ()
        counts = Counts(task.num_rows, task.num_positions, task.batch_sizes.tolist(), offsets)

        def work() -> None:
            words = memory.up.device[words_bytes].view(torch.int64)
            capture = captures.find(signature) if can_capture else None
            if capture is not None and capture.sides[0].numbers is None:
                capture.replay(words)
                captures.counts["replayed"] += 1
                return
            self.counts["eager"] += 1
            host_words = memory.up.host[words_bytes].view(torch.int64)
            failures = begun.failures
            _operations(placed, signature, memory, words, host_words).run(counts, failures)
            is_fit = failures.split is None or bool(failures)  # else all rows went well, but not together
            if can_capture and not failures and captures.is_due(signature):
                is_fit &= captures.make(
                    signature,
                    words,
                    lambda words: _captured(placed, signature, memory, counts, words),
                    begun.plan.has_download,
                )
            placed.pads_ragged &= is_fit or signature.fused

        return work

    def _by_steps(
        self, begun: InFlight, placed: PlacedCell, memory: Memory, can_capture: bool, steps: RunSteps
    ) -> Work:
        sizes: list[int] = begun.task.batch_sizes.tolist()
        first = begun.up_block.starts[0] // WORD_BYTES + step_words.LINKS

        def work() -> None:
            at, is_replayed = first, True
            for step, size in enumerate(sizes):
                rows = next(rows for rows in steps.sizes if rows >= size)
                of_all = steps.later if step else steps.first
                captured = self._captures.find_steps(of_all) if can_capture else None
                if captured is not None and captured.has(rows):
                    captured.replay(rows, at)
                else:
                    self._run_step(begun.failures, placed, memory, at_rows(of_all, rows), size, at)
                    if can_capture and not begun.failures:
                        self._capture_step(placed, steps, of_all, rows, at)
                    is_replayed = False
                at += steps.num_words(rows)
            self._captures.counts["replayed"] += is_replayed
            self.counts["eager"] += not is_replayed

        return work

    def _run_step(
        self, failures: Failures, placed: PlacedCell, memory: Memory, step: Signature, size: int, at: int
    ) -> None:
        """Run a step call by call; a row that failed at an earlier one fails no more."""
        words = _ring_words(memory)[at : at + step.num_words]
        own = Failures()
        _operations(placed, step, memory, words, None).run(Counts(size, size, [size]), own)
        failed = {failure.row for failure in failures}
        failures.extend(failure for failure in own if failure.row not in failed)
        failures.split = own.split if failures.split is None else failures.split

    def _capture_step(self, placed: PlacedCell, steps: RunSteps, of_all: Signature, rows: int, at: int) -> None:
        """Capture a step that has just run, if that is due. No other has run since: it may run again."""
        step, memory = at_rows(of_all, rows), self._memory
        if not self._captures.is_due(step):
            return

        def work_of(words: torch.Tensor) -> Work:
            ring, numbers = _ring_words(memory), torch.arange(len(words), device=words.device)
            run = _captured(placed, step, memory, Counts(rows, rows, [rows]), words)

            def work() -> None:
                torch.index_select(ring, 0, numbers + words[:1], out=words)
                run()

            return work

        self._captures.make_step(step, steps, of_all, at, work_of)


def _ring_words(memory: Memory) -> torch.Tensor:
    """Return the upload ring on the device, as words."""
    ring = memory.up.device
    return ring[: len(ring) // WORD_BYTES * WORD_BYTES].view(torch.int64)


def _operations(
    placed: PlacedCell, signature: Signature, memory: Memory, words: torch.Tensor, host_words: torch.Tensor | None
) -> Operations:
    kind: type[Operations] = NodeOperations if placed.cell.has_spans else Operations
    if signature.fused:
        kind = FusedLoopOperations if signature.is_loop else FusedOperations
    return kind(placed, signature, memory, words, host_words)


def _captured(placed: PlacedCell, signature: Signature, memory: Memory, counts: Counts, words: torch.Tensor) -> Work:
    operations = _operations(placed, signature, memory, words, None)
    operations.prepare_capture()
    return lambda: operations.run(counts, None)
