"""The compiled forms in which an engine's cells run on a CPU, and the reasons why some cells have none.

A module's own compiled form comes first. For any other cell a compiler may make one (``definition/aot/``): while the
engine registers it, or in the background, while the cell runs as its module. Each compiler is a process of its own.
One thread of an engine waits for them, one at a time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from queue import SimpleQueue
from typing import Literal, cast

from cellrt.definition.aot.form import compile_cells
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.engine.announce import Announcement
from cellrt.engine.option_checks import check_choice
from cellrt.worker.service_thread import ServiceThread

CompileMode = Literal["off", "background", "wait"]
MODES: tuple[CompileMode, ...] = ("off", "background", "wait")
MODE_VARIABLE = "CELLRT_COMPILE"
"""The environment variable with the mode of engines without ``compile=``, such as those of programs under test."""
OFF, WAITS, FAILED = "compile is off", "it is being compiled", "the compiler failed"
BEGAN_BEFORE = "a session or request goes on in the form that it began with"


def mode_of(given: CompileMode | None) -> CompileMode:
    """Return the given mode, or the environment's, or "background". Raise DefinitionError for another word."""
    if given is None:
        named = os.environ.get(MODE_VARIABLE) or "background"
        check_choice(f"the environment variable {MODE_VARIABLE}", named, MODES)
        return cast(CompileMode, named)
    check_choice("compile", given, MODES)
    return given


class CellCompiler:
    """A compiler of an engine's cells, with their forms by identity. ``forms_of`` may be called from any thread.

    Args:
        mode: the ``compile`` of ``Engine``.
        on_ready: called after a form was made in the background, by the thread that waits for compilers. It is a
            weak reference: nothing is called once its object is gone.

    Raises DefinitionError for an unknown mode.
    """

    def __init__(self, mode: CompileMode | None, on_ready: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._mode, self._on_ready = mode_of(mode), on_ready
        self._store = LibraryStore()
        self._forms: dict[str, CompiledForm | None] = {}
        self._reasons: dict[str, str] = {}
        """The reason for each cell without a form."""
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Sequence[Cell] | None] = SimpleQueue()
        self._thread: ServiceThread | None = None
        self._is_closed = False
        self._lacks_compiler = False
        """True once the log says that there is no compiler."""

    def forms_of(self, cells: Sequence[Cell], announcement: Announcement) -> dict[str, CompiledForm | None]:
        """Return the form of each cell by identity, or None for a cell that runs as its module for now.

        In mode "wait" cells without a form are compiled now. ``announcement`` begins only if a compiler runs: not if
        all were compiled before. Raise DefinitionError if a module's own form cannot be made.
        """
        with self._lock:
            unknown = [cell for cell in cells if cell.identity not in self._forms]
        eager: list[Cell] = []
        for cell in unknown:
            form = cell.compiled_form
            if form is None:
                eager.append(cell)
            if form is not None or self._mode != "wait":  # waiting may be interrupted: note nothing before it
                self._note(cell, form, cell.why_no_form or (OFF if self._mode == "off" else WAITS))
        if eager and self._mode == "wait":
            announcement.expect(len(eager), len(eager))
            for _ in self._compile(eager, announcement.begin):
                announcement.advance()
        elif eager and self._mode == "background":
            self._ask(eager)
        with self._lock:
            return {cell.identity: self._forms.get(cell.identity) for cell in cells}

    def why_eager(self, cell: Cell) -> str:
        """Return the reason why a cell runs as its module."""
        return self._reasons.get(cell.identity, OFF) or BEGAN_BEFORE

    def keep(self, identities: Collection[str]) -> None:
        """Keep the forms and reasons of these cells, and forget those of all others."""
        with self._lock:
            for known in (self._forms, self._reasons):
                for identity in known.keys() - identities:
                    del known[identity]

    def close(self) -> None:
        """End the compilers, without waiting for them."""
        self._is_closed = True
        self._queue.put(None)
        self._store.close()

    def _ask(self, cells: Sequence[Cell]) -> None:
        if self._thread is None:
            self._thread = ServiceThread(self._serve, "cellrt-compiler", self.close)
            self._thread.start()
        self._queue.put(cells)

    def _serve(self) -> None:
        while not self._is_closed and (cells := self._queue.get()) is not None:
            for cell, form in self._compile(cells):
                if form is not None and (adopt := self._on_ready()) is not None:
                    try:
                        adopt()
                    except Exception as error:  # this thread serves later registrations
                        logging.getLogger("cellrt").warning("the form of cell %r is not used: %s", cell.name, error)

    def _compile(
        self, cells: Sequence[Cell], note_compiling: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[Cell, CompiledForm | None]]:
        """Compile cells, and log the result of each. Log only once that there is no compiler."""
        log, level = logging.getLogger("cellrt"), logging.WARNING if self._mode == "wait" else logging.INFO
        begin_s = time.monotonic()
        names = ", ".join(repr(cell.name) for cell in cells)
        log.info("cells %s are compiled, 10 to 60 seconds each where this machine has no form of them yet", names)
        for number, (cell, made) in enumerate(zip(cells, compile_cells(cells, self._store, note_compiling)), 1):
            form, reason = (None, str(made)) if isinstance(made, Exception) else (made, "")
            if isinstance(made, Exception) and not isinstance(made, NotCompiledError):
                reason = f"{FAILED}: {type(made).__name__}: {made}"
            self._note(cell, form, reason)
            if isinstance(made, NotCompiledError) and made.reason is Reason.NO_COMPILER:
                if not self._lacks_compiler:
                    log.warning(
                        "cell %r stays eager, as does any other of plain torch, whose steps may take several times as "
                        "long as compiled: %s (see Engine(compile=...))",
                        cell.name,
                        reason,
                    )
                self._lacks_compiler = True
            elif form is None and not self._is_closed:
                log.log(level, "cell %r stays eager: %s", cell.name, reason)
            elif form is not None:
                seconds = time.monotonic() - begin_s
                log.info("cell %r is compiled: %d of %d, after %.1f s", cell.name, number, len(cells), seconds)
            yield cell, form

    def _note(self, cell: Cell, form: CompiledForm | None, reason: str) -> None:
        with self._lock:
            self._forms[cell.identity] = form
            self._reasons[cell.identity] = reason
