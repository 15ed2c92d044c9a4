"""What ``cellrt serve`` is told: options, environment and file, and mistakes in them."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import cellrt
from cellrt.cli import app
from cellrt.cli.dtypes import ENVIRONMENT as DTYPE
from cellrt.errors import DefinitionError, DeviceError
from cellrt.serve.server_settings import Settings

supervisor = pytest.importorskip("cellrt.serve.supervisor")
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

    monkeypatch.setattr(supervisor, "Supervisor", Recorder)
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
    assert settings.models == (MODEL,) and settings.limits.max_depth == 64 and settings.compile == "background"


def test_a_file_may_name_the_models(told: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f"models = ['{MODEL}', 'g2p']\n")
    serve("--config", path)
    assert told[0].models == (MODEL, "cellrt.demo.g2p:make_g2p")


def test_the_environment_may_name_the_models(told: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("models = ['no_such_file.py']\n")
    serve("--config", path, env={"CELLRT_SERVE_MODELS": f"{MODEL} g2p"})
    serve(MODEL, env={"CELLRT_SERVE_MODELS": "g2p"})
    assert [settings.models for settings in told] == [(MODEL, "cellrt.demo.g2p:make_g2p"), (MODEL,)]


@pytest.mark.parametrize("name", ["ALLOWED_ORIGIN", "ALLOWED_ORIGINS"])
def test_origins_come_from_options_the_environment_or_a_file(told: list[Any], tmp_path: Path, name: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text("allowed-origin = ['https://A.example', 'https://b.example:81']\n")
    serve(MODEL, "--config", path)
    serve(MODEL, "--config", path, env={f"CELLRT_SERVE_{name}": "https://c.example http://[::1]:8"})
    serve(MODEL, "--allowed-origin", "https://d.example", "--allowed-origin", "https://e.example")
    assert [settings.allowed_origins for settings in told] == [
        ("https://a.example", "https://b.example:81"),
        ("https://c.example", "http://[::1]:8"),
        ("https://d.example", "https://e.example"),
    ]


def test_how_long_connections_stay_comes_from_options_the_environment_or_a_file(
    told: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "server.toml"
    path.write_text("keep-alive-s = 3\nping-timeout-s = 4\n")
    serve(MODEL)
    serve(MODEL, "--config", path)
    serve(MODEL, "--config", path, "--ping-timeout-s", 0, env={"CELLRT_SERVE_KEEP_ALIVE_S": "5.5"})
    assert [(settings.keep_alive_s, settings.ping_timeout_s) for settings in told] == [(75, 30), (3, 4), (5.5, 0)]
    assert "--keep-alive-s: expected a number of seconds" in serve(MODEL, "--keep-alive-s", "inf", status=1)


def test_a_dtype_is_what_all_processes_find_in_the_environment(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DTYPE, "bfloat16")
    serve(MODEL)
    assert os.environ[DTYPE] == "bfloat16"
    serve(MODEL, "--dtype", "float16")
    assert os.environ[DTYPE] == "float16"
    assert "'float64' is not one of" in serve(MODEL, "--dtype", "float64", status=2)


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/page", "https://"])
def test_what_is_no_origin_is_refused(told: list[Any], origin: str) -> None:
    assert "allowed origins: expected an origin" in serve(MODEL, "--allowed-origin", origin, status=1)


def test_the_defaults_are_of_this_machine_alone(told: list[Any]) -> None:
    serve(MODEL)
    assert told[0].host == "127.0.0.1" and told[0].workers is None and told[0].api_keys == ()


@pytest.mark.parametrize(
    ("device", "workers"),
    [
        ("cpu", None),
        ("cpu:3", 3),
        ("cuda:0,cuda:1", ("cuda:0", "cuda:1")),
    ],
)
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
        ("limits = 5", "expected a table"),
        ("config = 'b.toml'", "unknown are ['config']"),
        ("models = 'g2p'", "models: expected a list of texts"),
        ("profile = [1]", "profile: expected a list of texts"),
        ("port = 1.5", "'--port'"),
        ("port = true", "'--port'"),
        ("front-ends = [1]", "front_ends: expected one value, got [1]"),
        ("timeline = -1", "timeline"),
        ("[limits]\nmax_streams_per_connection = 0", "max_streams_per_connection: expected a number above 0"),
        ("[limits]\nmax_depth = -5", "got -5"),
        ("[limits]\nmax_items = 0", "max_items"),
        ("[limits]\nread_timeout_s = inf", "got inf"),
        ("[limits]\nwrite_timeout_s = nan", "got nan"),
        ("[limits]\nmax_steps = true", "int"),
    ],
)
def test_mistakes_in_a_file_are_said(told: list[Any], tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    assert words in " ".join(serve(MODEL, "--config", path, status=2).replace("│", "").split())


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--device", "cpu:0"], 2),
        (["--device", "cpu:process"], 2),
        (["--api-key", ""], 1),
        (["--port", "70000"], 2),
        (["--drain-s", "inf"], 1),
        (["--drain-s", "nan"], 2),
    ],
)
def test_mistakes_in_options_are_said(told: list[Any], arguments: list[str], status: int) -> None:
    serve(MODEL, *arguments, status=status)
    assert not told


def test_a_key_that_is_empty_does_not_open_the_server(told: list[Any]) -> None:
    assert "CELLRT_SERVE_API_KEY is empty" in serve(MODEL, env={"CELLRT_SERVE_API_KEY": ""}, status=1)
    serve(MODEL, env={"CELLRT_SERVE_API_KEY": "a b"})
    assert told[0].api_keys == ("a", "b")


def test_a_version_in_the_environment_is_none_of_ours(told: list[Any]) -> None:
    serve(MODEL, env={"CELLRT_VERSION": "1.2.3"})
    assert told


def test_the_package_runs_as_the_command_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cellrt", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("cellrt", run_name="__main__")
    assert capsys.readouterr().out == f"cellrt {cellrt.__version__}\n"


def test_help_names_the_limits() -> None:
    assert "limits" in serve("--help")


def test_a_package_that_is_half_there_is_asked_for(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def lacking(name: str) -> Any:
        if name.startswith("tritonclient"):
            raise RuntimeError("The installation does not include grpc support")
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", lacking)
    assert "for gRPC '.[grpc]'" in serve(MODEL, "--grpc-port", 0, status=1)


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_a_port_that_others_share_is_not_shared_with_us(option: str) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = ["--port", "0"] if option == "--grpc-port" else []
        output = serve(MODEL, *port, "--front-ends", 2, option, sock.getsockname()[1], status=1)
    assert "cannot listen at" in output and "Traceback" not in output


def test_of_servers_that_begin_at_one_moment_one_gets_the_port_for_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        settings = Settings(port=0, grpc_port=sock.getsockname()[1], front_ends=2)
    refused: list[DefinitionError] = []
    look = supervisor._claim

    def look_while_another_begins(*given: Any) -> None:
        look(*given)  # nobody listens
        monkeypatch.setattr(supervisor, "_claim", look)
        with pytest.raises(DefinitionError, match="cannot listen at") as caught:
            supervisor.Supervisor(settings, lambda text: None)._clean_up()
        refused.append(caught.value)

    monkeypatch.setattr(supervisor, "_claim", look_while_another_begins)
    supervisor.Supervisor(settings, lambda text: None)._clean_up()
    assert len(refused) == 1
    supervisor.Supervisor(settings, lambda text: None)._clean_up()  # the port is free again


def test_the_port_of_another_server_is_not_shared() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        settings = Settings(port=sock.getsockname()[1], front_ends=2)
    kept = supervisor.Supervisor(settings, lambda text: None)
    with pytest.raises(DefinitionError, match="cannot listen at"):
        supervisor.Supervisor(settings, lambda text: None)
    kept._clean_up()
    supervisor.Supervisor(settings, lambda text: None)._clean_up()  # the port is free again


def test_a_front_end_that_cannot_start_is_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(process=SimpleNamespace(poll=lambda: None, pid=1), wait=lambda: None, end=lambda: None)
    monkeypatch.setattr(supervisor, "start_engine", lambda settings: engine)
    monkeypatch.setattr(supervisor, "COMMAND", "raise SystemExit(3)")
    monkeypatch.setattr(supervisor, "MIN_LIFE_S", 1e-3)  # Python's own start takes longer
    made = supervisor.Supervisor(Settings(port=0, drain_s=0), lambda text: None)
    given_up = threading.Timer(20.0, made.end)
    given_up.start()
    with pytest.raises(DefinitionError, match="front end 0 does not start"):
        made.run()
    given_up.cancel()


class Engine:
    """In place of an engine's process: one that is there at once and dies, or one that loads for a minute."""

    def __init__(self, seconds: float) -> None:
        self._is_quick = seconds < 1
        self.process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])

    def wait(self) -> None:
        if not self._is_quick:
            self.process.wait(20.0)
            raise DeviceError("the engine's process ended at its start")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("engines", [[60], [0, 60]], ids=["first", "successor"])
def test_a_server_that_is_told_to_end_while_its_engine_loads_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, engines: list[int]
) -> None:
    seconds, told = iter(engines), len(engines)
    made = supervisor.Supervisor(Settings(port=0, drain_s=5), lambda text: None)

    def start(settings: Settings) -> Engine:
        engine = Engine(next(seconds))
        nonlocal told
        told -= 1
        if not told:
            threading.Timer(0.5, made.end).start()
        return engine

    monkeypatch.setattr(supervisor, "start_engine", start)
    monkeypatch.setattr(supervisor, "COMMAND", "import time; time.sleep(60)")  # a front end that does not hear yet
    begin_s = time.monotonic()
    assert made.run() == 0
    assert time.monotonic() - begin_s < 4.0


@pytest.mark.slow
def test_a_server_whose_model_cannot_be_registered_ends_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("import cellrt\nwrong = cellrt.unfold('wrong', example=0)(lambda graph, request: 1 / request)\n")
    output = serve(path, "--port", 0, "--device", "cpu:1", "--compile", "off", status=1)
    assert "model 'wrong': the unfolder raised ZeroDivisionError" in output and "serving at" not in output


def test_a_port_that_is_taken_is_said_in_a_line() -> None:
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
