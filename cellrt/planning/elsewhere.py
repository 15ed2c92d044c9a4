"""Checks that every process makes the same cells of a model: makes them in a second process and compares.

    python -c "from cellrt.planning.elsewhere import main; main()" LIFELINE SOURCE

prints the names and identities of a model's cells. It ends early if the other end of its lifeline closes. A server has
at least two processes that make each model.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from cellrt.core.processor import Processor
from cellrt.engine.discovery import Discovery
from cellrt.engine.registry import Registry
from cellrt.errors import DefinitionError
from cellrt.graph.unfolder import Unfolder
from cellrt.process.source import ModelSource
from cellrt.worker.python_process import PythonProcess, end_with

COMMAND = "from cellrt.planning.elsewhere import main; main()"
WAIT_S = 600.0
MAX_NODES = 65_535


class Made(NamedTuple):
    """A cell that a process made: its name and identity."""

    name: str
    identity: str


def cells_of(unfolder: Unfolder) -> list[Made]:
    """Return the cells of a model's example, in the order in which it calls them. Raise DefinitionError."""
    found = Discovery(Registry(Processor(1), MAX_NODES))
    found.unfold(unfolder)
    return [Made(cell.name, cell.identity) for cell in found.cells]


def cells_elsewhere(source: str) -> list[Made]:
    """Return the cells that a new process makes of a model. Raise DefinitionError if it cannot."""
    other = PythonProcess(COMMAND, (source,), is_heard=True)
    try:
        told, complaints = other.process.communicate(timeout=WAIT_S)
        if other.process.returncode:
            raise ValueError(f"it ended with status {other.process.returncode}")
        return [Made(*each) for each in json.loads(told.splitlines()[-1])]
    except subprocess.TimeoutExpired:
        raise DefinitionError(f"model {source!r}: another process did not make it within {WAIT_S:g} s") from None
    except (ValueError, IndexError) as error:
        said = complaints.decode(errors="replace").strip() or str(error)
        raise DefinitionError(f"model {source!r}: another process cannot make it: {said[-1000:]}") from None
    finally:
        other.end(0.0)


def changing(here: Sequence[Made], elsewhere: Sequence[Made]) -> list[str]:
    """Return the names of cells that are others in another process."""
    pairs = zip_longest(here, elsewhere)
    return sorted({cell.name for a, b in pairs if a != b for cell in (a, b) if cell is not None})


def main() -> None:
    """Run the second process: make the model's cells, and print their names and identities as JSON."""
    lifeline, source = sys.argv[1:]
    end_with(socket.socket(fileno=int(lifeline)))
    print(json.dumps(cells_of(ModelSource(source).load())))
