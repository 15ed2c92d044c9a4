"""A profile: how long one step of each cell takes on a device, by rows, and what an engine's host costs beside it.

Written by ``cellrt tune``, read by others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cellrt.errors import DefinitionError

FORMAT = 1


@dataclass(frozen=True)
class CellProfile:
    """One cell.

    Attributes:
        name: the name of the cell.
        rows: numbers of rows that were measured, rising.
        step_s: seconds of one step with this many rows.
        max_batch: the most rows that a task should have: see ``best_batch``.
        read_s: seconds that a step takes longer for each row of a growing state that one of its rows reads.
    """

    name: str
    rows: tuple[int, ...]
    step_s: tuple[float, ...]
    max_batch: int
    read_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """Return the time of a step with any number of rows: on a line between those measured, and in proportion
        beyond.
        """
        if rows > self.rows[-1]:
            return self.step_s[-1] * rows / self.rows[-1]
        return float(np.interp(rows, self.rows, self.step_s))


@dataclass(frozen=True)
class HostCosts:
    """The cost of an engine's host work beside the steps, in the client's process, without HTTP.

    Attributes:
        request_s: seconds of one request: of all workers' together, one after the other.
        task_s: seconds of one task, of the worker that runs it.
        page_s: seconds of copying a page between a worker and the host, of the model's largest; 0 without pages.
    """

    request_s: float
    task_s: float
    page_s: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The cells of a model on a device, by their identities; ``host``: None in a file that is older than it."""

    device: str
    cells: Mapping[str, CellProfile]
    host: HostCosts | None = None

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        cells = {identity: asdict(cell) for identity, cell in self.cells.items()}
        host = {} if self.host is None else {"host": asdict(self.host)}
        made = {"format": FORMAT, "device": self.device, **host, "cells": cells}
        path.write_text(json.dumps(made, indent=1) + "\n")


def read_profile(path: Path) -> Profile:
    """Read a profile. Raise DefinitionError if it is none."""
    try:
        given: dict[str, Any] = json.loads(path.read_text())
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']!r}, expected {FORMAT}")
        cells = {
            identity: CellProfile(
                cell["name"], tuple(cell["rows"]), tuple(cell["step_s"]), cell["max_batch"], cell.get("read_s", 0.0)
            )
            for identity, cell in given["cells"].items()
        }
        return Profile(given["device"], cells, HostCosts(**given["host"]) if "host" in given else None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DefinitionError(f"{path} is no profile of cellrt tune: {type(error).__name__}: {error}") from None


def best_batch(rows: tuple[int, ...], step_s: tuple[float, ...], bound_s: float | None) -> int:
    """Return the number of rows with the highest throughput, among those whose step takes no longer than the bound.

    BatchMaker section 2.4.2: the batch size beyond which throughput hardly rises; the smallest that reaches 95% of the
    best is taken, since a larger one only takes longer. One row if no step is within the bound.
    """
    allowed = [(count, count / seconds) for count, seconds in zip(rows, step_s) if not bound_s or seconds <= bound_s]
    if not allowed:
        return rows[0]
    best = max(rate for _, rate in allowed)
    return next(count for count, rate in allowed if rate >= 0.95 * best)
