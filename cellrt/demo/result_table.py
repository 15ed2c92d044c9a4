"""The demo's table: a section a load, a row a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from cellrt.demo.sending import Served

PERCENTILES = (50, 90, 99)


class Section(NamedTuple):
    """The results of the servers, by name, for the same words at the same times. ``rate`` is in words per second."""

    rate: float
    served: Mapping[str, Served]


def result_table(sections: Sequence[Section]) -> Table:
    """Load and throughput in words per second, times in milliseconds, queueing and computation as means."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("arriving")
    table.add_column("served by")
    for heading in (
        "words/s",
        *(f"p{percent}\nms" for percent in PERCENTILES),
        "queue\nms",
        "compute\nms",
        "mean\nbatch",
    ):
        table.add_column(heading, justify="right")
    for section in sections:
        load = f"{section.rate:.0f}/s"
        for name, served in section.served.items():
            means_s = served.queueing_s.mean(), served.computation_s.mean()
            times = [_milliseconds(value) for value in (*np.percentile(served.latency_s, PERCENTILES), *means_s)]
            table.add_row(load, name, f"{served.throughput:.0f}", *times, f"{served.mean_batch:.1f}")
            load = ""
        table.add_section()
    return table


def _milliseconds(seconds: float) -> str:
    """Return a number's three significant digits, without an exponent."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
