"""A program without a main guard starts no processes without end, and what a killed program started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cellrt.errors import DefinitionError
from cellrt.process.engine_process import EngineProcess
from cellrt.process.model_names import source_of
from cellrt.process.source import ModelSource
from tests.serve.helpers import ROOT
from tests.waiting import is_running, until

LEVELS = """import os
level = int(os.environ.get("UNGUARDED_LEVEL", "0"))
os.environ["UNGUARDED_LEVEL"] = str(level + 1)
if level > 4:
    os._exit(3)  # it would go on so without end
print("imported in process", os.getpid(), flush=True)  # one that refuses a cell may try it again
"""
MODEL = """import cellrt, torch
def grown(x, h):
    return {"h": x + h}
CELL = cellrt.cell(grown, {"x": (1,), "h": (1,)}, name="grown")
@cellrt.unfold("grown", example=torch.zeros(1, 1))
def unfolded(graph, x):
    return {"h": graph.chain(CELL, x=x).last.h}
"""
USES = """
    engine.register({what})
    print("computed", engine.submit("grown", torch.ones(2, 1)).result(60)["h"].tolist())
"""
IN_A_PROCESS = "with cellrt.EngineProcess(1) as engine:" + USES.format(what='__file__ + ":unfolded"')


def run_program(folder: Path, content: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What comes of a file ``unguarded.py``."""
    (folder / "unguarded.py").write_text(content)
    command = [sys.executable, *words]
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, env={**os.environ, **path})


def levels(ended: subprocess.CompletedProcess[str]) -> int:
    return len({line for line in ended.stdout.splitlines() if line.startswith("imported")})


def test_a_program_without_a_main_guard_is_told_of_it_by_the_first_process_that_imports_it(tmp_path: Path) -> None:
    ended = run_program(tmp_path, LEVELS + MODEL + IN_A_PROCESS, "unguarded.py")
    assert levels(ended) == 2, ended.stdout + ended.stderr
    last = ended.stderr.splitlines()[-1] if ended.stderr else ""
    assert 'under `if __name__ == "__main__":`' in ended.stderr and ended.returncode == 1, ended.stderr
    assert "computed" not in ended.stdout and "is gone" not in last


@pytest.mark.slow
def test_a_model_whose_file_starts_an_engine_is_refused_wherever_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text(MODEL + IN_A_PROCESS)
    for load in (source_of, lambda text: ModelSource(f"{text}:unfolded").load()):
        with pytest.raises(DefinitionError, match="main guard"):
            load(str(tmp_path / "unguarded.py"))


@pytest.mark.slow
def test_an_engine_may_start_again_after_a_model_was_refused(tmp_path: Path) -> None:
    (tmp_path / "guarded.py").write_text(MODEL)
    (tmp_path / "unguarded.py").write_text(MODEL + IN_A_PROCESS)
    with EngineProcess(1) as engine:
        with pytest.raises(DefinitionError, match="main guard"):
            engine.register(f"{tmp_path / 'unguarded.py'}:unfolded")
        engine.register(f"{tmp_path / 'guarded.py'}:unfolded")


LOADING = """import os, pathlib, threading
pathlib.Path(os.environ["LOADING_FILE"]).write_text(str(os.getpid()))
threading.Event().wait(100)
"""
BY_A_CLIENT = "from cellrt import EngineProcess\nEngineProcess(1).register({!r})"
AT_THE_START = (
    "from cellrt.process.starting import Started\n"
    "Started('@cellrt-test-loading', {{'workers': 1}}, [({!r}, {{}})]).wait()"
)

BY_A_CHECK = "from cellrt.planning.elsewhere import cells_elsewhere\ncells_elsewhere({!r})"


@pytest.mark.parametrize(
    "program", [BY_A_CLIENT, AT_THE_START, BY_A_CHECK], ids=["by a client", "at the start", "by a check"]
)
@pytest.mark.slow
def test_a_process_that_loads_a_model_ends_with_whoever_started_it(tmp_path: Path, program: str) -> None:
    model, loading = tmp_path / "slow.py", tmp_path / "loading"
    model.write_text(LOADING)
    starter = subprocess.Popen(
        [sys.executable, "-c", program.format(f"{model}:any")],
        cwd=ROOT,
        env={**os.environ, "LOADING_FILE": str(loading)},
    )
    try:
        until(lambda: loading.exists() and loading.read_text(), "the model is being loaded")
    finally:
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
    until(lambda: not is_running(int(loading.read_text())), "the other process ends", 20)
