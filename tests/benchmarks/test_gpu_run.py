"""The runs on a GPU, with stubs for their parts: each part has its time, and what it gave is there when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from benchmarks import gpu_run
from benchmarks.gpu_parts import FIRST, FIRST_S, SECOND, SETS, THIRD, Part
from benchmarks.gpu_run import Run, folder_of, main

ROOT = Path(__file__).resolve().parents[2]


def says(text: str, code: int = 0) -> tuple[str, ...]:
    return ("{python}", "-c", f"import sys; print({text!r}, flush=True); sys.exit({code})")


def run(out: Path, *parts: Part, commit: str = "abc", most_s: float = 60.0, is_dry: bool = False) -> int:
    return Run("first", out, commit, most_s, is_dry).run(parts)


def rows(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "first.jsonl").read_text().splitlines()]


def statuses(out: Path) -> list[tuple[object, object]]:
    return [(row["part"], row["status"]) for row in rows(out)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody waited for does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_part_gave_is_written_when_it_ends(tmp_path: Path) -> None:
    look = f"import pathlib; print(pathlib.Path({str(tmp_path)!r}, 'first.jsonl').read_text())"
    assert run(tmp_path, Part("one", 20, (says("here I am"),)), Part("two", 20, (("{python}", "-c", look),))) == 0
    first, second = rows(tmp_path)
    assert (first["part"], first["status"], first["codes"], first["commit"]) == ("one", "passed", [0], "abc")
    assert "here I am" in first["tail"]
    assert "here I am" in second["tail"] and "here I am" in (tmp_path / "first.log").read_text()


def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    assert run(tmp_path, Part("bad", 20, (says("a", 3), says("b"))), Part("good", 20, (says("c"),))) == 1
    assert statuses(tmp_path) == [("bad", "failed"), ("good", "passed")]
    assert rows(tmp_path)[0]["codes"] == [3, 0]


@pytest.mark.slow
def test_after_its_time_nothing_of_a_part_is_left(tmp_path: Path) -> None:
    """Neither a child nor what ignores an interrupt."""
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    start = time.monotonic()
    assert run(tmp_path, Part("hangs", 3, (("{python}", "-c", program),)), Part("next", 20, (says("on"),))) == 1
    assert time.monotonic() - start < 40
    assert statuses(tmp_path) == [("hangs", "out of time"), ("next", "passed")]
    pids = [int(word) for word in str(rows(tmp_path)[0]["tail"]).split()]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["in front", "in the background"])
@pytest.mark.slow
def test_a_part_that_is_interrupted_writes_what_it_has(tmp_path: Path, handler: Any) -> None:
    program = "import time\ntry: print('go', flush=True), time.sleep(600)\nfinally: print('written', flush=True)"
    before = signal.signal(signal.SIGINT, handler)  # that of what a shell runs
    try:
        assert run(tmp_path, Part("slow", 2, (("{python}", "-c", program),))) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert "written" in str(rows(tmp_path)[0]["tail"])


def test_commands_of_a_part_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other's file."""
    wait = (
        "import pathlib, sys, time\n"
        "mine, other = (pathlib.Path(sys.argv[1], name) for name in sys.argv[2:])\n"
        "mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
    )
    both = [("{python}", "-c", wait, str(tmp_path), *names) for names in (("a", "b"), ("b", "a"))]
    assert run(tmp_path, Part("both", 30, tuple(both))) == 0


def test_a_run_goes_on_behind_what_this_commit_passed(tmp_path: Path) -> None:
    good, bad = Part("good", 20, (says("good"),)), Part("bad", 20, (says("bad", 1),))
    run(tmp_path, good, bad)
    assert run(tmp_path, good, bad) == 1
    assert statuses(tmp_path) == [("good", "passed"), ("bad", "failed"), ("bad", "failed")]
    run(tmp_path, good, commit="def")
    assert statuses(tmp_path)[-1] == ("good", "passed")
    assert len(rows(tmp_path)) == 4


def test_a_part_without_time_is_left_for_another_run(tmp_path: Path) -> None:
    assert run(tmp_path, Part("late", 20, (says("late"),)), most_s=5.0) == 3
    assert statuses(tmp_path) == [("late", "left for another run")]
    assert run(tmp_path, Part("late", 20, (says("late"),))) == 0


def test_without_a_gpu_parts_run_dry_or_say_what_they_need(tmp_path: Path) -> None:
    parts = Part("tests", 20, (says("wet"),)), Part("both", 20, (says("wet"),), dry=(says("dry"),))
    assert run(tmp_path, *parts, is_dry=True) == 0
    assert statuses(tmp_path) == [("tests", "needs a GPU"), ("both", "passed")]
    assert "wet" not in (tmp_path / "first.log").read_text()
    assert run(tmp_path, Part("checked", 20, (says("x"),), program="no-such-program")) == 0
    assert statuses(tmp_path)[-1] == ("checked", "needs no-such-program")


def test_variables_of_a_part_reach_it(tmp_path: Path) -> None:
    shows = ("{python}", "-c", "import os; print('lasts', os.environ['CELLRT_SOAK_S'])")
    run(tmp_path, Part("soak", 20, (shows,), environment=(("CELLRT_SOAK_S", "42"),)))
    assert "lasts 42" in str(rows(tmp_path)[0]["tail"])


def test_the_first_set_fits_into_nine_minutes() -> None:
    assert sum(part.limit_s for part in FIRST) <= FIRST_S <= 540
    names = [part.name for part in (*FIRST, *SECOND, *THIRD)]
    assert len(set(names)) == len(names)


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_run, "find_gpu", lambda: None)
    assert main(["first"]) == 2
    assert "there is no GPU" in capsys.readouterr().err


def test_results_of_a_device_have_a_folder() -> None:
    assert folder_of("NVIDIA H200") == ROOT / "benchmarks" / "results" / "nvidia-h200"


def words_after(command: tuple[str, ...], option: str) -> str:
    return command[command.index(option) + 1] if option in command else ""


def is_test(word: str) -> bool:
    return word.startswith("tests/") and not word.endswith(".ini")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_of_tests_has_some() -> None:
    """With the tests that are collected from its files, as pytest matches its expression."""
    commands = {each for part in (*FIRST, *SECOND, *THIRD) for each in part.commands if "pytest" in each}
    files = sorted({word for command in commands for word in command if is_test(word)})
    collect = [sys.executable, "-m", "pytest", "-c", "tests/gpu/bare.ini", "--rootdir", ".", "--collect-only", "-q"]
    found = subprocess.run([*collect, "-m", "gpu", *files], cwd=ROOT, capture_output=True, text=True, timeout=280)
    ids = [line for line in found.stdout.splitlines() if "::" in line]
    assert ids, found.stdout + found.stderr
    for command in commands:
        wanted = [word for word in command if is_test(word)]
        expression = words_after(command, "-k")
        mine = [each for each in ids if each.startswith(tuple(wanted))]
        if expression:
            match = Expression.compile(expression)
            mine = [each for each in mine if match.evaluate(lambda word, each=each, **_: word in each.lower())]
        assert mine, command


def test_the_standard_library_suffices_to_run_it(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_run", "third", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 0
    found = [json.loads(line) for line in (tmp_path / "third.jsonl").read_text().splitlines()]
    assert {row["status"] for row in found} == {"needs a GPU"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_sets_run_dry(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_run", "all", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=880)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, logs[-5000:]
    for name, parts in SETS.items():
        found = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [row["part"] for row in found] == [part.name for part in parts]
        assert {row["status"] for row in found} <= {"passed", "needs a GPU"}
