"""The results that compiled code copies to a client (``core/requests/join_leave.py``), and how a client reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from cellrt.core.state.tables import ALL_STEPS, ANSWER, ITS_STEPS, LAST_STEP, MAX_TENSORS
from cellrt.definition.bits import tensor_of
from cellrt.engine.future import Result
from cellrt.engine.together import SMALL_BYTES, Reader, Together
from cellrt.native.row_types import new_table

MOST_BYTES = 1 << 20
"""The most bytes of a submission's results that compiled code copies; it leaves larger ones to Python, as that takes
time."""
COUNT_BYTES = 8
"""The bytes of the number of steps, which stands before a loop's rows."""


class Answers:
    """The layout of the results that compiled code copies out for each request of a graph.

    Attributes:
        address, count: where the table of results lies, which compiled code reads, and its number of rows.
        num_bytes: the bytes of all results of a request.
        is_small: True if each result may lie in one block of memory with those of other requests.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers, self.count = readers, len(readers)
        self._rows = new_table(max(1, len(readers)), ANSWER)
        self._rooms: list[int] = []
        for k, reader in enumerate(readers):
            steps, row_bytes, positions = _steps_of(reader), reader.row_bytes, reader.places
            self._rows[k] = positions.ctypes.data, positions.size, reader.kind, steps, row_bytes
            room = row_bytes * (1 if steps == LAST_STEP else positions.size)
            self._rooms.append(room + (COUNT_BYTES if steps != ALL_STEPS else 0))
        self._layouts = [
            (one.name, room, _steps_of(one), one.dtype, one.shape_of(one.places.size), one.row_bytes)
            for one, room in zip(readers, self._rooms)
        ]
        self.num_bytes = sum(self._rooms)
        self.is_small = max(self._rooms, default=0) <= SMALL_BYTES
        self.address = self._rows.ctypes.data

    def result_in(self, memory: memoryview, count: int, number: int) -> Result:
        """Return the results of one of ``count`` requests, copied out of the memory that holds the results of all."""
        made: Result = {}
        end = 0
        for name, room, steps, dtype, shape, row_bytes in self._layouts:
            begin = end + number * room
            end += count * room
            if steps == ALL_STEPS:
                made[name] = tensor_of(bytearray(memory[begin : begin + room]), dtype, shape)
            else:
                its = _taken(memory[begin : begin + room], row_bytes)
                made[name] = tensor_of(its, dtype, shape if steps == LAST_STEP else (len(its) // row_bytes, *shape[1:]))
        return made

    def results_in(self, memory: memoryview, count: int) -> Together:
        """Return the results of ``count`` requests; they must lie in ``memory`` by the time they are asked for."""
        parts, begin = [], 0
        for reader, room in zip(self._readers, self._rooms):
            its = memory[begin : begin + count * room]
            begin += count * room
            if reader.is_loop:
                parts.append(reader.part_of(_StepsTaken(its, room, reader.row_bytes)))
            else:
                parts.append(reader.part_in(its, range(0, count * room + 1, room)))
        return Together(parts)


def _steps_of(reader: Reader) -> int:
    if not reader.is_loop:
        return ALL_STEPS
    return LAST_STEP if reader.is_single else ITS_STEPS


def _taken(memory: memoryview, row_bytes: int) -> bytearray:
    """Return a copy of the rows that a loop made for a request."""
    taken = int.from_bytes(memory[:COUNT_BYTES], "little")
    return bytearray(memory[COUNT_BYTES : COUNT_BYTES + taken * row_bytes])


class _StepsTaken:
    """The rows that a loop made for each request; each is copied when it is asked for."""

    def __init__(self, memory: memoryview, room: int, row_bytes: int) -> None:
        self._memory, self._room, self._row_bytes = memory, room, row_bytes

    def __len__(self) -> int:
        return len(self._memory) // self._room

    def __getitem__(self, number: int) -> memoryview:
        begin = self._room * number
        return memoryview(_taken(self._memory[begin : begin + self._room], self._row_bytes))

    def __setitem__(self, number: int, _: memoryview) -> None:
        """Do nothing, as nothing is kept here."""


def fits(externals: Sequence[tuple[int, NDArray[Any]]], count: int, answers: Answers) -> bool:
    """Return whether compiled code may answer requests, in memory that is made when they are handed in."""
    if len(externals) > MAX_TENSORS or count * answers.num_bytes > MOST_BYTES:
        return False
    return count == 1 or answers.is_small
