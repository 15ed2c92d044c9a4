"""The commands about costs, run as a user does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cellrt.cli import app
from cellrt.cli.models import read_lines
from cellrt.errors import DefinitionError

MODEL = "tests.serve.models:chain"


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


def test_check_reports_cells_graph_and_cost() -> None:
    report = json.loads(run("check", MODEL, "--json"))
    assert report["model"] == "chain" and report["nodes"] == 2 and report["faults"] == []
    assert [cell["name"] for cell in report["cells"]] == ["step"]
    assert report["results"] == {"every": [2, 2], "last": [2]} and report["lone_ms"] > 0
    assert "step" in run("check", MODEL)


def test_check_says_what_to_install_where_a_server_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cellrt.serve.described", None)
    assert "pip install '.[serve]' in a clone" in run("check", MODEL, status=1)


@pytest.mark.slow
def test_check_says_that_a_server_compiles_what_it_does_not(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(
        "import torch, cellrt\n"
        "torch.manual_seed(0)\n"
        "plain = cellrt.cell(torch.nn.Linear(4, 4), {'input': 4}, name='plain')\n"
        "@cellrt.unfold('model', example=torch.zeros(4))\n"
        "def model(graph, x): return {'y': plain(input=x).output}\n"
    )
    (cell,) = json.loads(run("check", path, "--json"))["cells"]
    assert (
        cell["form"] == "compiled forms were not looked for (see --compile); cellrt serve makes them in the background"
    )


def test_check_fails_for_a_cell_whose_rows_influence_each_other(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(
        "import torch, cellrt\n"
        "mix = cellrt.cell(lambda x: {'y': x - x.mean(0)}, {'x': (2,)}, name='mix')\n"
        "mixed = cellrt.unfold('mixed', example=torch.ones(2))(lambda graph, x: {'y': mix(x=x)})\n"
    )
    assert "cell 'mix', output 'y': the rows of a batch influence each other" in run("check", path, status=1)


@pytest.mark.parametrize(("model", "why"), [("unsigned", "uint16"), ("unlike", "a and b must be as long")])
@pytest.mark.slow
def test_check_fails_for_a_model_that_no_server_can_describe(model: str, why: str) -> None:
    said = run("check", f"tests.serve.odd_models:{model}", status=1)
    assert f"model {model!r} cannot be served" in said and why in said


@pytest.mark.parametrize(("seed", "status"), [("", 1), ("torch.manual_seed(3)", 0)])
@pytest.mark.slow
def test_check_fails_for_weights_that_each_process_draws_anew(tmp_path: Path, seed: str, status: int) -> None:
    path = tmp_path / "drawn.py"
    path.write_text(
        f"import torch, cellrt\n{seed}\n"
        "same = cellrt.cell(lambda y: {'z': y + 1}, {'y': (2,)}, name='same')\n"
        "def drawn():\n"
        "    drawn = cellrt.cell(torch.nn.Linear(2, 2), {'input': (2,)}, name='drawn')\n"
        "    @cellrt.unfold('drawn', example=torch.ones(2))\n"
        "    def made(graph, x):\n"
        "        return {'y': same(y=drawn(input=x).output).z}\n"
        "    return made\n"
    )
    said = run("check", f"{path}:drawn", status=status)
    assert ("drawn: another process makes it with other weights" in said) == bool(status)
    assert "same: another" not in said


@pytest.mark.parametrize("model", ["nonsense", "no.such:module", "no_such_file.py", "cellrt.errors:http_status"])
def test_a_model_that_is_none_is_said_in_a_line(model: str) -> None:
    assert len(run("check", model, status=1).strip().splitlines()) <= 2


def test_a_profile_is_tuned_and_played(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    pytest.importorskip("matplotlib")
    run("tune", MODEL, "--quick", "--out", profile, "--plot", tmp_path / "steps.svg")
    options = ["--profile", profile, "--count", 200, "--rate", 100, "--rate", 1000]
    outcomes = json.loads(run("simulate", MODEL, *options, "--json", "--plot", tmp_path / "load.svg"))
    assert [outcome["rate"] for outcome in outcomes] == [100, 1000]
    assert all(outcome["requests"] == 200 and outcome["p50_s"] <= outcome["p99_s"] for outcome in outcomes)
    assert (tmp_path / "steps.svg").stat().st_size and (tmp_path / "load.svg").stat().st_size
    requests = tmp_path / "requests.jsonl"
    requests.write_text("[[1, 2]]\n[[1, 2], [3, 4]]\n")
    found = run("simulate", MODEL, *options, "--requests", requests, "--p99-ms", 10_000, "--json")
    assert {outcome["workers"] for outcome in json.loads(found)} == {1}
    how = ["--policy", "deadline-aware-utility", "--deadline-ms", 10_000]
    assert {each["in_time"] for each in json.loads(run("simulate", MODEL, *options, *how, "--json"))} == {1.0}
    assert "in time" in run("simulate", MODEL, *options, *how, "--schedule-by-ms", 10_000)
    assert "ms is kept by" in run("simulate", MODEL, *options, "--in-time", 0.99)
    assert "give it without --deadline-ms" in run("simulate", MODEL, *options, *how, "--in-time", 0.99, status=1)
    told = run("simulate", MODEL, *options, "--schedule-by-ms", 0.001, "--in-time", 0.99, status=1)
    assert "no deadline is kept by 0.99 of the requests at 100 requests/s" in told
    assert "got 'luck'" in run("simulate", MODEL, *options, "--policy", "luck", status=1)
    said = run("simulate", MODEL, *options, "--p99-ms", 10_000)
    assert "1 worker keeps the p99 below 10000 ms at 100 requests/s" in said
    written = json.loads(profile.read_text())
    assert set(written.pop("host")) == {"request_s", "task_s", "page_s"}
    profile.write_text(json.dumps(written))
    said = run("simulate", MODEL, *options, "--p99-ms", 0.001, status=1)
    assert "profile.json is older than the costs of the engine's host" in said
    assert all(f"too few for a p99 of 0.001 ms at {rate} requests/s" in said for rate in (100, 1000))


@pytest.mark.parametrize("arguments", [("--out", "nowhere/a.json"), ("--plot", "nowhere/a.svg"), ("--plot", "a.txt")])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(arguments: tuple[str, str]) -> None:
    output = run("tune", MODEL, *arguments, status=1)
    assert "measured" not in output and ("no folder nowhere" in output or "--plot: expected a file name" in output)


@pytest.mark.parametrize("command", [("check",), ("serve", "--port", "0")])
@pytest.mark.parametrize("attribute", ["", ":made"])
@pytest.mark.slow
def test_a_file_that_ends_its_process_is_told_by_name(tmp_path: Path, command: tuple[str, ...], attribute: str) -> None:
    path = tmp_path / "ends.py"
    path.write_text("raise SystemExit(3)\n")
    output = run(*command, f"{path}{attribute}", status=1)
    assert "ends.py" in output and "SystemExit: 3" in output


@pytest.mark.slow
def test_a_cell_that_raises_for_many_rows_is_told_by_name_when_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "few.py"
    path.write_text(
        "import cellrt, torch\n"
        "def few(x):\n"
        "    if len(x) > 4: raise ValueError('no more than 4')\n"
        "    return {'y': x}\n"
        "few = cellrt.cell(few, {'x': (2,)}, name='few')\n"
        "model = cellrt.unfold('model', example=torch.ones(2))(lambda graph, x: {'y': few(x=x)})\n"
    )
    assert "'few' raised with 512 rows: ValueError: no more than 4" in run("check", f"{path}:model", status=1)
    told = run("tune", f"{path}:model", "--quick", "--out", tmp_path / "few.json", status=1)
    assert "'few' raised with 8 rows: ValueError: no more than 4" in told and "Traceback" not in told


def test_a_line_that_is_no_json_is_told_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('"a\u2028b"\n\n{"request": 1\n', encoding="utf-8")
    with pytest.raises(DefinitionError, match=r"requests.jsonl, line 3: Expecting ',' delimiter at character 14"):
        read_lines(path)
    path.write_text('"a\u2028b"\n', encoding="utf-8")
    assert list(read_lines(path).values()) == ["a\u2028b"]


def test_a_file_with_several_models_says_which(tmp_path: Path) -> None:
    path = tmp_path / "several.py"
    one = "{0} = cellrt.unfold('{0}', example=1)(lambda graph, n: {{}})\n"
    path.write_text("import cellrt\n" + one.format("first") + one.format("second"))
    assert "['first', 'second']" in run("check", path, status=1)


@pytest.mark.slow
def test_check_says_what_a_request_takes_and_how_many_fit() -> None:
    room = json.loads(run("check", MODEL, "--json", "--arena-bytes", "4096"))["room"]
    (kind,) = room["kinds"]
    assert kind["kind"] == "float32[2]" and kind["pages"] == 0
    assert kind["bytes_at_worker"] == 8 * kind["rows_at_worker"] and kind["bytes_at_host"] == 8 * kind["rows_at_host"]
    assert room["fit"] == room["fit_at_worker"] == min(512 // kind["rows_at_worker"], 2048 // kind["rows_at_host"])
    assert room["first_full"] == "float32[2]: Engine(arena_bytes=...)"
    assert "has room for" in run("check", MODEL)


@pytest.mark.slow
def test_check_says_how_many_have_their_pages_at_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "grown.py"
    path.write_text(
        "import torch, cellrt\n"
        "def append(x, total):\n    total.append(x)\n    return {'y': x + 1}\n"
        "made = cellrt.cell(append, {'x': (2,), 'total': cellrt.grows(2, page_size=4)}, name='append')\n"
        "@cellrt.unfold('grown', example=torch.zeros(10, 2))\n"
        "def grown(graph, x): return {'y': graph.chain(made, x=x, total=graph.pages(made)).y}\n"
    )
    room = json.loads(run("check", path, "--json", "--page-bytes", "3200"))["room"]
    pages = next(kind for kind in room["kinds"] if kind["pages"])
    assert pages["pages"] == 3 and pages["bytes_at_worker"] == 3 * 32
    assert (room["fit"], room["fit_at_worker"]) == (500 // 3, 100 // 3)
    assert room["first_full"].endswith("Engine(page_bytes=...)")
