"""Run one benchmark: ``python -m benchmarks NAME [--quick] [--only PART] [--json FILE] [--plot FILE]``.

A benchmark is a module of this folder with a function ``run(recorder, options)`` and the names of its parts,
``PARTS``; the rest of the folder is what they share. A bare machine with torch, Triton and Numba can run it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.options import TREEBANK_VARIABLE, Benchmark, Options, find_treebank
from benchmarks.record import Recorder
from examples.models.treebank import TRAIN


def benchmark_names(folder: Path) -> list[str]:
    """Return the modules in ``folder`` that define ``run``, found without importing any of them."""
    return sorted(path.stem for path in folder.glob("*.py") if _defines_run(path))


def overview(folder: Path) -> str:
    """Return the help of the command, with a line for each benchmark: the first of its docstring."""
    lines = ["Run a benchmark and print what it measured. The benchmarks:"]
    for name in benchmark_names(folder):
        first = (ast.get_docstring(_parsed(folder / f"{name}.py")) or "").splitlines()[:1]
        lines.append(f"{name}: {''.join(first)}")
    return "\n\n".join(lines)


def _defines_run(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in _parsed(path).body)


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


FOLDER = Path(__file__).parent


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "benchmarks", description=overview(FOLDER), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("name", choices=benchmark_names(FOLDER), metavar="NAME", help="a benchmark")
    made.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    made.add_argument("--only", action="append", default=[], help="run this part; may be given several times")
    made.add_argument("--hidden", action="append", default=[], type=int, help="hidden size; may be given several times")
    made.add_argument("--json", type=Path, help="write the rows here, one JSON object a line")
    made.add_argument("--append", action="store_true", help="keep the rows that the file has")
    made.add_argument("--plot", type=Path, help="draw the figure here, where there is one")
    made.add_argument(
        "--treebank",
        type=Path,
        help=f"trees in Penn brackets; default: the file that {TREEBANK_VARIABLE} names, else {TRAIN} in the "
        "repository, if it is there; else trees are drawn",
    )
    made.add_argument("--device", help="cpu, cuda or cuda:0 for figures and ablate; default: a GPU if there is one")
    made.add_argument("--out", type=Path, help="folder of what figures and ablate measure; default: this machine's")
    made.add_argument("--again", action="store_true", help="measure also what that folder has")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark and print what it measured. Figures print their own lines as they go."""
    command = parser()
    given = command.parse_args(arguments)
    benchmark = cast(Benchmark, importlib.import_module(f"benchmarks.{given.name}"))
    for part in given.only:
        if part not in benchmark.PARTS:
            command.error(f"{given.name} has no part {part!r}; there are: {', '.join(benchmark.PARTS)}")
    try:
        trees = find_treebank(given.treebank)
    except FileNotFoundError as error:
        command.error(f"--treebank: {error}")
    recorder = Recorder(given.name)
    only, hidden = tuple(given.only), tuple(given.hidden)
    options = Options(given.quick, given.plot, only, hidden, trees, given.device, given.out, given.again)
    benchmark.run(recorder, options)
    if shown := [row for row in recorder.rows if "figure" not in row]:
        recorder.table(rows=shown)
    if given.json is not None:
        recorder.write(given.json, append=given.append)


if __name__ == "__main__":
    main()
