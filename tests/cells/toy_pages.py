"""A toy allocator of pages and the plain loop of a decoder over them: what the runtime is to do, for tests of cells."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cellrt.cells.llama import Llama
from cellrt.cells.paged_attention import Pages, Spans


class ToyPages:
    """Pages of all layers under one table; requests get them one by one, in a mixed order."""

    def __init__(self, model: Llama, num_pages: int, page_size: int) -> None:
        self.kept = model.new_pages(num_pages, page_size)
        self.page_size = page_size
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.tables: dict[object, list[int]] = {}

    def of(self, lengths: dict[object, int]) -> list[Pages]:
        """The pages of these requests, enough for so many rows of each: one ``Pages`` a layer."""
        for request, length in lengths.items():
            table = self.tables.setdefault(request, [])
            while len(table) * self.page_size < length:
                table.append(self.free.pop())
        width = max(len(self.tables[request]) for request in lengths)
        tables = [self.tables[request] + [0] * (width - len(self.tables[request])) for request in lengths]
        shared = torch.tensor(tables, dtype=torch.int32), torch.tensor(list(lengths.values()), dtype=torch.int32)
        return [Pages(keys, values, *shared) for keys, values in self.kept]

    def release(self, request: object) -> None:
        """Gives a request's pages back."""
        self.free += self.tables.pop(request)


def spans_of(positions: Sequence[Sequence[int]]) -> Spans:
    """The positions of each node's rows."""
    offsets = torch.tensor([0, *(len(rows) for rows in positions)]).cumsum(0)
    flat = [position for rows in positions for position in rows]
    return Spans(offsets.to(torch.int32), torch.tensor(flat, dtype=torch.int32))


def last_logits(model: Llama, pages: ToyPages, chunks: dict[object, tuple[int, list[int]]]) -> Tensor:
    """Runs a chunk of each request, given with where it starts; the logits of each chunk's last row."""
    spans = spans_of([range(start, start + len(tokens)) for start, tokens in chunks.values()])
    own = pages.of({request: start + len(tokens) for request, (start, tokens) in chunks.items()})
    tokens = torch.tensor([token for _, chunk in chunks.values() for token in chunk])
    return model.logits(model(tokens, spans, own)[spans.offsets[1:].long() - 1])


def generate(model: Llama, prompts: Sequence[list[int]], steps: int, chunk: int = 10**9) -> list[list[int]]:
    """Greedy tokens of each prompt. Each step takes a chunk of every prompt that is not read yet, and a token of the
    others; request k comes k steps late."""
    pages = ToyPages(model, num_pages=sum(-(-(len(prompt) + steps) // 4) for prompt in prompts), page_size=4)
    known = [list(prompt) for prompt in prompts]
    done = [0 for _ in prompts]
    turn = 0
    while any(len(known[k]) < len(prompt) + steps for k, prompt in enumerate(prompts)):
        live = [k for k, prompt in enumerate(prompts) if k <= turn and len(known[k]) < len(prompt) + steps]
        chunks = {k: (done[k], known[k][done[k] : done[k] + chunk]) for k in live}
        logits = last_logits(model, pages, chunks)  # type: ignore[arg-type]
        for k, row in zip(live, logits):
            done[k] += len(chunks[k][1])
            if done[k] == len(known[k]):
                known[k].append(int(row.argmax()))
        turn += 1
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts)]
