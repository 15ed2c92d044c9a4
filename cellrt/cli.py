"""The command line: ``cellrt demo`` and ``cellrt --version``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import cellrt

PIPED_WIDTH = 100  # characters, where the output is not a terminal
app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve dynamic neural networks cell by cell.")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"cellrt {cellrt.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve dynamic neural networks cell by cell."""


def _rate(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise typer.BadParameter(f"expected auto or words per second, got {text!r}", param_hint="--rate")
    return rate


@app.command()
def demo(
    words: Annotated[int, typer.Option(min=20, help="How many words each server gets at each load.")] = 3000,
    rate: Annotated[str, typer.Option(help="Words per second, or auto: two loads from measured capacities.")] = "auto",
    workers: Annotated[int | None, typer.Option(min=1, max=30, help="Worker threads. Default: one a core.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of words and of the arrivals.")] = 0,
    timeline: Annotated[Path, typer.Option(help="The picture: a .png or .svg file.")] = Path(
        "cellrt-demo-timeline.png"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Few words, short measurements.")] = False,
) -> None:
    """Serve real words through a trained encoder-decoder, beside one at a time and padded batches."""
    from cellrt.demo.run import Options, run
    from cellrt.errors import CellrtError

    if timeline.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"a picture is a .png or .svg file, not {timeline}", param_hint="--timeline")
    if not timeline.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {timeline.parent}", param_hint="--timeline")
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    number = min(words, 300) if quick else words
    try:
        is_identical = run(Options(number, _rate(rate), workers, seed, timeline, quick), console)
    except (CellrtError, ImportError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if not is_identical:
        raise typer.Exit(1)


def main() -> None:
    """The entry point of the command ``cellrt``."""
    app()


if __name__ == "__main__":
    main()
