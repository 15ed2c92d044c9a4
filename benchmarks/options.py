"""What a benchmark is told on the command line, and the form that each has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.record import Recorder

TREEBANK = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "sst_train.txt"


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        quick: a short run.
        plot: where to draw the figure, if anywhere.
        only: the parts to run; empty means all of them.
        hidden: the hidden sizes; empty means the benchmark's own choice.
        treebank: file of Penn brackets with the trees to serve.
    """

    quick: bool = False
    plot: Path | None = None
    only: tuple[str, ...] = ()
    hidden: tuple[int, ...] = ()
    treebank: Path = TREEBANK

    def has(self, part: str) -> bool:
        """Whether this part is to run."""
        return not self.only or part in self.only

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Those asked for; by default 256, and 1024 in the full run."""
        return self.hidden or ((256,) if self.quick else (256, 1024))


class Benchmark(Protocol):
    """What a module needs in order to be a benchmark."""

    PARTS: tuple[str, ...]
    """The names that ``--only`` takes."""

    def run(self, recorder: Recorder, options: Options) -> None:
        """Measure and add rows to the recorder."""
