"""The line of a user's own code at which tracing met a reason to keep a cell eager."""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.fx.proxy
from torch.fx import Node

from cellrt.definition.snapshot import FunctionSnapshot

TORCH, DEFINITION = (f"{path}/" for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
NOT_OWN = (TORCH, DEFINITION, contextlib.__file__, functools.__file__, "<")
"""The beginnings of the paths of files that are not the user's."""
FRAME = re.compile(r'File "(.+)", line (\d+), in ')
TRIED_ROWS = (*range(2, 13), 1000)
"""Numbers of rows to try: a condition that holds for all of them mostly holds for any, as few sizes are larger."""
MOST_CHARACTERS = 100


class Line(NamedTuple):
    """A line of a file."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The text of the line; empty if the file is not there."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        text = self.text[:MOST_CHARACTERS]
        return f"{Path(self.file).name}:{self.number}{text and ': '}{text}"


def note_lines_of(module: object) -> None:
    """Have torch record the lines of a cell that is a function, too; by itself it records those of each ``forward``."""
    function = module.function if isinstance(module, FunctionSnapshot) else module
    note = getattr(torch.fx.proxy, "_register_stack_trace_anchor", None)  # torch keeps it for itself
    if note is not None and isinstance(function, FunctionType):
        note(function)


def line_of_node(node: Node) -> Line | None:
    """Return the line where an operator of a program was called: the last line of the user's
    that torch has recorded.
    """
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return _last_own([Line(file, int(number)) for file, number in frames])


def line_of_error(error: BaseException) -> Line | None:
    """Return the line in the user's code where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return _last_own([Line(frame.filename, frame.lineno or 0) for frame in frames])


def _last_own(lines: Sequence[Line]) -> Line | None:
    return next((line for line in reversed(lines) if _is_own(line.file)), None)


def _is_own(file: str) -> bool:
    return not file.startswith(NOT_OWN)


class RowsWatch:
    """A recorder of the lines at which torch decides on the sizes of a step's inputs.

    Attributes:
        fixed: a line with a decision that does not hold for every number of rows, and whether it holds for only one.
    """

    def __init__(self) -> None:
        self.fixed: tuple[Line, bool] | None = None

    @contextlib.contextmanager
    def watching(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Record decisions while a step is traced on these inputs within the block."""
        size: Any = inputs[0].shape[0]
        shapes: Any = size.node.shape_env if isinstance(size, torch.SymInt) else None
        frame_of = getattr(shapes, "_get_user_frame", None)
        if frame_of is None:  # torch keeps it for itself: then no line is told
            yield
            return
        before = len(shapes.guards)
        shapes._get_user_frame = lambda: _own_frame(frame_of())
        try:
            yield
        finally:
            del shapes._get_user_frame
            self._look_at(shapes.guards[before:])

    def _look_at(self, guards: Sequence[Any]) -> None:
        for guard in guards:
            symbols, at = guard.expr.free_symbols, guard.sloc.framework_loc
            if len(symbols) != 1 or not isinstance(at, traceback.FrameSummary) or not _is_own(at.filename):
                continue
            (symbol,) = symbols
            holds = [bool(guard.expr.subs(symbol, rows)) for rows in TRIED_ROWS]
            if not all(holds):
                self.fixed = Line(at.filename, at.lineno or 0), sum(holds) <= 1
                return


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code; if there is none, the given one."""
    found = frame
    while found is not None and not _is_own(found.f_code.co_filename):
        found = found.f_back
    return found or frame
