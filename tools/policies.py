"""Pictures and tables of ``docs/policies.md``, from what the benchmarks of policies left.

python -m tools.policies    # writes docs/images/policies.png, overload.png and open-loads.png; prints the tables
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import encoder, lm_open, overload

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURES = ROOT / "benchmarks" / "results" / "cpu-2-cores", ROOT / "docs" / "images"
Rows = list[dict[str, Any]]


def table(head: str, rows: Sequence[str], columns: Sequence[str], value: Callable[[str, str], str]) -> str:
    """Return a table in Markdown, with what ``value`` says of each row and column."""
    lines = [[head, *columns], ["---"] * (1 + len(columns))]
    lines += [[row, *(value(row, column) for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def overload_table(rows: Rows) -> str:
    """Return what each order did under overload, as engines and the simulator had it."""
    shown = [row for row in rows if "way" in row and row["load"] == overload.LOADS[-1]]
    own = {(f"{row['case']}: {row['metric']}", row["way"]): row["value"] for row in shown}
    ways, columns = (list(dict.fromkeys(key[k] for key in own)) for k in (1, 0))

    def value(way: str, column: str) -> str:
        return f"{own[column, way]:.0f}%" if (column, way) in own else ""

    return table("order", ways, columns, value)


def open_table(rows: Rows) -> str:
    """Return the latency of a token and the requests answered a second, by server and load."""
    shown = [row for row in rows if "load" in row and row["metric"] in (lm_open.LATENCY, lm_open.THROUGHPUT)]
    own = {(f"{row['case']}, {row['load']}", row["server"], row["metric"]): row["value"] for row in shown}
    servers, columns = (list(dict.fromkeys(key[k] for key in own)) for k in (1, 0))

    def value(server: str, column: str) -> str:
        latency = own.get((column, server, lm_open.LATENCY))
        return "" if latency is None else f"{latency:.3g} ms, {own[column, server, lm_open.THROUGHPUT]:.3g}/s"

    return table("server", servers, columns, value)


def main() -> None:
    """Draw and print what there are results of."""
    drawn: list[tuple[str, str, Callable[[Rows, Path], None], Callable[[Rows], str] | None]] = [
        ("encoder.jsonl", "policies.png", partial(encoder.draw, dpi=72), None),
        ("overload.jsonl", "overload.png", overload.draw, overload_table),
        ("lm_open.jsonl", "open-loads.png", lm_open.draw, open_table),
    ]
    for file, picture, draw, told in drawn:
        if (RESULTS / file).is_file():
            rows = [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]
            draw(rows, PICTURES / picture)
            if told is not None:
                print(told(rows), end="\n\n")


if __name__ == "__main__":
    main()
