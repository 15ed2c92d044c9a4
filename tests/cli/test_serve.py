"""What ``cellrt serve`` is told: options, environment and file, and mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cellrt.cli import app

keeper = pytest.importorskip("cellrt.serve.keeper")
MODEL = "tests.serve.models:chain"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The settings that a server would have been started with."""
    seen: list[Any] = []

    class Recorder:
        def __init__(self, settings: Any, say: Any) -> None:
            seen.append(settings)

        def run(self) -> int:
            return 0

        def end(self) -> None: ...

    monkeypatch.setattr(keeper, "Keeper", Recorder)
    yield seen


def serve(*arguments: object, env: dict[str, str] | None = None, status: int = 0) -> str:
    given = ["serve", *(str(argument) for argument in arguments)]
    result = CliRunner().invoke(app, given, env=env, auto_envvar_prefix="CELLRT")
    assert result.exit_code == status, result.output
    return result.output


def test_options_come_before_the_environment_and_that_before_a_file(told: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("port = 1\nhost = 'a'\ndrain-s = 3\n[limits]\nmax_steps = 7\n")
    serve(MODEL, "--config", path, "--port", 3, env={"CELLRT_SERVE_PORT": "2", "CELLRT_SERVE_HOST": "b"})
    (settings,) = told
    assert (settings.port, settings.host, settings.drain_s, settings.limits.max_steps) == (3, "b", 3.0, 7)
    assert settings.models == (MODEL,) and settings.limits.max_depth == 64


def test_a_file_may_name_the_models(told: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f"models = ['{MODEL}', 'g2p']\n")
    serve("--config", path)
    assert told[0].models == (MODEL, "cellrt.demo.g2p:make_g2p")


def test_the_defaults_are_of_this_machine_alone(told: list[Any]) -> None:
    serve(MODEL)
    assert told[0].host == "127.0.0.1" and told[0].workers is None and told[0].api_keys == ()


@pytest.mark.parametrize(("device", "workers"), [("cpu", None), ("cpu:3", 3), ("cuda:0,cuda:1", ("cuda:0", "cuda:1"))])
def test_devices(told: list[Any], device: str, workers: object) -> None:
    serve(MODEL, "--device", device)
    assert told[0].workers == workers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense = 1", "unknown are"),
        ("[limits]\nnonsense = 1", "unknown are"),
        ("[limits]\nmax_steps = 'a'", "int"),
        ("=", ""),
    ],
)
def test_mistakes_in_a_file_are_said(told: list[Any], tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    assert words in serve(MODEL, "--config", path, status=2)


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--device", "cpu:0"], 2), (["--api-key", ""], 1), (["--port", "70000"], 2)]
)
def test_mistakes_in_options_are_said(told: list[Any], arguments: list[str], status: int) -> None:
    serve(MODEL, *arguments, status=status)
    assert not told


def test_a_port_that_is_taken_is_said_in_a_line() -> None:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        output = serve(MODEL, "--port", sock.getsockname()[1], status=1)
    assert "cannot listen at" in output and "Traceback" not in output


def test_spans_need_what_they_are_read_from(told: list[Any]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    serve(MODEL, "--spans", "tasks")
    assert told[0].spans == "tasks"
    assert "--spans needs a --timeline" in serve(MODEL, "--spans", "requests", "--timeline", 0, status=1)
