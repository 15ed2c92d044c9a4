"""An audio encoder of Whisper's shape with random weights: two convolutions over time, then attention over all frames.

A convolution over time mixes rows, so it is no cell as it is. But each of its outputs reads a few frames alone: a cell
that is given these frames as one row is row-wise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cellrt
from cellrt.cells import span_attention

MELS, HEADS, SIZE, LAYERS = 8, 2, 8, 2
HIDDEN = HEADS * SIZE
WINDOW, STRIDE = 5, 2
"""The frames that an output of both convolutions reads, and the step to the next output."""


class Stem(nn.Module):
    """Whisper's convolutions: ``[frames, MELS]`` -> ``[frames / 2, HIDDEN]``, rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(MELS, HIDDEN, 3, padding=1), nn.Conv1d(HIDDEN, HIDDEN, 3, 2, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        """Return the whole recording, as it was trained."""
        return F.gelu(self.second(F.gelu(self.first(frames.T[None]))))[0].T


class Windows(nn.Module):
    """The same for windows ``[rows, WINDOW, MELS]``; ``inside`` ``[rows, 3]`` is 0 where the second one was padded."""

    def __init__(self, stem: Stem) -> None:
        super().__init__()
        self.stem = stem

    def forward(self, window: Tensor, inside: Tensor) -> Tensor:
        """Return an output ``[rows, HIDDEN]`` of each window."""
        first, second = self.stem.first, self.stem.second
        hidden = F.gelu(F.conv1d(window.transpose(1, 2), first.weight, first.bias)) * inside[:, None]
        return F.gelu(F.conv1d(hidden, second.weight, second.bias))[:, :, 0]


def windows_of(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``Windows`` reads of frames ``[frames, MELS]``."""
    padded = F.pad(frames, (0, 0, WINDOW // 2, WINDOW // 2))
    windows = padded.unfold(0, WINDOW, STRIDE).transpose(1, 2)
    middle = torch.arange(len(windows))[:, None] * STRIDE + torch.tensor([-1, 0, 1])
    return windows, ((middle >= 0) & (middle < len(frames))).float()


class Layer(nn.Module):
    """A layer of the encoder, on rows ``[rows, HIDDEN]`` of any number of recordings."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, spans: cellrt.Spans) -> Tensor:
        """Run the layer on rows. Only attention looks at which row belongs to which node."""
        query, key, value = self.qkv(self.norm(x)).view(-1, 3, HEADS, SIZE).unbind(1)
        x = x + self.out(span_attention(query, key, value, spans).flatten(1))
        mixed: Tensor = self.mlp(self.mlp_norm(x))
        return x + mixed


class Encoder(nn.Module):
    """All layers; ``spans`` says which rows are one recording."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, spans: cellrt.Spans) -> Tensor:
        """``x`` ``[rows, HIDDEN]`` -> as many rows."""
        for layer in self.layers:
            x = layer(x, spans)
        return x


def make_model() -> tuple[Stem, Encoder, cellrt.Unfolder]:
    """Return the modules, and the model "audio": frames ``[frames, MELS]`` -> a row for every second one."""
    torch.manual_seed(0)  # yours come from a file
    stem, encoder = Stem(), Encoder()
    windows = cellrt.cell(Windows(stem), {"window": (WINDOW, MELS), "inside": (3,)}, name="stem")
    layers = cellrt.cell(encoder, {"x": (HIDDEN,), "spans": cellrt.span(whole=True)}, name="encoder")

    @cellrt.unfold("audio", example=torch.zeros(4, MELS))
    def audio(graph: cellrt.Graph, frames: Tensor) -> dict[str, object]:
        window, inside = windows_of(frames)
        heard = graph.chain(windows, window=window, inside=inside).output
        return {"heard": graph.chain(layers, x=heard).output}

    return stem, encoder, audio
