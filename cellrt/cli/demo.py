"""``cellrt demo``: a trained encoder-decoder beside two other ways to serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cellrt.cli.shown import console, failing_well


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


def demo(
    words: Annotated[int, typer.Option(min=20, help="Words that each of the three servers gets at each load.")] = 3000,
    rate: Annotated[
        str, typer.Option(help="Words per second; auto: two loads, chosen by what the servers were measured to bear.")
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, max=30, help="Worker threads. Default: one for each core.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the random choice of words and of the times at which they arrive.")
    ] = 0,
    timeline: Annotated[
        Path, typer.Option(help="File for a picture of which words were batched together: .png or .svg.")
    ] = Path("cellrt-demo-timeline.png"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Take a few hundred words and measure for a shorter time.")
    ] = False,
) -> None:
    """Show what batching by cells gains: turn words into phonemes with a trained encoder-decoder, and compare with
    serving one word at a time and with padded batches."""
    from cellrt.demo.run import Options, run

    if timeline.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"a picture is a .png or .svg file, not {timeline}", param_hint="--timeline")
    if not timeline.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {timeline.parent}", param_hint="--timeline")
    number = min(words, 300) if quick else words
    with failing_well():
        is_identical = run(Options(number, _rate(rate), workers, seed, timeline, quick), console())
    if not is_identical:
        raise typer.Exit(1)
