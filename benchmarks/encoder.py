"""Encoders under deadlines: layouts of a batch and orders of requests, as TCB compares them, beside cellrt.

Sentences of about 20 words arrive by a Poisson process, each with a time by which it must have begun, which is drawn;
what has not begun by then is dropped. A sentence is worth 1 by its length (TCB section 5.1). ``load`` is in parts of
what cellrt does at most, all having arrived before.

``minilm`` and ``t5``: encoders of these models' sizes, random weights. A loop takes what has arrived, in the order of a
policy, and computes one batch after the other: in every layout (``encoder_layouts.py``) by plain torch, and flat by our
cell ("cellrt"). All have one thread, whose processor time is the clock, the same weights, packed, and as many places in
a batch, ``PLACES``. (TCB's figures 9 to 12.)
``rows``: an engine with batches of other sizes (figure 15a). ``variance``: with other lengths (15b). ``slots``: plain
torch with more slots a row (figures 13 and 14). ``cost``: the time that a policy takes, by how many sentences wait,
beside a task's (figure 16).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.encoder_layouts import (
    LAYOUTS,
    LONGEST,
    PLACES,
    ROWS,
    CellEncoder,
    Lay,
    PlainEncoder,
    Row,
    lay_flat,
)
from benchmarks.gpu_plots import can_draw
from benchmarks.options import Options, tell
from benchmarks.record import Recorder
from benchmarks.timing import medians_us
from benchmarks.workloads import poisson_arrivals
from cellrt import Engine
from cellrt.cells.transformer_stack import StackSizes, TransformerStack, sentence_encoder
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.scheduling.policy import Policy
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.templates.program import NOTHING, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.definition.modes import torch_threads
from cellrt.errors import CellrtError
from cellrt.unfolders.attention import embed

MODELS = {
    "minilm": StackSizes(30_522, 512, 384, 1536, 6, 12, epsilon=1e-12, norms_first=True),
    "t5": StackSizes(32_128, 512, 512, 2048, 6, 8),
}
PARTS = (*MODELS, "rows", "variance", "slots", "cost")
NAMES = {
    "first-come-first-served": "first come",
    "shortest-job-first": "shortest",
    "earliest-deadline-first": "earliest deadline",
    "deadline-aware-utility": "DAS",
}
"""Policies, as the figures name them."""
ETA = Q = 0.5
VARIANCES = (20, 100)
LOADS = (0.7, 1.0, 1.4, 2.0)
PATIENCE = (0.5, 4.0)
"""By when a sentence must have begun, in batches' times from its arrival: drawn evenly between these."""
BATCHES, ROUNDS = 20, 1
"""How long each load lasts, in batches' times, and how often, with other sentences each time; the mean is shown."""
OURS = "cellrt"
Encoder = PlainEncoder | CellEncoder


@dataclass(frozen=True)
class Work:
    """Sentences that arrive: their tokens, when, by when each must have begun, in seconds from the start."""

    sentences: list[torch.Tensor]
    arrivals_s: list[float]
    begin_by_s: list[float]

    @property
    def lengths(self) -> list[int]:
        """In words."""
        return [len(sentence) for sentence in self.sentences]


@dataclass(frozen=True)
class Outcome:
    """Which sentences were done, whose task began in time, and how long it all took."""

    done: list[int]
    seconds: float


class Seen(NamedTuple):
    """What became of some work."""

    work: Work
    outcome: Outcome

    @property
    def utility(self) -> float:
        """What was done, by its worth, a second."""
        return sum(1 / len(self.work.sentences[k]) for k in self.outcome.done) / self.outcome.seconds

    @property
    def throughput(self) -> float:
        """Sentences a second."""
        return len(self.outcome.done) / self.outcome.seconds

    @property
    def in_time(self) -> float:
        """The share that began in time."""
        return len(self.outcome.done) / len(self.work.sentences)


def draw_lengths(count: int, variance: float, seed: int) -> NDArray[np.int64]:
    """Lengths ``[count]`` as TCB's: normal with a mean of 20, between 3 and 100."""
    drawn = np.random.default_rng(seed).normal(20, math.sqrt(variance), count)
    return np.clip(np.rint(drawn), 3, LONGEST).astype(np.int64)


def draw_work(rate: float, seconds: float, variance: float, batch_s: float, seed: int) -> Work:
    """So many sentences a second, for so long."""
    count = max(8, round(rate * seconds))
    draw, arrivals_s = np.random.default_rng(seed), poisson_arrivals(rate, count, seed)
    words = [torch.from_numpy(draw.integers(0, 30_000, size)) for size in draw_lengths(count, variance, seed)]
    begin_by_s = arrivals_s + draw.uniform(*PATIENCE, count) * batch_s
    return Work(words, arrivals_s.tolist(), begin_by_s.tolist())


def in_order(policy: str, waiting: Sequence[int], work: Work, lengths: Sequence[int]) -> list[int]:
    """What waits, in a policy's order; ``DAS`` as in ``core/scheduling/policies.py``, of one row of all places."""
    if policy == "first come":
        return list(waiting)
    if policy == "earliest deadline":
        return sorted(waiting, key=work.begin_by_s.__getitem__)
    shortest = sorted(waiting, key=lengths.__getitem__)
    if policy == "shortest" or sum(lengths[k] for k in waiting) <= PLACES:
        return shortest if policy == "shortest" else list(waiting)
    count = int((np.cumsum([lengths[k] for k in shortest]) <= PLACES).sum())
    first = shortest[: math.ceil(ETA * count)]
    least = Q * sum(1 / lengths[k] for k in first) / len(first)
    others = shortest[len(first) :]
    urgent = sorted((k for k in others if 1 / lengths[k] >= least), key=work.begin_by_s.__getitem__)
    return [*first, *urgent, *(k for k in others if 1 / lengths[k] < least)]


def run_loop(encoder: Encoder, lay: Lay, policy: str, work: Work) -> Outcome:
    """A loop that takes what has arrived, drops what is late and computes a batch of the rest, one after the other.

    Its clock is the processor's time of this thread, and where there is nothing to do the next arrival is now: what
    else the machine does is not counted.
    """
    waiting, done, sent, lengths = list[int](), list[int](), 0, work.lengths
    now = 0.0
    while sent < len(lengths) or waiting:
        start = time.thread_time()
        while sent < len(lengths) and work.arrivals_s[sent] <= now:
            waiting.append(sent)
            sent += 1
        waiting = [k for k in waiting if work.begin_by_s[k] >= now]
        if not waiting:
            now = max(now, work.arrivals_s[sent]) if sent < len(lengths) else now
            continue
        rows, _ = lay(in_order(policy, waiting, work, lengths), lengths)
        done += encoder(rows, work.sentences)
        begun = {one for row in rows for one in row}
        waiting = [k for k in waiting if k not in begun]
        now += time.thread_time() - start
    return Outcome(done, now)


def run_engine(engine: Engine, work: Work) -> Outcome:
    """The same by an engine, to which each sentence is handed in when it arrives."""
    futures = []
    start = time.perf_counter()
    for sentence, arrival_s, begin_by_s in zip(work.sentences, work.arrivals_s, work.begin_by_s):
        time.sleep(max(0.0, start + arrival_s - time.perf_counter()))
        left_s = max(1e-6, start + begin_by_s - time.perf_counter())
        futures.append(engine.submit("encoder", sentence, schedule_by=left_s))
    engine.drain(60)
    seconds = time.perf_counter() - start
    return Outcome([k for k, future in enumerate(futures) if future.exception(60) is None], seconds)


def make_engine(stack: TransformerStack, policy: str, places: int = PLACES) -> Engine:
    """An engine with one worker, one task at a time, and a policy that nothing bounds."""
    made: Policy = replace(POLICIES[policy], is_bounded=False)
    settings = SchedulerSettings(max_tasks_to_submit=1, max_wait_s=math.inf, gather=False, large_batches=False)
    engine = Engine(1, policy=made, settings=settings, queue_depth=1)
    engine.register(embed("encoder", sentence_encoder(stack, max_batch=places // 3, max_batch_rows=places)))
    return engine


def peak_of(engine: Engine, variance: float, count: int) -> float:
    """Sentences a second where all have arrived before."""
    work = draw_work(1.0, count, variance, 1.0, seed=7)
    engine.submit_many("encoder", work.sentences[:20]).results()
    start = time.perf_counter()
    engine.submit_many("encoder", work.sentences).results()
    return count / (time.perf_counter() - start)


def check_answers(encoders: dict[str, Encoder]) -> None:
    """Every layout gives what our cell gives. Raises AssertionError."""
    work = draw_work(1.0, 12, 100, 1.0, seed=3)
    expected = encoders[OURS]([list(range(12))], work.sentences)
    for name, lay in LAYOUTS.items():
        rows, _ = lay(list(range(12)), work.lengths)
        for k, found in encoders[name](rows, work.sentences).items():
            if not torch.allclose(found, expected[k], rtol=1e-3, atol=1e-4):
                raise AssertionError(f"{name}: sentence {k} is another than our cell's")


def compare(recorder: Recorder, model: str, options: Options) -> None:
    """All pairs of layouts and policies, under every load."""
    stack = TransformerStack(MODELS[model]).eval().requires_grad_(False)
    plain, lays = PlainEncoder(stack), {**LAYOUTS, OURS: lay_flat}
    encoders: dict[str, Encoder] = dict.fromkeys(LAYOUTS, plain)
    encoders[OURS] = CellEncoder(sentence_encoder(stack, max_batch=PLACES // 3, max_batch_rows=PLACES))
    check_answers(encoders)
    for variance in VARIANCES if model == "minilm" and not options.quick else VARIANCES[:1]:
        case = f"{model}, variance {variance}"
        full = draw_work(1e6, 1e-4 if options.quick else 4e-4, variance, 1e9, seed=7)  # all there before
        at_most = run_loop(encoders[OURS], lay_flat, "first come", full)
        peak = len(at_most.done) / at_most.seconds
        batch_s = PLACES / 20 / peak
        recorder.add(case, "most at once", peak, "sentences/s", batch_ms=1e3 * batch_s)
        for load in LOADS[2:3] if options.quick else LOADS:
            seconds = batch_s * (6 if options.quick else BATCHES)
            rounds = [
                draw_work(load * peak, seconds, variance, batch_s, seed=round(100 * load) + number)
                for number in range(1 if options.quick else ROUNDS)
            ]
            for policy in NAMES.values():
                for layout, encoder in encoders.items():
                    found = [Seen(work, run_loop(encoder, lays[layout], policy, work)) for work in rounds]
                    _record(recorder, case, layout, policy, load, found)
                tell(f"{case}: load {load}, {policy}")


def _record(recorder: Recorder, case: str, layout: str, policy: str, load: float, found: Sequence[Seen]) -> None:
    which: dict[str, Any] = {"layout": layout, "policy": policy, "load": load}
    recorder.add(case, "utility", float(np.mean([seen.utility for seen in found])), "1/s", **which)
    recorder.add(case, "throughput", float(np.mean([seen.throughput for seen in found])), "sentences/s", **which)
    recorder.add(case, "begun in time", 100 * float(np.mean([seen.in_time for seen in found])), "%", **which)


def compare_sizes(recorder: Recorder, options: Options, part: str) -> None:
    """cellrt under each policy with batches of other sizes, or lengths of other variances, at 1.6 times its peak."""
    stack, load = TransformerStack(MODELS["minilm"]).eval().requires_grad_(False), 1.6
    for each in (2, ROWS, 8) if part == "rows" else (1, 20, 100, 400):
        places, variance = (each * LONGEST, 20) if part == "rows" else (PLACES, each)
        engines = {policy: make_engine(stack, policy, places) for policy in NAMES}
        try:
            peak = peak_of(engines["first-come-first-served"], variance, 100 if options.quick else 400)
            batch_s = places / 20 / peak
            seconds, seeds = batch_s * (6 if options.quick else BATCHES), range(1 if options.quick else ROUNDS)
            rounds = [draw_work(load * peak, seconds, variance, batch_s, each + seed) for seed in seeds]
            for policy, engine in engines.items():
                found = [Seen(work, run_engine(engine, work)) for work in rounds]
                _record(recorder, f"{part}: {each}", OURS, NAMES[policy], load, found)
        finally:
            for engine in engines.values():
                engine.close()


def compare_slots(recorder: Recorder, options: Options) -> None:
    """A batch of 10 and of 32 rows of 400 words, in sentences of 20, with more and more slots."""
    stack = TransformerStack(MODELS["minilm"]).eval().requires_grad_(False)
    encoder = PlainEncoder(stack)
    for rows in (10,) if options.quick else (10, 32):
        sentences = [torch.randint(0, 30_000, (20,)) for _ in range(20 * rows)]
        calls: dict[str, Callable[[], object]] = {}
        for slots in (1, 2, 4, 5, 10, 20):
            size = 20 // slots
            laid = [Row(range(first, first + size)) for first in range(0, len(sentences), size)]
            calls[str(slots)] = partial(encoder, laid, sentences)
        times = medians_us(calls, 1 if options.quick else 8)
        for name, us in times.items():
            recorder.add(f"slots, {rows} rows of 400", "speedup", times["1"] / us, "times", slots=int(name))


def measure_cost(recorder: Recorder, options: Options) -> None:
    """What forming a task takes under each policy with so many sentences waiting, and what the policy adds to a task
    of MiniLM's."""
    stack = TransformerStack(MODELS["minilm"]).eval().requires_grad_(False)
    work = draw_work(1.0, PLACES // 20, 20, 1.0, seed=5)
    encoder, rows = PlainEncoder(stack), [list(range(len(work.sentences)))]
    task_us = medians_us({"task": partial(encoder, rows, work.sentences)}, 1 if options.quick else 5)["task"]
    recorder.add("cost", "a task", task_us / 1e3, "ms")
    for waiting in (100, 1000) if options.quick else (100, 1000, 4000, 16_000):
        found = {policy: forming_us(policy, waiting) for policy in POLICIES}
        for policy, us in found.items():
            more = us - found["batchmaker"]
            recorder.add("cost", "forming a task", us, "us", policy=policy, waiting=waiting, share=more / task_us)


def forming_us(policy: str, waiting: int) -> float:
    """The median time that a task of so many places takes to be formed, where so many sentences wait."""
    limits = Limits(max_links=1 << 22, max_values=1 << 20, max_places=1 << 21)
    processor = Processor(
        1, limits, SchedulerSettings(max_tasks_to_submit=1), replace(POLICIES[policy], is_bounded=False)
    )
    processor.add_kind(2 * 32 * waiting, 2 * 32 * waiting)
    ports = [Port(0), Port(0, is_span=True)]
    cell = processor.add_type(ports, [Port(0)], max_batch=PLACES // 3, max_rows=PLACES, is_whole=True)
    now = time.perf_counter_ns()
    processor.clock.set(now)
    draw = np.random.default_rng(0)
    for number, length in enumerate(draw_lengths(waiting, 20, seed=1).tolist()):
        program = [OP_EXTERNAL, 0, length, OP_CHAIN, cell, length, STEP, 0, 1, NOTHING, 0, OP_RESULT, length, 1, length]
        template = processor.compile(np.array(program, np.int32))
        if processor.admit(template, number, schedule_by_ns=now + int(draw.uniform(1, 1e9))) is None:
            raise CellrtError(f"{number} of {waiting} sentences find no room")
    took = []
    for _ in range(max(2, min(40, waiting * 20 // PLACES // 2))):
        processor.clock.set(now)
        start = time.perf_counter()
        (task,) = processor.schedule(1)
        took.append(time.perf_counter() - start)
        for request, _ in processor.complete(task, 1000):
            processor.finish(np.array([request], np.int32))
    return float(np.median(took[1:])) * 1e6  # the first may have compiled the policy


def run(recorder: Recorder, options: Options) -> None:
    """Each part, on one thread."""
    with torch_threads(1), torch.inference_mode():
        for model in MODELS:
            if options.has(model):
                compare(recorder, model, options)
        for part in ("rows", "variance"):
            if options.has(part):
                compare_sizes(recorder, options, part)
        if options.has("slots"):
            compare_slots(recorder, options)
        if options.has("cost"):
            measure_cost(recorder, options)
    if options.plot is not None and can_draw():
        draw(recorder.rows, options.plot)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Utility against load, a panel for each policy and case; the last line of each is cellrt."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["metric"] == "utility" and row["case"].split(",")[0] in MODELS]
    cases = list(dict.fromkeys(row["case"] for row in shown))
    if not cases:
        return
    figure = Figure(figsize=(4 * len(NAMES), 3.5 * len(cases)), layout="constrained")
    axes = figure.subplots(len(cases), len(NAMES), squeeze=False, sharey="row")
    for its, case in zip(axes, cases):
        for ax, policy in zip(its, NAMES.values()):
            for layout in (*LAYOUTS, OURS):
                line = [row for row in shown if (row["case"], row["policy"], row["layout"]) == (case, policy, layout)]
                width = 2.5 if layout == OURS else 1
                ax.plot(
                    [row["load"] for row in line], [row["value"] for row in line], marker=".", lw=width, label=layout
                )
            ax.set_title(f"{case}: {policy}", fontsize=9)
            ax.set_xlabel("load, in parts of what cellrt does at most")
        its[0].set_ylabel("utility a second")
    axes[0, 0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
