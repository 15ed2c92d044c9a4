"""``cellrt bench serve``: a load on a server over HTTP, in the words of other serving benchmarks."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from cellrt.cli.models import read_lines
from cellrt.cli.shown import check_writable, complaint, console, failing_well

app = typer.Typer(no_args_is_help=True, help="Measure a server under load.")


@app.callback()
def _common() -> None:
    """Measure a server under load."""


@app.command("serve")
def bench_serve(
    model: Annotated[str, typer.Option(help="Name of the model to send requests to.")],
    base_url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str, typer.Option(help="Path to send requests to; {model} stands for the model's name.")
    ] = "/v1/models/{model}/infer",
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with a request as JSON in each line, or an object with request and the second time_s at"
                " which it is sent."
            )
        ),
    ] = None,
    request: Annotated[str | None, typer.Option(help="One request as JSON, instead of a file.")] = None,
    num_prompts: Annotated[
        int,
        typer.Option(
            "--num-prompts", "--num-requests", min=1, help="Number of requests; those of a shorter file are repeated."
        ),
    ] = 1000,
    request_rate: Annotated[float, typer.Option(min=0.001, help="Requests a second; inf: all at once.")] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(min=0.001, help="Regularity of the times: 1 is Poisson, less comes in bursts, more is more even."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="The most requests that are unanswered at a time.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Ask for results step by step, as they are made.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key of the server, if it wants one; better given in the environment than here, where others see it."
        ),
    ] = None,
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles of latencies to show, with commas between them.")
    ] = "50,90,99",
    seed: Annotated[int, typer.Option(min=0, help="Of the arrivals.")] = 0,
    save_result: Annotated[Path | None, typer.Option(help="File for the numbers, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Send requests to a running server and measure latencies and throughput: at a rate, a fixed number at a
    time, or at the times that a file has."""
    try:
        from cellrt.planning.load import Load, arrival_times, check_served, send
    except ImportError as error:
        complaint(f"cellrt bench needs aiohttp: pip install aiohttp ({error})")
        raise typer.Exit(1) from error
    percentiles = _percentiles(metric_percentiles)
    with failing_well():
        lines = _lines(dataset_path, request)
    lines = [lines[number % len(lines)] for number in range(num_prompts)]
    times = [line.get("time_s") for line in lines]
    bodies = [
        json.dumps({"request": line["request"], **({"stream": True} if stream else {})}).encode() for line in lines
    ]
    due_s = sorted(float(time_s) for time_s in times if isinstance(time_s, int | float))
    if len(due_s) < num_prompts:
        due_s = arrival_times(request_rate, num_prompts, burstiness, seed) if math.isfinite(request_rate) else []
    load = Load(
        base_url.rstrip("/") + endpoint.replace("{model}", model),
        bodies,
        due_s,
        max_concurrency,
        stream,
        {"authorization": f"Bearer {api_key}"} if api_key else {},
    )
    asked = f"{base_url.rstrip('/')}/v2/models/{model}" if "{model}" in endpoint else load.url
    with failing_well():
        if save_result is not None:
            check_writable(save_result)
        asyncio.run(check_served(asked, load.headers))
    with Progress(transient=True, disable=as_json) as bar:
        task = bar.add_task("requests", total=num_prompts)
        answers = asyncio.run(send(load, lambda count: bar.advance(task, count)))
    summary = answers.summary(percentiles)
    if save_result is not None:
        save_result.write_text(json.dumps(summary, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        table = Table(title=f"{model} at {load.url}")
        table.add_column("")
        table.add_column("", justify="right")
        for name, value in summary.items():
            shown = f"{value:,.2f}" if isinstance(value, float) else str(value)
            table.add_row(name.replace("_", " "), shown)
        console().print(table)
    if failed := sum(answers.failures.values()):
        what = f"{failed} of {num_prompts} requests failed" if answers.latency_s else "no request was answered"
        complaint(f"{what}: {dict(answers.failures)}{answers.said and f'; the first: {answers.said}'}")
    if not answers.latency_s:
        raise typer.Exit(1)


def _lines(path: Path | None, request: str | None) -> list[dict[str, object]]:
    """Return the requests, each as an object with ``request`` and perhaps ``time_s``."""
    if (path is None) == (request is None):
        raise typer.BadParameter("give either --dataset-path or --request")
    if path is None:
        try:
            return [{"request": json.loads(request or "")}]
        except ValueError as error:
            raise typer.BadParameter(f"no JSON: {error}", param_hint="--request") from None
    lines = list(read_lines(path).values())
    if not lines:
        raise typer.BadParameter(f"{path} is empty", param_hint="--dataset-path")
    return [line if isinstance(line, dict) and "request" in line else {"request": line} for line in lines]


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= value <= 100 for value in found):
        raise typer.BadParameter(f"expected numbers from 0 to 100, got {text!r}", param_hint="--metric-percentiles")
    return found
