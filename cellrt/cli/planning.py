"""``cellrt check``, ``tune`` and ``simulate``: what a model costs, and what it takes to serve it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from cellrt.cli.models import load_model, read_requests
from cellrt.cli.shown import check_writable, complaint, console, failing_well
from cellrt.errors import DefinitionError

if TYPE_CHECKING:
    from cellrt.planning.capacity import Room
    from cellrt.planning.checking import Report
    from cellrt.planning.profile import Profile
    from cellrt.planning.simulation import Outcome

MODEL = (
    "The model, which @cellrt.unfold made: module:attribute, file.py:attribute, file.py if it has one model, or g2p, "
    "the model of the demo."
)
Model = Annotated[str, typer.Argument(help=MODEL)]
ArenaOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Bytes of one kind of rows at each worker, as in cellrt.Engine. Default: as an engine here would choose.",
    ),
]
PageOption = Annotated[
    int | None, typer.Option(min=1, help="The same, of pages of states that grow (keys and values of attention).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def check(
    model: Model,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help=(
                "Compile its cells with AOTInductor and keep them, so that engines on this machine find them "
                "compiled; takes 10 to 60 seconds a cell."
            ),
        ),
    ] = False,
    arena_bytes: ArenaOption = None,
    page_bytes: PageOption = None,
    as_json: AsJson = False,
) -> None:
    """Check a model before it is served: whether its example runs, rows of a batch are independent, another process
    makes the same weights, and its requests can be described to clients.

    Show what a request takes and costs.
    """
    with failing_well():
        from cellrt.engine.arena_sizes import ArenaBytes
        from cellrt.planning.checking import check as check_model
        from cellrt.process.model_names import source_of
        from cellrt.serve.server_settings import Limits

        try:
            from cellrt.serve.described import found_of  # as a server describes requests
        except ImportError as error:
            raise DefinitionError(
                f"cellrt check needs more packages: pip install '.[serve]' in a clone ({error})"
            ) from None
        memory = ArenaBytes(arena_bytes, page_bytes)
        describe = partial(found_of, limits=Limits())
        report = check_model(source_of(model), "wait" if compile else "off", describe, memory)
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
        f"The example has {report.nodes} node(s); unfolding takes {report.unfold_us:.0f} us, serving it alone "
        f"{report.lone_ms:.2f} ms; results {report.results}",
        highlight=False,
    )
    _show_room(report.room)


def _show_room(room: Room) -> None:
    table = Table(title="what such a request takes")
    for head in ("of", "rows at a worker", "at the host", "pages", "bytes at a worker", "at the host"):
        table.add_column(head, justify="left" if head == "of" else "right", overflow="fold")
    for kind in room.kinds:
        counts = kind.rows_at_worker, kind.rows_at_host, kind.pages, kind.bytes_at_worker, kind.bytes_at_host
        table.add_row(kind.kind, *(f"{count:,}" for count in counts))
    shown = console()
    shown.print(table)
    at_worker = ""
    if room.fit_at_worker < room.fit:
        at_worker = f", {room.fit_at_worker:,} of them with all pages at the worker"
    shown.print(
        f"An engine of one worker has room for {room.fit:,} such requests at a time{at_worker}; others wait in the "
        f"queue. First full: {room.first_full}",
        highlight=False,
    )


def tune(
    model: Model,
    bound_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="The longest that a step may take, in ms: max_batch is chosen so that it does not."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="File for what was measured, a profile: for serve --profile and simulate --profile.")
    ] = Path("profile.json"),
    plot: Annotated[
        Path | None, typer.Option(help="File for a picture, latency against batch size: .svg or .png.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure each batch size for a shorter time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how long one step of each cell takes at each batch size, on one core of this CPU, and choose the batch
    size beyond which throughput hardly grows (max_batch; BatchMaker section 2.4.2)."""
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
    """Raise DefinitionError or ImportError if files cannot be written, before it takes minutes to find out."""
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
    profile: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="What cellrt tune wrote for this model.")],
    rate: Annotated[
        list[float],
        typer.Option(
            min=0.001, help="Requests a second, at random times (Poisson). Give it several times to try several loads."
        ),
    ],
    workers: Annotated[
        int, typer.Option(min=1, max=30, help="Number of simulated workers; with --p99-ms, the most to try.")
    ] = 1,
    p99_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Find the fewest workers with which 99 of 100 requests take no longer than this, in ms."
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with a request as JSON in each line, as in the body of an HTTP request. Default: the "
                "model's example."
            )
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=10, help="Number of requests at each load.")] = 2000,
    loop_share: Annotated[
        float,
        typer.Option(
            min=0.001, max=1, help="The part of its most steps (max_steps) that each loop takes before it stops."
        ),
    ] = 1.0,
    policy: Annotated[
        str | None, typer.Option(help="Order of requests, as of serve: a name, or one of your own as module:attribute.")
    ] = None,
    deadline_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="In how many ms each must be done: tells the share that is. What is late is dropped."
        ),
    ] = None,
    schedule_by_ms: Annotated[
        float | None, typer.Option(min=0.001, help="In how many ms each must have begun; what has not is dropped.")
    ] = None,
    in_time: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="Find the shortest deadline by which this share of the requests is done."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random times.")] = 0,
    arena_bytes: ArenaOption = None,
    page_bytes: PageOption = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture, latency against load: .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell without serving anything which latency a load would have, or how many workers it needs: the real scheduler
    with workers that are simulated, whose steps take what cellrt tune measured."""
    with failing_well():
        from cellrt.core.scheduling.policies import POLICIES
        from cellrt.core.scheduling.policy import policy_of
        from cellrt.engine.arena_sizes import ArenaBytes
        from cellrt.engine.due import Due
        from cellrt.planning.profile import read_profile
        from cellrt.planning.simulation import Plant, fewest_workers, poisson_times, shortest_deadline

        if in_time is not None and (deadline_ms is not None or p99_ms is not None):
            raise DefinitionError("--in-time finds a deadline: give it without --deadline-ms and --p99-ms")
        unfolder, read, memory = load_model(model), read_profile(profile), ArenaBytes(arena_bytes, page_bytes)
        order = policy_of(policy, POLICIES)
        due = Due(*(None if each_ms is None else each_ms / 1e3 for each_ms in (deadline_ms, schedule_by_ms)))
        _check_places(plot)
        given = read_requests(unfolder, requests, count)
        outcomes: list[Outcome] = []
        found: list[str | None] = []  # by rate, the answer to what was asked for; None: there is none
        for each in rate:
            times_s = poisson_times(each, count, seed)
            if p99_ms is not None:
                how: dict[str, Any] = {"loop_share": loop_share, "arena_bytes": memory, "policy": order, "due": due}
                how |= {"most": workers, "bound_s": p99_ms / 1e3}
                fewest, tried = fewest_workers(unfolder, read, given, times_s, **how)
                outcomes += tried
                found.append(None if fewest is None else _told_workers(fewest, p99_ms))
                continue
            plant = Plant(unfolder, read, workers, memory, order)
            templates = [plant.template(request) for request in given]
            if in_time is not None:
                kept = shortest_deadline(plant, templates, times_s, each, in_time, loop_share, due.begun_s)
                outcomes += [] if kept is None else [kept]
                found.append(None if kept is None else _told_deadline(kept))
            else:
                outcomes.append(plant.play(templates, times_s, each, loop_share, due))
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
    for each, told in zip(rate, found):
        if told is not None and not as_json:
            console().print(f"{told} at {each:g} requests/s", highlight=False)
        if told is None and in_time is None:
            complaint(f"{workers} workers are too few for a p99 of {p99_ms:g} ms at {each:g} requests/s")
        if told is None and in_time is not None:
            complaint(f"no deadline is kept by {in_time:.4g} of the requests at {each:g} requests/s: too few begin")
    if None in found:
        raise typer.Exit(1)


def _told_workers(fewest: Outcome, p99_ms: float) -> str:
    noun = "worker keeps" if fewest.workers == 1 else "workers keep"
    return f"{fewest.workers} {noun} the p99 below {p99_ms:g} ms"


def _told_deadline(kept: Outcome) -> str:
    return f"a deadline of {1e3 * (kept.deadline_s or 0):.4g} ms is kept by {kept.in_time or 0:.1%} of the requests"


def _show_outcomes(outcomes: Sequence[Outcome]) -> None:
    table = Table()
    has_deadlines = any(one.in_time is not None for one in outcomes)
    heads = ("workers", "requests/s", "done/s", "rows a task", "busy", "p50 ms", "p90 ms", "p99 ms")
    for head in (*heads, "in time") if has_deadlines else heads:
        table.add_column(head, justify="right")
    for one in outcomes:
        times = ("-" if s is None else f"{1e3 * s:.2f}" for s in (one.p50_s, one.p90_s, one.p99_s))
        row = (f"{one.rate:,.0f}", f"{one.throughput:,.0f}", f"{one.mean_rows:.1f}", f"{one.busy:.0%}", *times)
        table.add_row(str(one.workers), *row, *([] if one.in_time is None else [f"{one.in_time:.1%}"]))
    console().print(table)
