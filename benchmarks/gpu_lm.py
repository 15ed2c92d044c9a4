"""Language models on a GPU: cellrt beside a captured loop of the same cell, and beside transformers, in one run.

A Llama of SmolLM2-135M's sizes and one of 8 million weights, random, in float32 and bfloat16; 1, 8, 32 and 128 requests
come at once. "equal": prompts of 64 tokens and answers of 48, and beside cellrt is the *ideal*: the same cell, whose
step is one CUDA graph that is replayed with all requests present, and whose tokens are read at the end. "mixed": up to
so many, beside transformers' continuous batching (that of ``generate_batch``) and padded ``generate``, where
transformers is installed. ``python -m benchmarks.gpu --only lm``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cellrt
from benchmarks.gpu_timing import captured
from benchmarks.lm import (
    NO_END,
    PAGE_SIZE,
    RANDOM,
    Server,
    answer_all,
    compare,
    draw_requests,
    rows_of_step,
    stream_all,
)
from benchmarks.lm_peers import Asked, Continuous, Made, make_reference, padded
from benchmarks.record import Recorder
from cellrt.cells.language_models import GreedyLanguageModel, language_model
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.definition.spans import PagedRows
from cellrt.unfolders.completion import complete

SMOLLM = LlamaSizes(vocabulary=49_152, hidden=576, inner=1536, layers=30, heads=9, kv_heads=3)
MODELS = {"135M": SMOLLM, "8M": RANDOM}
TINY = {"tiny": LlamaSizes(vocabulary=32, hidden=16, inner=24, layers=2, heads=2, kv_heads=1)}
PAGE_BYTES = 8 << 30
MOST_ROWS = 1024


class Served:
    """A model on a device: by an engine, and in a loop without one."""

    def __init__(self, model: Llama, device: str, longest: tuple[int, int]) -> None:
        self.cell = language_model(model, NO_END, page_size=PAGE_SIZE, max_batch=128, max_batch_rows=MOST_ROWS)
        self.engine = cellrt.Engine([device], page_bytes=PAGE_BYTES if device != "dry" else 1 << 24)
        self.engine.register(complete("lm", self.cell, max_tokens=longest[1]))
        self._on = torch.device("cpu" if device == "dry" else device)
        self._model = GreedyLanguageModel(model, NO_END).to(self._on).eval()
        self._loops: dict[tuple[int, int], Callable[[Sequence[Asked]], list[Made]]] = {}

    def counts(self) -> tuple[int, int]:
        """Return tasks that were replayed and eager so far."""
        counts = self.engine.statistics()["workers"][1]
        return counts["replayed"], counts["eager"]

    @torch.inference_mode()
    def loop(self, requests: Sequence[Asked]) -> list[Made]:
        """Return prompts and answers of one length: a step is a captured graph."""
        shape = len(requests), len(requests[0].prompt)
        if shape not in self._loops:
            self._loops[shape] = self._make_loop(*shape, requests[0].steps)
        return self._loops[shape](requests)

    def _make_loop(self, count: int, read: int, steps: int) -> Callable[[Sequence[Asked]], list[Made]]:
        width = -(-(read + steps) // PAGE_SIZE)
        stored = self.cell.inputs["kv"].stored
        pages = torch.zeros(count * width, *stored.shape, dtype=stored.dtype, device=self._on)
        tables = torch.arange(count * width, dtype=torch.int32).view(count, width)
        prompt, single = (self._at(pages, rows_of_step(pages, tables, *at)) for at in ((0, read), (read, 1)))
        last = torch.arange(read - 1, count * read, read, device=self._on)
        tokens = torch.zeros(count, dtype=torch.int64, device=self._on)
        words = torch.zeros(count * read, dtype=torch.int64, device=self._on)
        first = [single.lengths.clone(), single.positions.clone()]

        def step() -> None:
            tokens.copy_(self._model(tokens, single)[0])
            single.lengths.add_(1)
            single.positions.add_(1)

        make_step = captured(step, self._on)

        def run(requests: Sequence[Asked]) -> list[Made]:
            words.copy_(torch.tensor([token for asked in requests for token in asked.prompt]))
            for changed, begun in zip((single.lengths, single.positions), first):
                changed.copy_(begun)
            tokens.copy_(self._model(words, prompt)[0][last])
            found = [tokens.clone()]
            for _ in range(steps - 1):
                make_step()
                found.append(tokens.clone())
            made = [Made() for _ in requests]
            for one, row in zip(made, torch.stack(found, 1).tolist()):
                for token in row:
                    one.note(token)
            return made

        return run

    def _at(self, pages: Tensor, rows: PagedRows) -> PagedRows:
        """Return these rows on the device."""
        moved: dict[str, Any] = {
            name: value.to(self._on) for name, value in rows._asdict().items() if isinstance(value, Tensor)
        }
        return rows._replace(**{**moved, "pages": pages})


def measure_lm(recorder: Recorder, device: str, quick: bool) -> None:
    """Every model and kind of number, with each number in flight."""
    is_dry = device == "dry"
    longest, rounds = ((64, 48), 3 if quick else 9) if not is_dry else ((6, 4), 1)
    in_flight = (2, 4) if is_dry else (1, 8, 32, 128)
    for (name, sizes), dtype in (
        (made, dtype)
        for made in (TINY if is_dry else MODELS).items()
        for dtype in (torch.bfloat16, torch.float32)
        if not (quick and made[0] == "8M")
    ):
        torch.manual_seed(0)
        model = Llama(sizes).to(dtype).eval()
        is_exact, case = dtype == torch.float32, f"{name} {str(dtype).removeprefix('torch.')}"
        with ExitStack() as ends:
            ours = Served(model, device, longest)
            ends.callback(ours.engine.close)
            mixed: dict[str, Server] = {
                "cellrt": partial(stream_all, ours.engine),
                "cellrt, not streamed": partial(answer_all, ours.engine),
            }
            equal: dict[str, Server] = {"ideal": ours.loop, **mixed}
            if not is_dry and importlib.util.find_spec("transformers") is not None:
                reference, other = (make_reference(model).to(device, dtype) for _ in range(2))
                peer = Continuous(other, longest[1], num_blocks=1024, max_batch_tokens=MOST_ROWS)
                ends.callback(peer.close)
                mixed |= {"transformers, continuous": peer.serve, "transformers, padded": partial(padded, reference)}
            for count in in_flight[1:2] if quick and is_exact and not is_dry else in_flight:
                for way, servers in (("mixed", mixed), ("equal", equal)):
                    requests = draw_requests(count, sizes.vocabulary, longest, way == "equal")
                    for _ in range(3):  # captures
                        answer_all(ours.engine, requests)
                    before = ours.counts()
                    compare(recorder, f"{case}, {way}", servers, requests, rounds, is_checked=is_exact)
                    replayed, eager = (now - was for now, was in zip(ours.counts(), before))
                    share = replayed / max(1, replayed + eager)
                    recorder.add(f"{case}, {way}", "cellrt: tasks replayed", share, "ratio", in_flight=count)
