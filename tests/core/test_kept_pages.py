"""What a session keeps of several growing states, whatever ends its request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from cellrt.core.state import views
from cellrt.core.state.notices import NOTICE_DONE
from cellrt.core.templates.program import OP_CHAIN, OP_EXTERNAL, OP_KEEP, OP_PAGES, OP_RESULT, OP_STATE, PAGED, STEP
from tests.core.page_machine import NUMBERS, PAGE_SIZE, PAGES, READ, Paged, PageMachine, numbers, read


@dataclass
class TwoStates(Paged):
    """Reads its first four numbers into one state, and the last three into another."""

    keeps_a_row: bool = False
    """Whether its session has one more state, which does not grow: its last result."""

    @property
    def program(self) -> NDArray[np.int32]:
        program = [OP_EXTERNAL, NUMBERS, 7, *[OP_PAGES, PAGES, PAGE_SIZE, 1] * 2]
        program += [OP_STATE, NUMBERS, -1] * self.keeps_a_row
        first = 7 + self.keeps_a_row
        program += [OP_CHAIN, READ, 4, STEP, 0, 1, PAGED, 0, OP_CHAIN, READ, 3, STEP, 4, 1, PAGED, 1]
        program += [OP_KEEP, 7, first + 6, 0, 0] * self.keeps_a_row
        return np.array([*program, OP_RESULT, first, 1, 4, OP_RESULT, first + 4, 1, 3], np.int32)

    def expected(self) -> list[int]:
        one, other = list[int](), list[int]()
        return [read(one, x) for x in self.numbers[:4]] + [read(other, x) for x in self.numbers[4:]]


@pytest.mark.parametrize(
    ("keeps_a_row", "tasks", "kept"),
    [(False, 2, [0, 0]), (False, 3, [2, 2]), (False, 4, [4, 3]), (True, 3, [0, 0]), (True, 4, [4, 3])],
)
def test_a_session_keeps_all_rows_of_what_is_done_else_those_of_the_step_that_all_states_have(keeps_a_row, tasks, kept):
    machine = PageMachine(1, 20, 0, max_rows=2)
    session = machine.processor.open_session()
    assert session is not None
    request = TwoStates(numbers(7), session=session, keeps_a_row=keeps_a_row)
    assert machine.submit(request)
    for _ in range(tasks):
        machine.schedule(1)
        machine.finish(1)
    if tasks < 4:
        assert machine.processor.cancel(request.id)
    else:
        assert request.end == NOTICE_DONE
    its = views.session_pages(machine.processor.tables, session, int(keeps_a_row), 2)
    assert [(pages.length, len(pages.handles)) for pages in its] == [(rows, -(-rows // PAGE_SIZE)) for rows in kept]
    machine.check()
