"""The output of commands and their failures: one red line on standard error, and exit status 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from cellrt.errors import CellrtError, DefinitionError

PIPED_WIDTH = 100  # characters, where the output is not a terminal


def console() -> Console:
    """Return a console on standard output, of fixed width if that is no terminal."""
    made = Console()
    return made if made.is_terminal else Console(width=PIPED_WIDTH)


def complaint(text: str) -> None:
    """Say what is wrong, on standard error."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def check_writable(path: Path) -> None:
    """Raise DefinitionError if a file cannot be written, before it takes minutes to find out."""
    if not path.parent.is_dir():
        raise DefinitionError(f"there is no folder {path.parent} for {path.name}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DefinitionError(f"cannot write {path}")


@contextmanager
def failing_well() -> Iterator[None]:
    """Turn what a user can meet into one line and exit status 1."""
    try:
        yield
    except (CellrtError, ImportError, OSError) as error:
        complaint(str(error))
        raise typer.Exit(1) from error
