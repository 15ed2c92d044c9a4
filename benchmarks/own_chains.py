"""Two models over words as users write them: two layers of LSTM with attention, and a plain MLP as a step.

Each is in cellrt a chain of a cell of its own, and as a peer a batch that is padded, or shrinks as sentences end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import cellrt
from benchmarks.compiled_peer import compiled_step, warmed
from benchmarks.own_models import HIDDEN, TOKENS, seeded
from benchmarks.server import Runner
from cellrt import RaggedRows

CLASSES = 20
Words = list[int]
Step = Callable[..., dict[str, Tensor]]


class LSTMStep(nn.Module):
    """A word through two layers of LSTM; states are ``[rows, 2, hidden]``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, HIDDEN)
        self.first, self.second = nn.LSTMCell(HIDDEN, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Run one step; "top" is the upper layer's h."""
        h0, c0 = self.first(self.table(token), (h[:, 0], c[:, 0]))
        h1, c1 = self.second(h0, (h[:, 1], c[:, 1]))
        return {"h": torch.stack([h0, h1], 1), "c": torch.stack([c0, c1], 1), "top": h1}


class Attend(nn.Module):
    """Scores of classes, by attention of the last state over all of the upper layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, last: Tensor, memory: RaggedRows) -> dict[str, Tensor]:
        """Return each row over its own memory."""
        owner = torch.repeat_interleave(memory.offsets.diff(), output_size=memory.values.shape[0])
        weights = (self.query(last)[owner] * memory.values).sum(1).exp()
        total = torch.zeros_like(last[:, 0]).index_add(0, owner, weights)
        context = torch.zeros_like(last).index_add(0, owner, (weights / total[owner])[:, None] * memory.values)
        return {"scores": self.head(torch.cat([last, context], 1))}

    def padded(self, last: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return the same over padded memories ``[rows, words, hidden]``; ``mask`` is true past the words."""
        scores = torch.bmm(memory, self.query(last)[:, :, None])[:, :, 0].masked_fill(mask, -1e30)
        context = torch.bmm(torch.softmax(scores, 1)[:, None], memory)[:, 0]
        result: Tensor = self.head(torch.cat([last, context], 1))
        return result


class Classifier(nn.Module):
    """Two layers of LSTM with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.attend = LSTMStep(), Attend()

    def library(self) -> nn.LSTM:
        """Both layers as torch has them, with the same weights."""
        lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2)
        cells = (self.step.first, self.step.second)
        weights = {f"{name}_l{k}": value for k, cell in enumerate(cells) for name, value in cell.state_dict().items()}
        lstm.load_state_dict(weights)
        return lstm.eval().requires_grad_(False)


class MLPStep(nn.Module):
    """A word joins the state through a plain MLP, beside which the state goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(TOKENS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.layers = nn.Sequential(nn.Linear(2 * HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, token: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Run one step."""
        return {"h": self.norm(h + self.layers(torch.cat([self.table(token), h], 1)))}


def classify() -> cellrt.Unfolder:
    """Return the LSTM with attention in cellrt."""
    model, state = seeded(Classifier), (2, HIDDEN)
    step = cellrt.cell(model.step, {"token": cellrt.token, "h": state, "c": state}, name="step")
    attend = cellrt.cell(model.attend, {"last": (HIDDEN,), "memory": cellrt.ragged(HIDDEN)}, name="attend")

    @cellrt.unfold("classify", example=[1, 2, 3], key=len)
    def unfolder(graph: cellrt.Graph, words: Words) -> dict[str, object]:
        run = graph.chain(step, token=words)
        return {"scores": attend(last=run.last.top, memory=run.top).scores}

    return unfolder


def fold() -> cellrt.Unfolder:
    """Return the MLP in cellrt."""
    step = cellrt.cell(seeded(MLPStep), {"token": cellrt.token, "h": (HIDDEN,)}, name="mlp-step")

    @cellrt.unfold("fold", example=[1, 2, 3], key=len)
    def unfolder(graph: cellrt.Graph, words: Words) -> dict[str, object]:
        return {"h": graph.chain(step, token=words).last.h}

    return unfolder


def padded_lstm(compiled: bool, threads: int) -> Runner:
    """Return padded batches through torch's own LSTM of two layers; compiled: through the step, whose batch shrinks."""
    model = seeded(Classifier)
    if compiled:
        return warmed(stepped_lstm(model, compiled_step(model.step)), draw_words(64, seed=1))
    lstm = model.library()

    def run(sentences: Sequence[Words]) -> Iterable[tuple[int, Tensor]]:
        words = pad_sequence([torch.tensor(sentence) for sentence in sentences])
        memory = lstm(model.step.table(words))[0].transpose(0, 1)
        counts = torch.tensor([len(sentence) for sentence in sentences])
        return enumerate(_attended(model, memory, counts).unbind())

    return run


def stepped_lstm(model: Classifier, step: Step) -> Runner:
    """Return batches in order of length, which lose a sentence at its end."""

    def run(sentences: Sequence[Words]) -> Iterable[tuple[int, Tensor]]:
        order, live, words = by_length(sentences)
        h, c = torch.zeros(2, len(order), 2, HIDDEN).unbind()
        memory = torch.zeros(len(order), len(words), HIDDEN)
        for at, count in enumerate(live):
            out = step(words[at, :count], h[:count], c[:count])
            h, c, memory[:count, at] = out["h"], out["c"], out["top"]
        counts = torch.tensor([len(sentences[k]) for k in order])
        return zip(order, _attended(model, memory, counts).unbind())

    return run


def _attended(model: Classifier, memory: Tensor, counts: Tensor) -> Tensor:
    mask = torch.arange(memory.shape[1])[None] >= counts[:, None]
    return model.attend.padded(memory[torch.arange(len(counts)), counts - 1], memory, mask)


def padded_mlp(compiled: bool, threads: int) -> Runner:
    """Return batches in order of length through the step, which lose a sentence, and answer it, at its end."""
    module: Any = seeded(MLPStep)
    return warmed(stepped_mlp(compiled_step(module)), draw_words(64, seed=1)) if compiled else stepped_mlp(module)


def stepped_mlp(step: Step) -> Runner:
    """Run batches with this step."""

    def run(sentences: Sequence[Words]) -> Iterable[tuple[int, Tensor]]:
        order, live, words = by_length(sentences)
        h = torch.zeros(len(order), HIDDEN)
        for at, count in enumerate(live):
            h = step(words[at, :count], h[:count])["h"]
            left = live[at + 1] if at + 1 < len(live) else 0
            yield from ((order[k], h[k]) for k in range(left, count))

    return run


def by_length(sentences: Sequence[Words]) -> tuple[list[int], list[int], Tensor]:
    """Return the sentences' places, longest first; how many are left at each step; and their words ``[steps,
    sentences]``.
    """
    order = sorted(range(len(sentences)), key=lambda k: -len(sentences[k]))
    words = pad_sequence([torch.tensor(sentences[k]) for k in order])
    counts = np.array([len(sentences[k]) for k in order])
    return order, [int((counts > at).sum()) for at in range(len(words))], words


def draw_words(count: int, seed: int) -> list[Words]:
    """Return random words, 5 to 30 of them."""
    random = np.random.default_rng(seed)
    return [random.integers(0, TOKENS, int(size)).tolist() for size in random.integers(5, 31, count)]
