"""Which tasks of a run had pieces of long prompts and single steps of others at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cellrt.view.timeline_spans import TaskSpan


def tasks_of_pieces_and_steps(tasks: Iterable[TaskSpan], prompt: int) -> list[TaskSpan]:
    """Those with several rows of one request's prompt and a single row of another that has read its own.

    ``tasks`` are all of one cell; each request begins with so many rows of a ``prompt``, and then goes on row by row.
    """
    read: Counter[int] = Counter()
    found = []
    for task in sorted(tasks, key=lambda task: task.start_s):
        rows = Counter(task.requests)
        assert rows.total() == task.rows, "a task says whose each row is"
        has_piece = any(count > 1 and read[request] + count <= prompt for request, count in rows.items())
        has_step = any(count == 1 and read[request] >= prompt for request, count in rows.items())
        if has_piece and has_step:
            found.append(task)
        read.update(rows)
    return found
