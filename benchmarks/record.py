"""The results of a benchmark: rows of numbers, shown as a table and written as JSON lines.

Every row says which commit and which machine it comes from, so that a figure can be traced and no two
machines are compared by mistake.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.checkout import commit

if TYPE_CHECKING:
    from rich.console import Console

Machine = dict[str, str | int]
Row = dict[str, object]

_REPOSITORY = Path(__file__).resolve().parent.parent
_COMMON = ("benchmark", "case", "metric", "value", "unit", "commit", "machine")
"""The columns that every row has."""


class Recorder:
    """Collects the rows of one benchmark; not safe for use by several threads."""

    def __init__(self, benchmark: str) -> None:
        """Start empty; ``benchmark`` is the name that each row carries."""
        self.benchmark = benchmark
        self.commit = commit(_REPOSITORY)
        self.machine = machine()
        self.rows: list[Row] = []

    def add(self, case: str, metric: str, value: float, unit: str, **extra: object) -> None:
        """Add one number: what was run, what was measured of it, and in which unit.

        ``extra`` holds further columns of the row, such as a batch size; JSON must be able to hold them.
        Raise ValueError where an extra column has the name of a column that every row has.
        """
        row: Row = {
            "benchmark": self.benchmark,
            "case": case,
            "metric": metric,
            "value": float(value),
            "unit": unit,
            "commit": self.commit,
            "machine": self.machine,
        }
        taken = sorted(row.keys() & extra.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)}: every row has this already; choose another name")
        self.rows.append(row | extra)

    def table(self, console: Console | None = None, rows: Sequence[Row] | None = None) -> None:
        """Print the rows, or only some of them, as a table, on standard output unless another console is given.

        On a bare machine without ``rich`` they are printed a line each, with what else a row has behind.
        """
        shown = self.rows if rows is None else rows
        if importlib.util.find_spec("rich") is None:
            for row in shown:
                extra = [f"{name}={row[name]}" for name in _extras([row])]
                print(f"{row['case']}: {row['metric']}: {_number(row['value'])} {row['unit']}", *extra)
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        extras = _extras(shown)
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        table = Table(title=self.benchmark, caption=f"commit {self.commit}; {facts}")
        for name in ("case", "metric", "value", "unit", *extras):
            right = name == "value" or name in extras
            table.add_column(escape(name), justify="right" if right else "left", overflow="fold")
        for row in shown:
            cells = [str(row["case"]), str(row["metric"]), _number(row["value"]), str(row["unit"])]
            cells += [str(row.get(name, "")) for name in extras]
            table.add_row(*(escape(cell) for cell in cells))
        (console or Console()).print(table)

    def write(self, path: Path, append: bool = False) -> None:
        """Write the rows to ``path`` as JSON, one object a line; make its folder, replace or continue an older file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows)


def percentiles(latencies: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile, the mean and the maximum, in the unit of ``latencies``.

    Raise ValueError where there are none.
    """
    values = np.asarray(latencies, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no latencies were recorded")
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "mean": float(values.mean()),
        "max": float(values.max()),
    }


def _extras(rows: Sequence[Row]) -> list[str]:
    """Return the columns that not every row has."""
    return list(dict.fromkeys(name for row in rows for name in row if name not in _COMMON))


def _number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def machine() -> Machine:
    """Return the processor, the number of cores this process may use, and the versions that decide speed."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numba": _version("numba"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu_model() -> str:
    """Return the processor's name as Linux tells it, or what Python knows elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
