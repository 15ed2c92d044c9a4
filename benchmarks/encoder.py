"""Encoders under deadlines: layouts of a batch and orders of requests, as TCB compares them, beside cellrt.

Sentences of about 20 words arrive by a Poisson process, each with a time by which it must have begun, which is drawn
("short" and "long", ``PATIENCES``); what has not begun by then is dropped. A sentence is worth 1 by its length (TCB
section 5.1). ``load`` is in parts of what cellrt does at most, all having arrived before.

``minilm`` and ``t5``: encoders of these models' sizes, random weights. A loop takes what has arrived, in the order of a
policy, and computes one batch after the other: in every layout (``encoder_layouts.py``) by plain torch, and flat by our
cell ("cellrt"). All have one thread, the same weights, packed, and as many places in a batch, ``PLACES`` (TCB's
figures 9 to 12). What batches of a layout take, by their places, padding included, is measured in processor time; then
every pair of a layout and a policy is played with these times, in ``ROUNDS`` rounds, the same for all pairs. "as
played": what batches of a loop that computes them took, in parts of what was played for the same batches.
``rows``: the scheduler itself, with a virtual clock (``core/simulate.py``) and our cell's times, with batches of other
sizes (figure 15a). ``variance``: with other lengths (15b). ``slots``: plain torch with more slots a row (figures 13 and
14). ``cost``: the time that a policy takes, by how many sentences wait, beside a task's (figure 16).
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
from benchmarks.options import Options, tell
from benchmarks.plots import can_draw
from benchmarks.record import Recorder
from benchmarks.timing import medians_us
from benchmarks.workloads import poisson_arrivals
from cellrt.cells.transformer_stack import StackSizes, TransformerStack, sentence_encoder
from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.templates.program import NOTHING, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.definition.modes import torch_threads
from cellrt.errors import CellrtError

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
ETA, Q = 0.5, 0.75
VARIANCES = (20, 100)
LOADS = (0.7, 1.0, 1.4, 2.0)
PATIENCES = {"short": (0.5, 4.0), "long": (2.0, 12.0)}
"""The bounds between which the latest begin of a sentence is drawn, in batches' times from its arrival."""
BATCHES, ROUNDS = 60, 8
"""The length of each load, in batches' times, and the number of its draws of sentences; the mean is shown."""
EDGE = 0.2
"""The part of the time at the start, when few wait, and at the end, after which none come, that does not count."""
FILLS, DRAWS = (0.1, 0.25, 0.5, 0.75, 1.0), 7
"""The fill of the batches that are timed, and the number of each; the median counts."""
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


Price = Callable[[int], float]
"""Seconds that a batch takes, by its places with the padding."""
Batch = Callable[[list[Row], int], float]
"""Have a batch done, given its rows and how long each is; return how many seconds it took."""


class Seen(NamedTuple):
    """The outcome of some work: which sentences' batches began in time."""

    work: Work
    done: list[int]

    @property
    def utility(self) -> float:
        """The worth of the sentences that began in time, a second."""
        return sum(1 / len(self.work.sentences[k]) for k in self._counted()) / (
            (1 - 2 * EDGE) * self.work.arrivals_s[-1]
        )

    @property
    def in_time(self) -> float:
        """The share that began in time; the throughput is so much of what arrives."""
        return len(self._counted()) / sum(map(self._counts, range(len(self.work.sentences))))

    def _counted(self) -> list[int]:
        return [k for k in self.done if self._counts(k)]

    def _counts(self, k: int) -> bool:
        return EDGE <= self.work.arrivals_s[k] / self.work.arrivals_s[-1] < 1 - EDGE


def draw_lengths(count: int, variance: float, seed: int) -> NDArray[np.int64]:
    """Return lengths ``[count]`` as TCB's: normal with a mean of 20, between 3 and 100."""
    drawn = np.random.default_rng(seed).normal(20, math.sqrt(variance), count)
    return np.clip(np.rint(drawn), 3, LONGEST).astype(np.int64)


def draw_work(rate: float, seconds: float, variance: float, batch_s: float, seed: int, patience: str = "short") -> Work:
    """Return the work of so many sentences a second, for so long."""
    count = max(8, round(rate * seconds))
    draw, arrivals_s = np.random.default_rng(seed), poisson_arrivals(rate, count, seed)
    words = [torch.from_numpy(draw.integers(0, 30_000, size)) for size in draw_lengths(count, variance, seed)]
    begin_by_s = arrivals_s + draw.uniform(*PATIENCES[patience], count) * batch_s
    return Work(words, arrivals_s.tolist(), begin_by_s.tolist())


def in_order(policy: str, waiting: Sequence[int], work: Work, lengths: Sequence[int]) -> list[int]:
    """Return the waiting sentences in a policy's order.

    ``DAS`` is as in ``core/scheduling/policies.py``, with one row of all places.
    """
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


def run_loop(batch: Batch, lay: Lay, policy: str, work: Work) -> Seen:
    """Return a loop that takes what has arrived, drops what is late and has a batch of the rest done, one after the
    other.

    Its clock is what batches take, and where there is nothing to do the next arrival is now.
    """
    waiting, done, sent, lengths = list[int](), list[int](), 0, work.lengths
    now = 0.0
    while sent < len(lengths) or waiting:
        while sent < len(lengths) and work.arrivals_s[sent] <= now:
            waiting.append(sent)
            sent += 1
        waiting = [k for k in waiting if work.begin_by_s[k] >= now]
        if not waiting:
            now = max(now, work.arrivals_s[sent]) if sent < len(lengths) else now
            continue
        rows, longest = lay(in_order(policy, waiting, work, lengths), lengths)
        now += batch(rows, longest)
        begun = {one for row in rows for one in row}
        done += begun
        waiting = [k for k in waiting if k not in begun]
    return Seen(work, done)


def computed(encoder: Encoder, sentences: list[torch.Tensor]) -> Batch:
    """Return batches that an encoder computes, in processor time of this thread: what else the machine does is not
    counted.
    """

    def batch(rows: list[Row], longest: int) -> float:
        start = time.thread_time()
        encoder(rows, sentences)
        return time.thread_time() - start

    return batch


def played(price: Price) -> Batch:
    """Return the time of batches that nobody computes."""
    return lambda rows, longest: price(len(rows) * longest)


def measure_prices(
    encoders: dict[str, tuple[Encoder, Lay]], variance: float, places: int, draws: int
) -> dict[str, Price]:
    """Return the time of each layout's batches as a straight line through the medians of batches of several
    fillings.
    """
    found: dict[str, dict[float, list[tuple[int, float]]]] = {name: {} for name in encoders}
    for draw in range(draws):
        for fill in FILLS:
            sentences = draw_work(1.0, places // 2, variance, 1.0, seed=draw).sentences
            lengths = [len(sentence) for sentence in sentences]
            few = [k for k, end in enumerate(np.cumsum(lengths).tolist()) if end <= max(fill * places, lengths[0])]
            for name, (encoder, lay) in encoders.items():
                rows, longest = lay(few if fill < 1 else range(len(lengths)), lengths)
                took_s = computed(encoder, sentences)(rows, longest)
                found[name].setdefault(fill, []).append((len(rows) * longest, took_s))
    prices: dict[str, Price] = {}
    for name, by_fill in found.items():
        points = np.array([np.median(each, axis=0) for each in by_fill.values()])
        slope, start = np.polyfit(points[:, 0], points[:, 1], 1)
        prices[name] = partial(_line, max(start, 0.0), slope)
    return prices


def _line(start: float, slope: float, places: int) -> float:
    return float(start + slope * places)


def make_processor(policy: str, places: int, sentences: int) -> tuple[Processor, int]:
    """Return a scheduler that forms one task at a time by a policy that nothing bounds, and its encoder's cell type."""
    limits = Limits(max_links=1 << 22, max_values=1 << 20, max_places=1 << 21)
    settings = SchedulerSettings(max_tasks_to_submit=1, max_wait_s=math.inf, gather=False, large_batches=False)
    processor = Processor(1, limits, settings, replace(POLICIES[policy], is_bounded=False))
    processor.add_kind(64 * sentences, 64 * sentences)
    ports = [Port(0), Port(0, is_span=True)]
    return processor, processor.add_type(ports, [Port(0)], max_batch=places // 3, max_rows=places, is_whole=True)


def program_of(cell: int, length: int) -> NDArray[np.int32]:
    """Return a sentence, as the scheduler has it."""
    program = [OP_EXTERNAL, 0, length, OP_CHAIN, cell, length, STEP, 0, 1, NOTHING, 0, OP_RESULT, length, 1, length]
    return np.array(program, np.int32)


def run_scheduler(policy: str, places: int, price: Price, work: Work) -> Seen:
    """Return the same by cellrt's scheduler."""
    processor, cell = make_processor(policy, places, len(work.sentences))
    each = zip(work.arrivals_s, work.lengths, work.begin_by_s)
    arrivals = [Arrival(at_s, program_of(cell, length), schedule_by_s=by_s) for at_s, length, by_s in each]
    found = simulate(processor, arrivals, lambda cell_type, rows, steps: price(rows), drops_late=True)
    return Seen(work, np.flatnonzero(np.isfinite(found.finish_s)).tolist())


def check_answers(encoders: dict[str, Encoder]) -> None:
    """Every layout gives what our cell gives. Raise AssertionError."""
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
    plain = PlainEncoder(stack)
    encoders: dict[str, tuple[Encoder, Lay]] = {name: (plain, lay) for name, lay in LAYOUTS.items()}
    encoders[OURS] = CellEncoder(sentence_encoder(stack, max_batch=PLACES // 3, max_batch_rows=PLACES)), lay_flat
    check_answers({name: encoder for name, (encoder, _) in encoders.items()})
    for variance in VARIANCES if model == "minilm" and not options.quick else VARIANCES[:1]:
        prices = measure_prices(encoders, variance, PLACES, 2 if options.quick else DRAWS)
        peak, batch_s = _most(prices[OURS], PLACES)
        case = f"{model}, variance {variance}"
        recorder.add(case, "most at once", peak, "sentences/s", batch_ms=1e3 * batch_s)
        for name, (encoder, lay) in encoders.items():
            work = draw_work(1.4 * peak, batch_s * (2 if options.quick else 8), variance, batch_s, seed=3)
            batches = _Compared(computed(encoder, work.sentences), played(prices[name]))
            run_loop(batches, lay, "DAS", work)
            recorder.add(case, "as played", batches.took_s / batches.expected_s, "times", layout=name)
        for patience in PATIENCES:
            for load in LOADS[2:3] if options.quick else LOADS:
                rounds = _rounds(load, peak, batch_s, variance, options, patience)
                found: dict[tuple[str, str], list[Seen]] = {}
                for policy in NAMES.values():
                    for layout, (_, lay) in encoders.items():
                        batch = played(prices[layout])
                        found[layout, policy] = [run_loop(batch, lay, policy, work) for work in rounds]
                        which = {"layout": layout, "policy": policy, "load": load, "patience": patience}
                        _record(recorder, case, found[layout, policy], which)
                _record_lead(recorder, case, found, {"load": load, "patience": patience})
                tell(f"{case}: load {load}, {patience}")


class _Compared:
    """Batches that are computed, beside what is played for them."""

    def __init__(self, batch: Batch, expected: Batch) -> None:
        self._batch, self._expected = batch, expected
        self.took_s = self.expected_s = 0.0

    def __call__(self, rows: list[Row], longest: int) -> float:
        took_s = self._batch(rows, longest)
        self.took_s, self.expected_s = self.took_s + took_s, self.expected_s + self._expected(rows, longest)
        return took_s


def _most(price: Price, places: int) -> tuple[float, float]:
    """Return sentences a second in full batches, and the seconds of one."""
    batch_s = price(places)
    return places / 20 / batch_s, batch_s


def _rounds(load: float, peak: float, batch_s: float, variance: float, options: Options, patience: str) -> list[Work]:
    seconds, count = (20 * batch_s, 1) if options.quick else (BATCHES * batch_s, ROUNDS)
    seeds = range(100 * round(10 * load), 100 * round(10 * load) + count)
    return [draw_work(load * peak, seconds, variance, batch_s, seed, patience) for seed in seeds]


def _record(recorder: Recorder, case: str, found: Sequence[Seen], which: dict[str, Any]) -> None:
    recorder.add(case, "utility", float(np.mean([seen.utility for seen in found])), "1/s", **which)
    recorder.add(case, "begun in time", 100 * float(np.mean([seen.in_time for seen in found])), "%", **which)


def _record_lead(
    recorder: Recorder, case: str, found: dict[tuple[str, str], list[Seen]], which: dict[str, Any]
) -> None:
    """Record the lead in utility of cellrt under DAS over the best other pair, with the standard error over rounds.

    Flat batches under DAS do not count among the others.
    """
    each = {pair: np.array([seen.utility for seen in its]) for pair, its in found.items()}
    others = [pair for pair in found if pair not in ((OURS, "DAS"), ("flat", "DAS"))]
    best = max(others, key=lambda pair: float(each[pair].mean()))
    leads = 100 * (each[OURS, "DAS"] / each[best] - 1)
    error = float(leads.std(ddof=1) / math.sqrt(len(leads))) if len(leads) > 1 else 0.0
    recorder.add(case, "lead of cellrt, DAS", float(leads.mean()), "%", other=", ".join(best), error=error, **which)


def compare_sizes(recorder: Recorder, options: Options, part: str) -> None:
    """Compare the policies with batches of other sizes, or lengths of other variances, at 1.6 times our cell's most."""
    stack, load = TransformerStack(MODELS["minilm"]).eval().requires_grad_(False), 1.6
    most = 8 * LONGEST
    encoder = CellEncoder(sentence_encoder(stack, max_batch=most // 3, max_batch_rows=most))
    draws = 2 if options.quick else DRAWS
    price = measure_prices({OURS: (encoder, partial(lay_flat, places=most))}, 20, most, draws)[OURS]
    for each in (2, ROWS, 8) if part == "rows" else (1, 20, 100, 400):
        places, variance = (each * LONGEST, 20) if part == "rows" else (PLACES, each)
        peak, batch_s = _most(price, places)
        for patience in PATIENCES:
            rounds = _rounds(load, peak, batch_s, variance, options, patience)
            for policy, name in NAMES.items():
                found = [run_scheduler(policy, places, price, work) for work in rounds]
                which = {"layout": OURS, "policy": name, "load": load, "patience": patience}
                _record(recorder, f"{part}: {each}", found, which)
            tell(f"{part}: {each}, {patience}")


def compare_slots(recorder: Recorder, options: Options) -> None:
    """Measure a batch of 10 and of 32 rows of 400 words, in sentences of 20, with more and more slots."""
    stack = TransformerStack(MODELS["minilm"]).eval().requires_grad_(False)
    encoder = PlainEncoder(stack)
    for rows in (10,) if options.quick else (10, 32):
        sentences = [torch.randint(0, 30_000, (20,)) for _ in range(20 * rows)]
        calls: dict[str, Callable[[], object]] = {}
        for slots in (1, 2, 4, 5, 10, 20):
            size = 20 // slots
            laid = [Row(range(first, first + size)) for first in range(0, len(sentences), size)]
            calls[str(slots)] = partial(encoder, laid, sentences)
        times = {name: float("inf") for name in calls}
        for _ in range(1 if options.quick else 5):
            for name, call in calls.items():  # in turns, by the processor's time
                start = time.thread_time()
                call()
                times[name] = min(times[name], time.thread_time() - start)
        for name, took_s in times.items():
            recorder.add(f"slots, {rows} rows of 400", "speedup", times["1"] / took_s, "times", slots=int(name))


def measure_cost(recorder: Recorder, options: Options) -> None:
    """Record what forming a task costs under each policy with so many sentences waiting.

    Also record what the policy adds to a task of MiniLM's.
    """
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
    """Return the median time that a task of so many places takes to be formed, where so many sentences wait."""
    processor, cell = make_processor(policy, PLACES, waiting)
    now = time.perf_counter_ns()
    processor.clock.set(now)
    draw = np.random.default_rng(0)
    for number, length in enumerate(draw_lengths(waiting, 20, seed=1).tolist()):
        template = processor.compile(program_of(cell, length))
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


def draw(rows: Sequence[dict[str, Any]], path: Path, dpi: int = 110) -> None:
    """Draw utility against load, a panel for each case: the layouts under DAS, and cellrt under the other policies."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["metric"] == "utility" and row["case"].split(",")[0] in MODELS]
    panels = list(
        dict.fromkeys((row["patience"], row["case"]) for row in sorted(shown, key=lambda row: row["patience"]))
    )
    if not panels:
        return
    across = len(panels) // len(PATIENCES)
    figure = Figure(figsize=(4.5 * across, 7), layout="constrained")
    axes = figure.subplots(len(PATIENCES), across, squeeze=False).flat
    pairs = [*((layout, "DAS") for layout in LAYOUTS), *((OURS, policy) for policy in NAMES.values())]
    for ax, (patience, case) in zip(axes, panels):
        here = [row for row in shown if (row["patience"], row["case"]) == (patience, case)]
        for pair in pairs:
            line = [row for row in here if (row["layout"], row["policy"]) == pair]
            how: dict[str, Any] = {"ls": "-" if pair[1] == "DAS" else "--", "lw": 2.5 if pair == (OURS, "DAS") else 1}
            ax.plot([row["load"] for row in line], [row["value"] for row in line], label=", ".join(pair), **how)
        ax.set(title=f"{case}, {patience} deadlines", xlabel="load, in parts of what cellrt does at most")
        ax.set_ylabel("utility a second")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
