"""The options of a benchmark on the command line, and the interface that each benchmark has."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.record import Recorder
from examples.models.treebank import TRAIN, missing

TREEBANK_VARIABLE = "CELLRT_TREEBANK"
"""The environment variable that names the file of trees."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        quick: a short run.
        plot: where to draw the figure, if anywhere.
        only: the parts to run; empty means all of them.
        hidden: the hidden sizes; empty means the benchmark's own choice.
        treebank: file of Penn brackets with the trees to serve; None: trees are drawn.
        device: "cpu", "cuda" or "cuda:0", of benchmarks that run on either; None: a GPU if there is one.
        out: folder of the results of benchmarks that go on where they stopped; None: that of the machine.
        again: measure also what that folder has.
    """

    quick: bool = False
    plot: Path | None = None
    only: tuple[str, ...] = ()
    hidden: tuple[int, ...] = ()
    treebank: Path | None = None
    device: str | None = None
    out: Path | None = None
    again: bool = False

    def has(self, part: str) -> bool:
        """Return whether this part is to run."""
        return not self.only or part in self.only

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """The sizes that were asked for; by default 256, and 1024 in the full run."""
        return self.hidden or ((256,) if self.quick else (256, 1024))


def are_there(peer: str, *packages: str) -> bool:
    """Return whether a peer's packages are installed; if not, say on standard error how to get them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        tell(f"{peer} is left out: pip install {' '.join(missing)}")
    return not missing


def tell(text: str) -> None:
    """Say how far a benchmark is, on standard error: what it measured goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def find_treebank(given: Path | None = None) -> Path | None:
    """Return the file of trees: the one given, else that of the environment, else the repository's, if it is there.

    Raise FileNotFoundError, which says where to get the trees, if the file given or that of the environment is absent.
    """
    named = given or os.environ.get(TREEBANK_VARIABLE)
    if named is None:
        usual = Path(__file__).resolve().parent.parent / TRAIN
        return usual if usual.is_file() else None
    if what := missing(named):
        raise FileNotFoundError(what)
    return Path(named)


class Benchmark(Protocol):
    """The interface of a module that is a benchmark."""

    PARTS: tuple[str, ...]
    """The names that ``--only`` takes."""

    def run(self, recorder: Recorder, options: Options) -> None:
        """Measure and add rows to the recorder."""
