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
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=overview(FOLDER))
def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(benchmark_names(FOLDER))}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A short run, to see that it works.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this part alone; may be given several times.")] = None,
    hidden: Annotated[list[int] | None, typer.Option(help="Hidden size; may be given several times.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows here, one JSON object a line.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the rows that the file has.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure here, where there is one.")] = None,
    treebank: Annotated[
        Path | None,
        typer.Option(
            help=f"Trees in Penn brackets, for the tree benchmark. Default: the file that {TREEBANK_VARIABLE} names, "
            f"else {TRAIN} in the repository, if it is there; else trees are drawn."
        ),
    ] = None,
) -> None:
    """Run a benchmark and print what it measured."""
    known = benchmark_names(FOLDER)
    if name not in known:
        raise typer.BadParameter(f"no benchmark {name!r}; there are: {', '.join(known) or 'none'}")
    benchmark = cast(Benchmark, importlib.import_module(f"benchmarks.{name}"))
    for part in only or []:
        if part not in benchmark.PARTS:
            raise typer.BadParameter(f"{name} has no part {part!r}; there are: {', '.join(benchmark.PARTS)}")
    try:
        trees = find_treebank(treebank)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--treebank") from None
    recorder = Recorder(name)
    benchmark.run(recorder, Options(quick, plot, tuple(only or ()), tuple(hidden or ()), trees))
    recorder.table()
    if json is not None:
        recorder.write(json, append=append)


if __name__ == "__main__":
    app()
