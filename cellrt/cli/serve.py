"""``cellrt serve``: an engine behind HTTP and gRPC."""

from __future__ import annotations

import enum
import importlib
import math
import os
import re
import signal
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cellrt.cli.dtypes import ENVIRONMENT as DTYPE
from cellrt.cli.dtypes import DTypeOption
from cellrt.cli.fields import fields_of, made_of, with_fields
from cellrt.cli.shown import complaint, failing_well
from cellrt.errors import DefinitionError
from cellrt.serve.server_settings import EngineSettings

if TYPE_CHECKING:
    from cellrt.serve.server_settings import Limits

API_KEY, MODELS = "CELLRT_SERVE_API_KEY", "CELLRT_SERVE_MODELS"
ORIGINS = ["CELLRT_SERVE_ALLOWED_ORIGIN", "CELLRT_SERVE_ALLOWED_ORIGINS"]
ENGINE_FIELDS = fields_of(EngineSettings)
TABLES = {field.table for field in ENGINE_FIELDS if field.table}
"""The tables that a file may have."""
SEVERAL = ("models", "api_key", "allowed_origin", "profile")
"""The options that may be given several times."""
MAX_LIMIT = 1 << 48
"""The most that a file may set a limit to: no client's request comes near it, and every part of a server can hold
it.
"""
NEEDED = (
    "cellrt serve needs more packages: in a clone pip install '.[serve]', for gRPC '.[grpc]', for --spans '.[otel]'"
)


class Spans(enum.StrEnum):
    """The detail of a request's trace: none, its queueing and computation, or each of its tasks too."""

    OFF = "off"
    REQUESTS = "requests"
    TASKS = "tasks"


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make what a TOML file says the defaults of the options of the same names."""
    if path is None:
        return None
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--config") from None
    known = {parameter.name for parameter in context.command.params if parameter.name not in (None, "config")}
    context.obj = given.pop("limits", {})
    if not isinstance(context.obj, dict):
        raise typer.BadParameter(f"{path}: limits: expected a table, [limits]", param_hint="--config")
    named = _without_tables(path, {name.replace("-", "_"): value for name, value in given.items()})
    if unknown := sorted(named.keys() - known):
        raise typer.BadParameter(f"{path}: unknown are {unknown}", param_hint="--config")
    read = {name: _as_typed(path, name, value) for name, value in named.items()}
    context.default_map = {**(context.default_map or {}), **read}
    return path


def _without_tables(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration file with those of its tables under the names of their options."""
    named = {}
    for name, value in given.items():
        if name not in TABLES:
            named[name] = value
        elif not isinstance(value, dict):
            raise typer.BadParameter(f"{path}: {name}: expected a table, [{name}]", param_hint="--config")
        else:
            named |= {f"{name}_{within.replace('-', '_')}": each for within, each in value.items()}
    return named


def _as_typed(path: Path, name: str, value: object) -> object:
    """Return an entry of a file as the command line would give it, so that both are parsed and refused alike."""
    is_list = name in SEVERAL
    if is_list and not _is_texts(value):
        raise typer.BadParameter(f'{path}: {name}: expected a list of texts, ["..."]', param_hint="--config")
    if not is_list and not isinstance(value, str | int | float):
        raise typer.BadParameter(f"{path}: {name}: expected one value, got {value!r}", param_hint="--config")
    return value if is_list else str(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _limits(given: dict[str, Any]) -> Limits:
    import msgspec

    from cellrt.serve.server_settings import Limits

    unknown = given.keys() - Limits.__dataclass_fields__.keys()
    if unknown:
        raise typer.BadParameter(f"[limits]: unknown are {sorted(unknown)}", param_hint="--config")
    try:
        limits = msgspec.convert(given, Limits)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(f"[limits]: {error}", param_hint="--config") from None
    for name, value in asdict(limits).items():
        if not 0 < value <= MAX_LIMIT:
            raise typer.BadParameter(
                f"[limits]: {name}: expected a number above 0, at most {MAX_LIMIT:,}, got {value}",
                param_hint="--config",
            )
    return limits


def _max_batch(profiles: list[Path], num_models: int) -> tuple[dict[str, int], ...]:
    from cellrt.planning.profile import read_profile

    if len(profiles) not in (0, num_models):
        raise typer.BadParameter(f"{len(profiles)} for {num_models} models", param_hint="--profile")
    cells = [read_profile(path).cells.values() for path in profiles]
    return tuple({cell.name: cell.max_batch for cell in each} for each in cells)


def workers_of(device: str) -> int | tuple[str, ...] | None:
    """Return an engine's ``workers`` for ``cpu``, ``cpu:4`` or ``cuda:0,cuda:1``."""
    if numbered := re.fullmatch(r"cpu(?::([1-9]\d*))?", device):
        return int(numbered[1]) if numbered[1] else None
    names = tuple(device.split(","))
    if any(name.startswith("cpu") and name != "cpu" for name in names):
        raise typer.BadParameter(f"expected cpu, cpu:4 or cuda:0,cuda:1, got {device!r}", param_hint="--device")
    return names


@with_fields(ENGINE_FIELDS, "engine")
def serve(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            envvar=MODELS,  # an argument gets none by itself, as options do
            help=(
                "The models, which @cellrt.unfold made, each as module:attribute, file.py:attribute, file.py "
                "if it has one model, or g2p, the model of the demo; or a checkpoint of a language model, a folder "
                "with a config.json or a GGUF file, with :name behind it if it is to have another."
            ),
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen at. The default takes connections from this machine alone, 0.0.0.0 from everywhere."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port for HTTP; 0: any that is free, which is printed.")
    ] = 8000,
    grpc_port: Annotated[int | None, typer.Option(min=0, max=65_535, help="Port for gRPC. Default: no gRPC.")] = None,
    device: Annotated[
        str,
        typer.Option(help="Where cells run: cpu (a worker for each core), cpu:4 (four workers), cuda:0,cuda:1 (GPUs)."),
    ] = "cpu",
    dtype: DTypeOption = None,
    front_ends: Annotated[
        int, typer.Option(min=1, max=256, help="Number of processes that read requests and write answers.")
    ] = 1,
    max_queued_requests: Annotated[
        int,
        typer.Option(min=1, help="The most requests that may be unfinished at once; more are refused with status 429."),
    ] = 4096,
    max_queued_per_model: Annotated[
        int | None, typer.Option(min=1, help="The same, for each model. Default: no limit of its own.")
    ] = None,
    max_queued_rows: Annotated[
        int | None,
        typer.Option(
            min=1, help="The most steps and nodes that unfinished requests may come to, added up. Default: no limit."
        ),
    ] = None,
    max_queued_rows_per_model: Annotated[
        int | None, typer.Option(min=1, help="The same, for each model. Default: no limit of its own.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Key that each request must have (Authorization: Bearer KEY); give it several times for "
                "several keys, of which one is enough. Better in the environment, as others see the command "
                "line."
            )
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            envvar=ORIGINS,
            help=(
                "Origin, such as https://a.example, whose web pages may send requests here from a browser. "
                "Default: this server's own pages alone."
            ),
        ),
    ] = None,
    keep_alive_s: Annotated[
        float, typer.Option(min=0, help="Seconds that a connection may be idle before the server closes it.")
    ] = 75.0,
    ping_timeout_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds until a websocket is closed whose client answers no ping; 0: send none."),
    ] = 30.0,
    drain_s: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds that requests have to finish after SIGTERM or Ctrl-C, before the server ends."
        ),
    ] = 20.0,
    timeline: Annotated[
        int, typer.Option(min=0, help="How many of the last tasks and requests /debug shows; 0: none.")
    ] = 2000,
    spans: Annotated[
        Spans,
        typer.Option(
            help=(
                "Which OpenTelemetry spans to export of requests that come with a sampled traceparent header:"
                " none, one of each request, or of each task too."
            )
        ),
    ] = Spans.OFF,
    compile: Annotated[
        str,
        typer.Option(
            help=(
                "Whether to compile cells that are plain PyTorch: background (while they are served), wait "
                "(before), off."
            )
        ),
    ] = "background",
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="What cellrt tune wrote, whose batch sizes are then used; one for each model, in their order."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=_read_config,
            is_eager=True,
            help="TOML file with these options by their names, and a table named limits (see docs/server.md).",
        ),
    ] = None,
    engine: Any = None,
) -> None:
    """Serve models over HTTP: the Open Inference Protocol at /v2, their own and OpenAI's at /v1, /docs, /metrics."""
    try:
        from cellrt.process.model_names import sources_of
        from cellrt.serve.server_settings import Settings
        from cellrt.serve.supervisor import Supervisor

        if spans is not Spans.OFF:
            importlib.import_module("opentelemetry.sdk.trace")
        if grpc_port is not None:
            importlib.import_module("tritonclient.grpc.service_pb2")
            importlib.import_module("grpc_health.v1.health_pb2")
    except (ImportError, RuntimeError) as error:  # tritonclient turns one into the other
        complaint(f"{NEEDED} ({error})")
        raise typer.Exit(1) from error
    with failing_well():
        settings = Settings(
            models=sources_of(models),
            host=host,
            port=port,
            grpc_port=grpc_port,
            front_ends=front_ends,
            workers=workers_of(device),
            max_queued_requests=max_queued_requests,
            max_queued_per_model=max_queued_per_model,
            max_queued_rows=max_queued_rows,
            max_queued_rows_per_model=max_queued_rows_per_model,
            api_keys=tuple(api_key or ()),
            allowed_origins=tuple(allowed_origin or ()),
            keep_alive_s=keep_alive_s,
            ping_timeout_s=ping_timeout_s,
            drain_s=drain_s,
            timeline=timeline,
            spans=spans.value,
            compile=compile,
            max_batch=_max_batch(profile or [], len(models)),
            limits=_limits(context.obj or {}),
            engine=made_of(EngineSettings, engine),
        )
        if dtype is not None:  # which the engine's process looks at, and one that takes its place
            os.environ[DTYPE] = dtype.value
        if spans is not Spans.OFF and not timeline:
            raise DefinitionError("--spans needs a --timeline that it can read")
        if any(not key.isascii() or not key for key in settings.api_keys):
            raise DefinitionError("an API key is ASCII text, and not empty")
        for option, seconds in {
            "drain-s": drain_s,
            "keep-alive-s": keep_alive_s,
            "ping-timeout-s": ping_timeout_s,
        }.items():
            if not math.isfinite(seconds):
                raise DefinitionError(f"--{option}: expected a number of seconds, got {seconds}")
        if API_KEY in os.environ and not settings.api_keys:
            raise DefinitionError(f"{API_KEY} is empty: unset it, if no key is to be needed")
        supervisor = Supervisor(settings, lambda text: typer.echo(text, err=True))
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: supervisor.end())
        status = supervisor.run()
    raise typer.Exit(status)
