"""Runs one task: gathers input rows by index, calls the cell, puts its outputs where the task says.

The scheduler's buffer (``core/task_layout.py``) is the only thing it reads. If the cell fails, the task is
tried again in halves until the rows that cause it are alone; their outputs are zeros and their flags in the
buffer are set. This happens before the next task of the worker, so the input rows are still there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.arena import Arenas
from cellrt.batch import Batch, Failure, Outcome, run_batch, run_loop
from cellrt.core import task_layout as layout
from cellrt.core.tables import HOST, MIXED
from cellrt.define import CellInput
from cellrt.registry import CellType
from cellrt.spec import RaggedRows


class Executor:
    """Executes tasks at one location. One thread calls it; reads other locations' arenas where the task says so."""

    def __init__(self, location: int, arenas: list[Arenas], types: list[CellType]) -> None:
        self._location = location
        self._arenas = arenas
        self._types = types

    @torch.inference_mode()
    def execute(self, type_id: int, buffer: NDArray[np.int32]) -> list[Failure]:
        """Runs the task in ``buffer``; writes results, done steps and failure flags. Returns the failed rows."""
        cell_type = self._types[type_id]
        cell = cell_type.cell
        header = buffer[: layout.HEADER].tolist()
        rows, steps, is_loop = header[layout.H_ROWS], header[layout.H_STEPS], bool(header[layout.H_IS_LOOP])
        sizes = buffer[header[layout.H_BATCH_SIZES] :][:steps].tolist()
        lengths = buffer[header[layout.H_LENGTHS] :][:rows]
        records = buffer[layout.HEADER :][
            : layout.INPUT * len(cell.inputs) + layout.OUTPUT * len(cell.outputs)
        ].tolist()
        failures: list[Failure] = []
        inputs = [
            self._gather(kind, records[layout.INPUT * k : layout.INPUT * (k + 1)], buffer)
            for k, kind in enumerate(cell_type.input_kinds)
        ]
        whole = Batch(sizes, inputs, lengths, list(range(rows)))
        if is_loop:
            first_output = layout.INPUT * len(cell.inputs)
            every = [
                bool(records[first_output + layout.OUTPUT * k + layout.OUT_RESULT_STEPS])
                for k in range(len(cell.outputs))
            ]
            outcome = run_loop(cell, whole, header[layout.H_STOP_OUTPUT], every, failures)
            buffer[header[layout.H_DONE_STEPS] :][:rows] = outcome.done_steps
        else:
            outcome = run_batch(cell, whole, failures)
        for failure in failures:
            buffer[header[layout.H_FAILED] + failure.row] = 1
        for k, kind in enumerate(cell_type.output_kinds):
            first = layout.INPUT * len(cell.inputs) + layout.OUTPUT * k
            self._store(kind, records[first : first + layout.OUTPUT], k, outcome, buffer)
        return failures

    def _gather(self, kind: int, record: list[int], buffer: NDArray[np.int32]) -> CellInput:
        source, count, at, offsets_at = record
        rows = buffer[at : at + count]
        if source == MIXED:
            values = self._gather_mixed(kind, rows)
        else:
            values = self._arenas[source if source >= 0 else self._location].get(kind, rows)
        if offsets_at < 0:
            return values
        # The offsets lie right before the rows.
        return RaggedRows(values, torch.from_numpy(buffer[offsets_at:at].astype(np.int64)))

    def _gather_mixed(self, kind: int, handles: NDArray[np.int32]) -> torch.Tensor:
        """Rows from several locations, in the order of their handles."""
        own = self._arenas[self._location]
        values = own.empty_bits(kind, len(handles))
        for location, arenas in enumerate(self._arenas):
            arenas.get_into(kind, handles, location, self._location, values)
        return own.as_tensor(kind, values)

    def _store(self, kind: int, record: list[int], output: int, outcome: Outcome, buffer: NDArray[np.int32]) -> None:
        """Copies one output's rows to its arena rows and its results to the host."""
        stores, positions_at, rows_at, results, result_positions_at, result_rows_at, every_step = record
        value = outcome.outputs[output]
        if stores:
            rows, positions = buffer[rows_at : rows_at + stores], buffer[positions_at : positions_at + stores]
            self._arenas[self._location].move(kind, rows, value, positions)
        if results:
            if every_step:  # of some rows of a loop; of the others the last, which lie behind
                steps = outcome.every_step[output]
                value = np.concatenate([steps.reshape(-1, *value.shape[1:]), value])
            rows = buffer[result_rows_at : result_rows_at + results]
            self._arenas[HOST].move(kind, rows, value, buffer[result_positions_at : result_positions_at + results])
