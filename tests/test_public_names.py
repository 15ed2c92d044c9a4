"""What ``import cellrt`` offers: every public name and nothing else, before and after it is first used."""

import subprocess
import sys
from pathlib import Path

import cellrt

ROOT = Path(__file__).resolve().parent.parent
SHELVES = {"cells", "kernels", "unfolders"}


def test_every_public_name_is_there() -> None:
    for name in cellrt.__all__:
        value = getattr(cellrt, name)
        home = getattr(value, "__module__", "cellrt.")
        assert home.startswith("cellrt."), name
    assert sorted(cellrt.__all__) == cellrt.__all__


def test_dir_shows_the_public_names_of_a_fresh_process() -> None:
    command = "import cellrt; print(*dir(cellrt)); cellrt.Engine; cellrt.cells; print(*dir(cellrt))"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    before, after = done.stdout.splitlines()
    assert set(before.split()) == {*cellrt.__all__, *SHELVES, "__version__"}
    assert after == before
