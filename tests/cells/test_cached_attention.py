"""Transformers of a user's own, in plain torch but for their attention, equal what plain torch makes of whole texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import cellrt
from cellrt import PagedRows
from cellrt.cells import append_key_values, cached_attention, cross_attention, key_values, span_attention
from cellrt.definition.examples import random_nodes
from cellrt.unfolders import complete
from tests.engine.helpers import WAIT_S, close_and_check

VOCABULARY, HEADS, KV_HEADS, SIZE, LAYERS, LONGEST = 23, 4, 2, 5, 2, 64
HIDDEN = HEADS * SIZE


def plain_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """The oracle: rows ``[rows, heads, size]`` of one text; ``seen`` ``[rows, keys]``."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    heads_first = (each.transpose(0, 1) for each in (query, key, value))
    return scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=scale).transpose(0, 1)


def seen_so_far(rows: int, window: int = 0) -> Tensor:
    back = torch.arange(rows)[:, None] - torch.arange(rows)
    return (back >= 0) & ((back < window) if window else torch.ones(()).bool())


class Layer(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query, self.kv = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * KV_HEADS * SIZE)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, attend) -> Tensor:
        normed = self.norm(x)
        query = self.query(normed).view(-1, HEADS, SIZE)
        key, value = self.kv(normed).view(-1, 2, KV_HEADS, SIZE).unbind(1)
        x = x + self.out(attend(query, key, value, self.window).flatten(1))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Learned positions, two layers of which one looks back no further than its window."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LONGEST, HIDDEN)
        self.layers = nn.ModuleList([Layer(0), Layer(3)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, token: Tensor, kv: PagedRows) -> dict[str, Tensor]:
        x = self.tokens(token) + self.places(kv.positions)
        for number, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, window, at=number: cached_attention(q, k, v, kv, layer=at, window=window))
        logits = self.head(x)
        best = logits.argmax(1)
        return {"token": best, "logprob": logits.log_softmax(1).amax(1), "stop": best == 0}

    def whole(self, tokens: Tensor) -> Tensor:
        """Logits of a whole text, in plain torch."""
        x = self.tokens(tokens) + self.places(torch.arange(len(tokens)))
        for layer in self.layers:
            x = layer(x, lambda q, k, v, window: plain_attention(q, k, v, seen_so_far(len(tokens), window)))
        return self.head(x)

    @torch.no_grad()
    def write(self, prompt: list[int], count: int) -> list[int]:
        """What it goes on with, greedily."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self.whole(torch.tensor(tokens))[-1].argmax()))
            if tokens[-1] == 0:
                break
        return tokens[len(prompt) :]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_decoder_goes_on_as_in_plain_torch(page_size):
    torch.manual_seed(3)
    model = Decoder().eval()
    state = key_values(KV_HEADS, SIZE, layers=LAYERS, page_size=page_size)
    cell = cellrt.cell(model, {"token": cellrt.token, "kv": state}, max_batch=4, max_batch_rows=6)
    engine = cellrt.Engine(page_bytes=1 << 20)
    engine.register(complete("mine", cell, max_tokens=30))
    prompts = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in (1, 9, 4, 7, 2)]
    futures = engine.submit_many("mine", prompts)
    for prompt, future in zip(prompts, futures):
        assert future.result(WAIT_S)["token"].tolist() == model.write(prompt, 30)
    close_and_check(engine)


class Encoder(nn.Module):
    """One layer over whole texts, which appends what a decoder reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(VOCABULARY, HIDDEN), Layer(0)
        self.memory = nn.Linear(HIDDEN, 2 * KV_HEADS * SIZE)

    def forward(self, token: Tensor, text: cellrt.Spans, memory: PagedRows) -> Tensor:
        x = self.layer(self.tokens(token), lambda q, k, v, _: span_attention(q, k, v, text))
        append_key_values(*self.memory(x).view(-1, 2, KV_HEADS, SIZE).unbind(1), memory)
        return x

    def whole(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        everything = torch.ones(len(tokens), len(tokens)).bool()
        x = self.layer(self.tokens(tokens), lambda q, k, v, _: plain_attention(q, k, v, everything))
        return x, *self.memory(x).view(-1, 2, KV_HEADS, SIZE).unbind(1)


def read(query: Tensor, memory: PagedRows) -> Tensor:
    return cross_attention(query, memory).flatten(1)


def test_an_encoder_and_what_reads_it_equal_plain_torch():
    torch.manual_seed(4)
    encoder = Encoder().eval()
    memory = {"memory": key_values(KV_HEADS, SIZE, page_size=3)}
    encode = cellrt.cell(
        encoder, {"token": cellrt.token, "text": cellrt.span(whole=True), **memory}, max_batch=4, max_batch_rows=32
    )
    only_read = {"memory": key_values(KV_HEADS, SIZE, page_size=3, only_read=True)}
    ask = cellrt.cell(read, {"query": (HEADS, SIZE), **only_read})

    def unfold(graph, request):
        text, queries = request
        pages = graph.pages(encode)
        rows = graph.chain(encode, token=text, memory=pages).output
        return {"rows": rows, "read": graph.chain(ask, query=queries, memory=pages).output}

    engine = cellrt.Engine(page_bytes=1 << 20)
    engine.register(cellrt.Unfolder("asked", unfold, (torch.ones(2, dtype=torch.int64), torch.zeros(2, HEADS, SIZE))))
    requests = [
        (torch.randint(1, VOCABULARY, (length,)), torch.randn(asked, HEADS, SIZE))
        for length, asked in ((1, 3), (8, 1), (5, 2))
    ]
    for (text, queries), future in zip(requests, engine.submit_many("asked", requests)):
        made = future.result(WAIT_S)
        with torch.no_grad():
            rows, key, value = encoder.whole(text)
            found = plain_attention(queries, key, value, torch.ones(len(queries), len(text)).bool()).flatten(1)
        torch.testing.assert_close(made["rows"], rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made["read"], found, rtol=1e-5, atol=1e-5)
    close_and_check(engine)


SCALES = [None, 0.2, 1.7]
ROWS = {"query": (HEADS, SIZE), "key": (KV_HEADS, SIZE), "value": (KV_HEADS, SIZE)}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("window", [0, 1, 3, 7])
def test_cached_attention_scales_scores_and_looks_back_as_far_as_it_is_told(window, scale):
    """Nodes of four rows, behind five that they have in pages."""

    def attend(query: Tensor, key: Tensor, value: Tensor, seen: PagedRows) -> Tensor:
        return cached_attention(query, key, value, seen, window=window, scale=scale)

    made = cellrt.cell(attend, {**ROWS, "seen": key_values(KV_HEADS, SIZE, page_size=3)}, max_batch=4)
    query, key, value, seen = random_nodes(made.inputs.values(), 3, 4, 5, torch.Generator().manual_seed(9))
    before = [seen.rows_of(node)[:5] for node in range(3)]
    (found,) = made.run(query, key, value, seen)
    for node, (keys, values) in enumerate(kept.unbind(1) for kept in before):
        own = slice(4 * node, 4 * node + 4)
        everything = torch.cat([keys, key[own]]), torch.cat([values, value[own]])
        wanted = plain_attention(query[own], *everything, seen_so_far(9, window)[5:], scale)
        torch.testing.assert_close(found[own], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_cross_attention_scales_scores_as_it_is_told(scale):
    inputs = {"query": (HEADS, SIZE), "seen": key_values(KV_HEADS, SIZE, page_size=3, only_read=True)}
    made = cellrt.cell(lambda query, seen: cross_attention(query, seen, scale=scale), inputs, max_batch=4)
    query, seen = random_nodes(made.inputs.values(), 3, 2, 7, torch.Generator().manual_seed(9))
    (found,) = made.run(query, seen)
    for node in range(3):
        keys, values = seen.rows_of(node).unbind(1)
        everything = torch.ones(2, len(keys)).bool()
        wanted = plain_attention(query[2 * node : 2 * node + 2], keys, values, everything, scale)
        torch.testing.assert_close(found[2 * node : 2 * node + 2], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_span_attention_sees_what_it_is_told(causal, window, scale):
    """A window without ``causal`` is one on both sides."""

    def attend(query: Tensor, key: Tensor, value: Tensor, text: cellrt.Spans) -> Tensor:
        return span_attention(query, key, value, text, causal=causal, window=window, scale=scale)

    made = cellrt.cell(attend, {**ROWS, "text": cellrt.span(whole=True)}, max_batch=4)
    *tensors, text = random_nodes(made.inputs.values(), 3, 6, 0, torch.Generator().manual_seed(9))
    (found,) = made.run(*tensors, text)
    back = torch.arange(6)[:, None] - torch.arange(6)
    seen = (back >= 0) if causal else torch.ones(6, 6).bool()
    seen = seen & (back.abs() < window) if window else seen
    for node in range(3):
        own = slice(6 * node, 6 * node + 6)
        wanted = plain_attention(*(each[own] for each in tensors), seen, scale)
        torch.testing.assert_close(found[own], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "layer", "said"),
    [
        (cellrt.grows(2, KV_HEADS, SIZE), None, r"as key_values makes it, got rows \[2, 2, 5\] with page_dim=0"),
        (cellrt.grows(3, KV_HEADS, SIZE, page_dim=1), None, "as key_values makes it"),
        (key_values(KV_HEADS, SIZE), 0, "expected no layer for this state, got layer=0"),
        (key_values(KV_HEADS, SIZE, layers=2), None, "expected layer= below 2 for this state, got layer=None"),
        (key_values(KV_HEADS, SIZE, layers=2), 2, "expected layer= below 2 for this state, got layer=2"),
        (key_values(KV_HEADS, SIZE + 1), None, r"rows must be torch.float32 \[rows, heads, 6\]"),
    ],
)
def test_another_state_is_refused_where_the_cell_is_made(spec, layer, said):
    def step(query: Tensor, key: Tensor, kv: PagedRows) -> Tensor:
        return cached_attention(query, key, key, kv, layer=layer)

    with pytest.raises(cellrt.DefinitionError, match=said):
        cellrt.cell(step, {"query": (HEADS, SIZE), "key": (KV_HEADS, SIZE), "kv": spec})
