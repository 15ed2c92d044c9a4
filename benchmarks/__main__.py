"""Run one benchmark: ``python -m benchmarks NAME [--quick] [--only PART] [--json FILE] [--plot FILE]``.

A benchmark is a module of this folder with a function ``run(recorder, options)`` and the names of its parts,
``PARTS``; the rest of the folder is what they share.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated, cast

import typer

from benchmarks.options import TREEBANK, Benchmark, Options
from benchmarks.record import Recorder


def benchmark_names(folder: Path) -> list[str]:
    """The modules in ``folder`` that define ``run``, found without importing any of them."""
    return sorted(path.stem for path in folder.glob("*.py") if _defines_run(path))


app = typer.Typer(add_completion=False)


@app.command()
def main(
    name: Annotated[str, typer.Argument(help="The benchmark to run.")],
    quick: Annotated[bool, typer.Option("--quick", help="A short run, to see that it works.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this part alone; may be given several times.")] = None,
    hidden: Annotated[list[int] | None, typer.Option(help="Hidden size; may be given several times.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows here, one JSON object a line.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the rows that the file has.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure here, where there is one.")] = None,
    treebank: Annotated[Path, typer.Option(help="Trees in Penn brackets, for the tree benchmark.")] = TREEBANK,
) -> None:
    """Run a benchmark and print what it measured."""
    known = benchmark_names(Path(__file__).parent)
    if name not in known:
        raise typer.BadParameter(f"no benchmark {name!r}; there are: {', '.join(known) or 'none'}")
    benchmark = cast(Benchmark, importlib.import_module(f"benchmarks.{name}"))
    for part in only or []:
        if part not in benchmark.PARTS:
            raise typer.BadParameter(f"{name} has no part {part!r}; there are: {', '.join(benchmark.PARTS)}")
    recorder = Recorder(name)
    benchmark.run(recorder, Options(quick, plot, tuple(only or ()), tuple(hidden or ()), treebank))
    recorder.table()
    if json is not None:
        recorder.write(json, append=append)


def _defines_run(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)


if __name__ == "__main__":
    app()
