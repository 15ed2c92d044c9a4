"""What the commands show, and how they fail: one line in red on standard error, and exit status 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

PIPED_WIDTH = 100  # characters, where the output is not a terminal


def console() -> Console:
    """Standard output."""
    made = Console()
    return made if made.is_terminal else Console(width=PIPED_WIDTH)


def complaint(text: str) -> None:
    """Says what is wrong, on standard error."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def failing_well() -> Iterator[None]:
    """Turns what a user can meet into one line and exit status 1."""
    from cellrt.errors import CellrtError

    try:
        yield
    except (CellrtError, ImportError, OSError) as error:
        complaint(str(error))
        raise typer.Exit(1) from error
