"""What ``cellrt serve`` is told of its engine, by option, environment or file, comes to the engine's process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cellrt.cli.fields import Field
from cellrt.cli.serve import ENGINE_FIELDS
from cellrt.core.state.settings import POLICY_NAMES
from cellrt.serve.server_settings import EngineSettings, Settings
from tests.cli.test_serve import MODEL, serve, told
from tests.serve import reporting

pytest.importorskip("cellrt.serve.supervisor")
__all__ = ["told"]
TEXTS = {"policy": "shortest-job-first", "scheduler_suspension": "copy", "sessions_when_full": "refuse"}
ROOT = Path(__file__).resolve().parents[2]


def before(field: Field) -> Any:
    """What a field has if nobody says otherwise."""
    record = EngineSettings()
    return getattr(getattr(record, field.table) if field.table else record, field.name)


def other(field: Field) -> Any:
    """Another value for a field."""
    if field.type is str:
        return TEXTS[field.option]
    if field.type is bool:
        return not before(field)
    return field.type(3 * (before(field) or 100_000))


def flat(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of options."""
    found = {field.option: engine[field.table][field.name] for field in ENGINE_FIELDS if field.table}
    return found | {field.option: engine[field.name] for field in ENGINE_FIELDS if not field.table}


OTHERS = {field.option: other(field) for field in ENGINE_FIELDS}


def seen(settings: Settings) -> dict[str, Any]:
    return flat(dataclasses.asdict(settings.engine))


def test_an_option_says_each(told: list[Any]) -> None:
    words = []
    for name, value in OTHERS.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    serve(MODEL, *words)
    assert seen(told[0]) == OTHERS


def test_the_environment_says_each(told: list[Any]) -> None:
    serve(MODEL, env={f"CELLRT_SERVE_{name.upper()}": str(value) for name, value in OTHERS.items()})
    assert seen(told[0]) == OTHERS


@pytest.mark.parametrize("as_tables", [False, True])
def test_a_file_says_each(told: list[Any], tmp_path: Path, as_tables: bool) -> None:
    lines: dict[str, list[str]] = {"": []}
    for field in ENGINE_FIELDS:
        table = field.table if as_tables else ""
        name = field.name if as_tables else field.option.replace("_", "-")
        lines.setdefault(table, []).append(f"{name} = {json.dumps(OTHERS[field.option])}")
    text = "\n".join(lines.pop("")) + "".join(f"\n[{name}]\n" + "\n".join(each) for name, each in lines.items())
    (tmp_path / "server.toml").write_text(text)
    serve(MODEL, "--config", tmp_path / "server.toml")
    assert seen(told[0]) == OTHERS


def test_what_is_not_said_is_as_the_engine_has_it(told: list[Any]) -> None:
    serve(MODEL)
    assert told[0].engine == EngineSettings()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "fair"], "policy: expected one of 'batchmaker'"),
        (["--scheduler-suspension", "never"], "suspension: expected one of"),
        (["--sessions-idle-timeout-s", 0], "idle_timeout_s: expected seconds, more than 0"),
    ],
)
def test_what_no_engine_takes_is_refused(told: list[Any], words: list[object], said: str) -> None:
    assert said in serve(MODEL, *words, status=1) and not told


def test_an_unknown_entry_of_a_table_is_refused(told: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    for text in ("[scheduler]\nspeed = 3", "[sessions]\nmax_age = 3", "scheduler = 3"):
        path.write_text(text)
        assert "scheduler" in (said := serve(MODEL, "--config", path, status=2)) or "sessions" in said


def test_the_docs_name_each() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    missing = [field.option for field in ENGINE_FIELDS if f"`--{field.option.replace('_', '-')}`" not in page]
    missing += [policy for policy in POLICY_NAMES if f"`{policy}`" not in page]
    assert not missing


def test_the_engines_process_gets_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cellrt.cli.fields import made_of
    from cellrt.serve.start_engine import start_engine

    path = tmp_path / "report.json"
    monkeypatch.setenv(reporting.FILE, str(path))
    given = {**OTHERS, "scheduler_loops_ahead": 0}  # a CPU's are never ahead
    settings = Settings(
        models=("tests.serve.reporting:report",),
        workers=1,
        address=f"@cellrt-test-options-{tmp_path.name}",
        engine=made_of(EngineSettings, given),
    )
    started = start_engine(settings)
    try:
        started.wait()
    finally:
        started.end()
    assert flat(json.loads(path.read_text())) == given


@pytest.mark.parametrize(("cores", "front_ends", "workers"), [(2, 1, 1), (8, 2, 6), (1, 1, 1), (64, 1, 30)])
def test_by_default_workers_leave_cores_to_front_ends(
    monkeypatch: pytest.MonkeyPatch, cores: int, front_ends: int, workers: int
) -> None:
    from cellrt.serve import start_engine

    monkeypatch.setattr(start_engine, "num_cores", lambda: cores)
    assert start_engine.workers_of(Settings(front_ends=front_ends)) == workers
    assert start_engine.workers_of(Settings(front_ends=front_ends, workers=3)) == 3
