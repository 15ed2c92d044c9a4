"""``cellrt check``, ``tune`` and ``simulate``: what a model costs, and what it takes to serve it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from cellrt.cli.models import load_model, read_requests
from cellrt.cli.shown import check_writable, complaint, console, failing_well
from cellrt.errors import DefinitionError

if TYPE_CHECKING:
    from cellrt.planning.checking import Report
    from cellrt.planning.profile import Profile
    from cellrt.planning.simulation import Outcome

Model = Annotated[str, typer.Argument(help="module:attribute, path.py:attribute, path.py, or the name g2p.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]


def check(
    model: Model,
    compile: Annotated[bool, typer.Option("--compile", help="Compile its cells too, for all engines to come.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a model before it is served: its example, its cells, whether rows are independent and every process makes
    the same cells, whether its requests can be described, what it costs."""
    with failing_well():
        from cellrt.planning.checking import check as check_model
        from cellrt.process.named import source_of
        from cellrt.serve.settings import Limits

        try:
            from cellrt.serve.described import found_of  # as a server describes requests
        except ImportError as error:
            raise DefinitionError(
                f"cellrt check needs more packages: pip install '.[serve]' in a clone ({error})"
            ) from None
        report = check_model(source_of(model), "wait" if compile else "off", partial(found_of, limits=Limits()))
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _show_report(report)
    for fault in report.faults:
        complaint(fault)
    if report.faults:
        raise typer.Exit(1)


def _show_report(report: Report) -> None:
    table = Table(title=f"model {report.model}")
    for head in ("cell", "inputs", "outputs", "max_batch", "form"):
        table.add_column(head, overflow="fold")
    for cell in report.cells:
        inputs, outputs = (", ".join(f"{n} {s}" for n, s in part.items()) for part in (cell.inputs, cell.outputs))
        table.add_row(cell.name, inputs, outputs, str(cell.max_batch), cell.form)
    shown = console()
    shown.print(table)
    shown.print(
        f"The example has {report.nodes} nodes; unfolding takes {report.unfold_us:.0f} us, serving it alone "
        f"{report.lone_ms:.2f} ms; results {report.results}",
        highlight=False,
    )


def tune(
    model: Model,
    bound_ms: Annotated[float | None, typer.Option(min=0.001, help="A step may take so long at most.")] = None,
    out: Annotated[Path, typer.Option(help="The profile, which serve and simulate read.")] = Path("profile.json"),
    plot: Annotated[Path | None, typer.Option(help="A picture (.svg or .png): latency against batch size.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure each size for a shorter time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure each cell's step against its batch size on this CPU, and choose max_batch (BatchMaker section 2.4.2)."""
    with failing_well():
        from cellrt.planning.measuring import measure

        unfolder = load_model(model)
        _check_places(out, plot)
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), transient=True, disable=as_json) as bar:
            task = bar.add_task("measuring")
            profile = measure(
                unfolder,
                None if bound_ms is None else bound_ms / 1e3,
                lambda what: bar.update(task, description=what),
                seconds_each=0.02 if quick else 0.3,
            )
        profile.save(out)
        if plot is not None:
            from cellrt.planning.drawing import draw_profile

            draw_profile(profile, plot)
    if as_json:
        typer.echo(out.read_text())
    else:
        _show_profile(profile, out)


def _check_places(*files: Path | None) -> None:
    """Raises DefinitionError or ImportError if files cannot be written, before it takes minutes to find out."""
    for path in files:
        if path is not None:
            check_writable(path)
    plot = files[-1]
    if plot is not None:
        from cellrt.planning.drawing import check_picture

        try:
            check_picture(plot)
        except ValueError as error:
            raise DefinitionError(f"--plot: {error}") from None


def _show_profile(profile: Profile, out: Path) -> None:
    shown = console()
    for cell in profile.cells.values():
        table = Table(title=f"cell {cell.name}: max_batch {cell.max_batch}")
        for head in ("rows", "step, us", "rows a second"):
            table.add_column(head, justify="right")
        for rows, seconds in zip(cell.rows, cell.step_s):
            table.add_row(str(rows), f"{1e6 * seconds:,.0f}", f"{rows / seconds:,.0f}")
        shown.print(table)
    if profile.host is not None:
        costs = f"{1e6 * profile.host.request_s:.0f} us a request and {1e6 * profile.host.task_s:.0f} us a task"
        shown.print(f"The engine's host takes {costs} beside the steps.", highlight=False)
    shown.print(f"written to {out}", highlight=False)


def simulate(
    model: Model,
    profile: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Of cellrt tune.")],
    rate: Annotated[
        list[float], typer.Option(min=0.001, help="Requests a second, Poisson; several: one after another.")
    ],
    workers: Annotated[int, typer.Option(min=1, max=30, help="Simulated workers; with --p99-ms: the most.")] = 1,
    p99_ms: Annotated[float | None, typer.Option(min=0.001, help="How many workers keep the p99 below this?")] = None,
    requests: Annotated[Path | None, typer.Option(help="JSON lines, each a request. Default: the example.")] = None,
    count: Annotated[int, typer.Option(min=10, help="Requests at each load.")] = 2000,
    loop_share: Annotated[float, typer.Option(min=0.001, max=1, help="Of its most steps, what a loop takes.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the arrivals.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="A picture (.svg or .png): latency against load.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a load on simulated workers with the real scheduler: latency against load, or how many workers it takes."""
    with failing_well():
        from cellrt.planning.profile import read_profile
        from cellrt.planning.simulation import Plant, fewest_workers, poisson_times

        unfolder, read = load_model(model), read_profile(profile)
        _check_places(plot)
        given = read_requests(unfolder, requests, count)
        outcomes: list[Outcome] = []
        fewest: list[tuple[float, int | None]] = []  # by rate; None: all are too few
        for each in rate:
            times_s = poisson_times(each, count, seed)
            if p99_ms is None:
                plant = Plant(unfolder, read, workers)
                templates = [plant.template(request) for request in given]
                outcomes.append(plant.play(templates, times_s, each, loop_share))
            else:
                bound_s = p99_ms / 1e3
                found, tried = fewest_workers(
                    unfolder, read, given, times_s, most=workers, bound_s=bound_s, loop_share=loop_share
                )
                outcomes += tried
                fewest.append((each, None if found is None else found.workers))
        if plot is not None:
            from cellrt.planning.drawing import draw_load

            draw_load(outcomes, plot)
    if read.host is None:
        complaint(
            f"{profile} is older than the costs of the engine's host: they are not counted; run cellrt tune again"
        )
    if as_json:
        typer.echo(json.dumps([outcome.as_json() for outcome in outcomes]))
    else:
        _show_outcomes(outcomes)
    for each, count_of in fewest:
        if count_of is None:
            complaint(f"{workers} workers are too few for a p99 of {p99_ms:g} ms at {each:g} requests/s")
        elif not as_json:
            noun = "worker keeps" if count_of == 1 else "workers keep"
            console().print(f"{count_of} {noun} the p99 below {p99_ms:g} ms at {each:g} requests/s", highlight=False)
    if any(count_of is None for _, count_of in fewest):
        raise typer.Exit(1)


def _show_outcomes(outcomes: Sequence[Outcome]) -> None:
    table = Table()
    for head in ("workers", "requests/s", "done/s", "rows a task", "busy", "p50 ms", "p90 ms", "p99 ms"):
        table.add_column(head, justify="right")
    for one in outcomes:
        times = (f"{1e3 * seconds:.2f}" for seconds in (one.p50_s, one.p90_s, one.p99_s))
        row = (f"{one.rate:,.0f}", f"{one.throughput:,.0f}", f"{one.mean_rows:.1f}", f"{one.busy:.0%}", *times)
        table.add_row(str(one.workers), *row)
    console().print(table)
