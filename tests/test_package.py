"""The wheel and the sdist hold the whole package, symbolic links included, and the wheel works on its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("cells", "kernels", "unfolders")
BESIDE = ("CHANGELOG.md", "MANIFEST.in", "Makefile", "constraints.txt", "setup.py")
FOLDERS = ("benchmarks", "docs", "examples", "tests", "tools")
BUILT_FROM = ("LICENSE", "README.md", "pyproject.toml", "cellrt", *LINKED, *BESIDE, *FOLDERS)
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "*.nbi", "*.nbc")


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist of a copy of the tree, and a wheel made from that sdist."""
    source = copied_into(tmp_path_factory.mktemp("source"))
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source), cwd=dist)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return Built(wheel, sdist)


def copied_into(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=LEFT_OUT)
        elif name not in LINKED:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(*command: str, cwd: Path, timeout_s: float = 110, **variables: str) -> str:
    """Run a command that must succeed; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def source_modules() -> set[str]:
    """Every Python file under cellrt/, links followed, as a path from the repository's root."""
    return {
        (Path(folder) / name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / "cellrt", followlinks=True)
        for name in names
        if name.endswith(".py")
    }


@pytest.mark.skipif(not (ROOT / LINKED[0]).exists(), reason="an sdist has the folders themselves within cellrt")
@pytest.mark.parametrize("name", LINKED)
def test_folders_are_relative_links(name: str) -> None:
    assert os.readlink(ROOT / "cellrt" / name) == f"../{name}"


def test_wheel_holds_every_module(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == source_modules()
    assert "cellrt/py.typed" in names


def test_wheel_installs_only_the_package(built: Built, project: dict[str, Any]) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"cellrt", f"cellrt-{project['version']}.dist-info"}


def test_wheel_metadata(built: Built, project: dict[str, Any]) -> None:
    info = f"cellrt-{project['version']}.dist-info"
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert "cellrt = cellrt.cli:main" in entry_points
    assert "Apache License" in licence


def test_sdist_holds_files_not_links(built: Built, project: dict[str, Any]) -> None:
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    files = {member.name for member in members if member.isfile()}
    prefix = f"cellrt-{project['version']}"
    expected = source_modules() | {"LICENSE", "README.md", "pyproject.toml", "cellrt/py.typed"}
    assert {f"{prefix}/{name}" for name in expected} <= files


def test_sdist_holds_what_a_packager_tests_and_documents_with(built: Built, project: dict[str, Any]) -> None:
    prefix = f"cellrt-{project['version']}"
    with tarfile.open(built.sdist) as archive:
        files = {member.name.removeprefix(f"{prefix}/") for member in archive.getmembers() if member.isfile()}
    patterns = (
        "tests/**/*.py",
        "tests/**/*.ini",
        "examples/*.py",
        "benchmarks/**/*.py",
        "benchmarks/data/*",
        "docs/**/*.md",
    )
    expected = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    assert expected | set(BESIDE) <= files
    assert not [name for name in files if name.endswith((".pyc", ".nbi", ".nbc")) or name.startswith("data/")]


def test_changelog_has_this_version(project: dict[str, Any]) -> None:
    assert f"\n## {project['version']} " in (ROOT / "CHANGELOG.md").read_text()


def installed(wheel: Path, environment: Path) -> str:
    """Install a wheel into a new environment that has all else from this one; return its Python."""
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=environment)
    # The dependencies come from this environment, after the new one; a path in a .pth file does not bring
    # along the .pth files found there, so an editable cellrt stays out.
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(built: Built, tmp_path: Path) -> None:
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = installed(built.wheel, environment)

    names = ", ".join(["cellrt", "cellrt.cli", *(f"cellrt.{name}" for name in LINKED)])
    printed = run(python, "-c", f"import {names}; print(cellrt.__file__)", cwd=elsewhere)
    assert Path(printed.strip()).is_relative_to(environment)
    assert "demo" in run(str(environment / "bin" / "cellrt"), "--help", cwd=elsewhere)


FIRST_ENGINE = """
import os
from numba.core import event

compiled = []


class Watch(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].py_func.__qualname__)

    def on_end(self, event):
        pass


event.register("numba:compile", Watch())
import torch
import cellrt

lstm = cellrt.cell(cellrt.cells.LSTMCell(5, 7), {"x": (5,), "h": (7,), "c": (7,)})
with cellrt.Engine() as engine:
    engine.register(cellrt.Unfolder("lstm", lambda graph, x: {"h": graph.chain(lstm, x=x).last.h}, torch.zeros(3, 5)))
    assert engine.submit("lstm", torch.zeros(3, 5)).result()["h"].shape == (7,)
times = os.times()
print(times.user + times.system)
print(*compiled)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_engine_of_a_wheel_that_brings_what_is_compiled_compiles_nothing(tmp_path: Path) -> None:
    source, dist, home = copied_into(tmp_path / "source"), tmp_path / "dist", tmp_path / "home"
    home.mkdir()
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(source))
    run(*build, cwd=tmp_path, timeout_s=800, CELLRT_COMPILED_WHEEL="1")
    (wheel,) = dist.glob("*.whl")
    tag, machine = f"cp{sys.version_info.major}{sys.version_info.minor}", sysconfig.get_platform().replace("-", "_")
    assert wheel.name.endswith(f"-{tag}-{tag}-{machine}.whl")
    shutil.rmtree(source)

    python = installed(wheel, tmp_path / "environment")
    for folder, _, _ in os.walk(tmp_path / "environment"):
        os.chmod(folder, 0o555)
    try:
        printed = run(python, "-c", FIRST_ENGINE, cwd=home, HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    finally:
        for folder, _, _ in os.walk(tmp_path / "environment"):
            os.chmod(folder, 0o755)
    seconds, *compiled = printed.split()
    assert not compiled
    assert float(seconds) < 15, "of processor time, of which most is for imports"
