"""A user's own Transformer in plain torch, compiled by cellrt, beside bare loops around the same module, in one run.

A GPT of 8 layers and hidden size 256 with learned positions; only its attention knows who a row belongs to. 1, 8 and 32
requests come at once. "equal": all prompts have 32 tokens and all answers 96, so that a batch is never padded and
nobody waits. "mixed": prompts of 4 to 32 and answers of 12 to 96; a bare loop pads prompts on the left and runs until
the longest answer is made; only tokens asked for are counted.

In parts ``equal`` and ``mixed`` all is in one process, which does nothing else. In ``apart`` (equal and mixed again)
cellrt and the loop are in processes of their own: an engine with one worker or two; and as many loops, each with its
share of the requests, which come as one batch. Their client is idle, or calculates in Python in another thread.

A bare loop has nothing to schedule, to wait for, or to tell anybody: torch's attention over a cache that is allocated
once, as it is and, all but that attention, through ``torch.compile`` with frozen weights. cellrt answers requests as
a whole, or streams them; compiled, and as its module runs.

All use one torch thread a worker. Servers take turns; each figure is the median of the rounds. Tokens are compared
first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import cellrt
from benchmarks.client_load import Busy
from benchmarks.compiled_peer import compiled_step, has_compiler
from benchmarks.lm import Server, as_request, compare, draw_requests
from benchmarks.lm_peers import Asked, Made
from benchmarks.options import Options
from benchmarks.process_server import ProcessServer
from benchmarks.record import Recorder
from benchmarks.server import Runner
from cellrt.cells import cached_attention, key_values
from cellrt.definition.modes import torch_threads
from cellrt.unfolders import complete

CASES = ("equal", "mixed")
APART = "apart"
PARTS = (*CASES, APART)
IN_FLIGHT = (1, 8, 32)
LONGEST = 32, 96
"""Tokens of a prompt and of an answer."""
LAYERS, HEADS, SIZE, VOCABULARY, MOST_POSITIONS = 8, 8, 32, 1000, 256
HIDDEN = HEADS * SIZE
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A pre-norm layer; ``attend`` gets the layer's number and queries, keys, values ``[..., heads, size]``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.norm, self.mlp_norm = number, nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """Return rows ``[..., hidden]``."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, SIZE)).unbind(-3)
        x = x + self.out(attend(self.number, query, key, value).flatten(-2))
        made: Tensor = x + self.mlp(self.mlp_norm(x))
        return made


class Decoder(nn.Module):
    """The cell, and what a bare loop calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(MOST_POSITIONS, HIDDEN)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, token: Tensor, kv: cellrt.PagedRows) -> dict[str, Tensor]:
        """Return a step of rows."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return cached_attention(query, key, value, kv, layer=layer)

        logits = self.logits(token, kv.positions, attend)
        logprob, best = logits.log_softmax(1).max(1)
        return {"token": best, "logprob": logprob, "stop": best < 0}

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the logits of tokens ``[...]``."""
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, attend)
        made: Tensor = self.head(x)
        return made

    def in_batch(self, tokens: Tensor, positions: Tensor, cache: Tensor, first: int, seen: Tensor | None) -> Tensor:
        """Return the next tokens of a batch ``[requests, steps]``; ``cache`` ``[layers, 2, requests, heads, steps,
        size]``, ``seen`` which of its keys each step reads; None: all so far, and as far as the step for several.
        """
        steps = tokens.shape[1]
        end = first + steps

        @torch.compiler.disable  # compiled, it would copy the whole cache at each layer
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache[layer, 0, :, :, first:end] = key.transpose(1, 2)
            cache[layer, 1, :, :, first:end] = value.transpose(1, 2)
            keys, values = cache[layer, :, :, :, :end]
            is_causal = seen is None and steps > 1
            made = scaled_dot_product_attention(query.transpose(1, 2), keys, values, seen, is_causal=is_causal)
            return made.transpose(1, 2)

        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, attend)
        logits: Tensor = self.head(x[:, -1]).log_softmax(1)
        return logits.max(1).indices


@torch.inference_mode()
def in_a_loop(step: Callable[..., Tensor], requests: Sequence[Asked]) -> list[Made]:
    """Return a padded batch, until the longest answer is made."""
    made = [Made() for _ in requests]
    read, steps = max(len(asked.prompt) for asked in requests), max(asked.steps for asked in requests)
    padding = torch.tensor([read - len(asked.prompt) for asked in requests])
    tokens = torch.tensor([[0] * (read - len(asked.prompt)) + asked.prompt for asked in requests])
    cache = torch.zeros(LAYERS, 2, len(requests), HEADS, read + steps, SIZE)
    places, is_padded = torch.arange(read + steps), bool(padding.any())
    first = 0
    for number in range(steps):
        end = first + tokens.shape[1]
        positions = (places[first:end] - padding[:, None]).clamp_min(0)
        seen = None
        if is_padded:
            before = places[:end] <= places[first:end, None]
            # A padded row sees itself, so that its softmax is a number.
            own = places[:end] == places[first:end, None]
            seen = ((places[:end] >= padding[:, None, None]) & before | own)[:, None]
        tokens = step(tokens, positions, cache, first, seen)[:, None]
        for one, asked, token in zip(made, requests, tokens[:, 0].tolist()):
            if number < asked.steps:
                one.note(token)
        first = end
    return made


def draw_model() -> Decoder:
    """Return the same weights in every process."""
    torch.manual_seed(0)
    return Decoder().eval()


def served(model: Decoder | None = None) -> cellrt.Unfolder:
    """Return the model in cellrt."""
    state = key_values(HEADS, SIZE, layers=LAYERS)
    inputs = {"token": cellrt.token, "kv": state}
    cell = cellrt.cell(model or draw_model(), inputs, max_batch=64, max_batch_rows=1024)
    return complete("own", cell, max_tokens=LONGEST[1])


def loop_of_batches(is_compiled: bool, threads: int) -> Runner:
    """Return a runner for a process of its own, a request of which is a batch.

    Its answer has the tokens of all requests, one behind another.
    """
    torch.set_num_threads(threads)
    model = draw_model()
    step = compiled_step(model.in_batch) if is_compiled else model.in_batch

    def run(batches: Sequence[Sequence[Asked]]) -> Iterator[tuple[int, Tensor]]:
        for place, batch in enumerate(batches):
            yield place, torch.tensor([token for one in in_a_loop(step, batch) for token in one.tokens])

    return run


class LoopsApart:
    """Bare loops in processes of their own."""

    def __init__(self, is_compiled: bool, workers: int) -> None:
        self._workers = workers
        self._server = ProcessServer(partial(loop_of_batches, is_compiled), max_batch=1, workers=workers)
        self.close = self._server.close

    def answer(self, requests: Sequence[Asked]) -> list[Made]:
        """Answer all of them at once, shared out evenly."""
        shares = [requests[k :: self._workers] for k in range(self._workers)]
        made: list[Made] = [Made() for _ in requests]
        futures = [self._server.submit(share) if share else None for share in shares]
        for k, future in enumerate(futures):
            tokens = iter(future.result().tolist() if future else ())
            for one, asked in zip(made[k :: self._workers], shares[k], strict=True):
                for _ in range(asked.steps):
                    one.note(next(tokens))
        return made


def answer(engine: cellrt.Engine | cellrt.EngineProcess, requests: Sequence[Asked]) -> list[Made]:
    """Answer all of them at once, each answered when it is whole."""
    made = [Made() for _ in requests]
    results = engine.submit_many("own", [as_request(asked) for asked in requests]).results()
    for one, result in zip(made, results):
        for token in result["token"].tolist():
            one.note(token)
    return made


class Cellrt:
    """Engines with one worker, one of which compiles the cell."""

    def __init__(self, model: Decoder) -> None:
        self.engines = {mode: cellrt.Engine(1, page_bytes=1 << 28, compile=mode) for mode in ("wait", "off")}
        for engine in self.engines.values():
            engine.register(served(model))

    def close(self) -> None:
        """End them."""
        for engine in self.engines.values():
            engine.close()

    def stream(self, requests: Sequence[Asked]) -> list[Made]:
        """Answer all of them at once, each streamed to an event loop of this process."""

        async def one(asked: Asked) -> Made:
            made = Made()
            async for step in self.engines["wait"].stream("own", as_request(asked)):
                made.note(int(step["token"]))
            return made

        async def together() -> list[Made]:
            return list(await asyncio.gather(*(one(asked) for asked in requests)))

        return asyncio.run(together())


def run(recorder: Recorder, options: Options) -> None:
    """All parts."""
    if any(map(options.has, CASES)):
        run_together(recorder, options)
    if options.has(APART):
        for workers in (1, 2):
            run_apart(recorder, workers, 3 if options.quick else 9)


def run_apart(recorder: Recorder, workers: int, rounds: int) -> None:
    """Both cases in processes of their own, with each number in flight, and an idle and a busy client."""
    with ExitStack() as ends:
        engine = ends.enter_context(cellrt.EngineProcess(workers, page_bytes=1 << 28, compile="wait"))
        engine.register(f"{__name__}:served")
        servers: dict[str, Server] = {"cellrt": partial(answer, engine)}
        for name, is_compiled in {"bare loop": False, "bare loop, torch.compile": True}.items():
            if not is_compiled or has_compiler():
                loops = LoopsApart(is_compiled, workers)
                ends.callback(loops.close)
                servers[name] = loops.answer
        for is_busy in (False, True):
            for case in CASES:
                for count in IN_FLIGHT:
                    requests = draw_requests(count, VOCABULARY, LONGEST, case == "equal")
                    name = f"{case}, workers: {workers}" + (", busy client" if is_busy else "")
                    with Busy(is_busy):
                        compare(recorder, name, servers, requests, rounds)


def run_together(recorder: Recorder, options: Options) -> None:
    """Both cases in this process, with each number in flight."""
    model, rounds = draw_model(), 3 if options.quick else 9
    with torch_threads(1), ExitStack() as ends:
        ours = Cellrt(model)
        ends.callback(ours.close)
        servers: dict[str, Server] = {
            "bare loop": partial(in_a_loop, model.in_batch),
            "cellrt": partial(answer, ours.engines["wait"]),
            "cellrt, streamed": ours.stream,
            "cellrt, eager": partial(answer, ours.engines["off"]),
        }
        if has_compiler():
            servers["bare loop, torch.compile"] = partial(in_a_loop, compiled_step(model.in_batch))
        for case in filter(options.has, CASES):
            for count in IN_FLIGHT:
                requests = draw_requests(count, VOCABULARY, LONGEST, case == "equal")
                compare(recorder, case, servers, requests, rounds)
