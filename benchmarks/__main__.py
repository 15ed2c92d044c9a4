"""Run one benchmark: ``python -m benchmarks NAME [--quick] [--json FILE] [--plot FILE]``.

A benchmark is a module of this folder with a function ``run(recorder, quick, plot)``; the rest of the
folder is what they share.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer

from benchmarks.record import Recorder


class Benchmark(Protocol):
    """What a module needs in order to be a benchmark."""

    def run(self, recorder: Recorder, quick: bool, plot: Path | None) -> None:
        """Measure and add rows to the recorder; be short where ``quick``; draw to ``plot`` where given."""


def benchmark_names(folder: Path) -> list[str]:
    """The modules in ``folder`` that define ``run``, found without importing any of them."""
    return sorted(path.stem for path in folder.glob("*.py") if _defines_run(path))


app = typer.Typer(add_completion=False)


@app.command()
def main(
    name: Annotated[str, typer.Argument(help="The benchmark to run.")],
    quick: Annotated[bool, typer.Option("--quick", help="A short run, to see that it works.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the rows here, one JSON object a line.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure here, where there is one.")] = None,
) -> None:
    """Run a benchmark and print what it measured."""
    known = benchmark_names(Path(__file__).parent)
    if name not in known:
        raise typer.BadParameter(f"no benchmark {name!r}; there are: {', '.join(known) or 'none'}")
    benchmark = cast(Benchmark, importlib.import_module(f"benchmarks.{name}"))
    recorder = Recorder(name)
    benchmark.run(recorder, quick, plot)
    recorder.table()
    if json is not None:
        recorder.write(json)


def _defines_run(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)


if __name__ == "__main__":
    app()
