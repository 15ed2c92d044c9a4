"""Speech to letters with random weights: an RNN transducer, decoded greedily, and CTC with the same encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cellrt
from cellrt import unfolders

FEATURES, HIDDEN, LETTERS, BLANK = 16, 32, 30, 0
MOST_LETTERS = 3
"""The most letters that a frame can have, so that a search has an end."""


class Search(nn.Module):
    """A step of the search: a letter, or a blank, which goes on to the next frame.

    ``frames``: the encoder's outputs ``[HIDDEN]`` of each node; ``at``, ``made`` int64 ``[rows]``: the frame, and how
    many letters it has had; ``letter``, ``h``: what the predictor has read last, and its state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.predictor = nn.Embedding(LETTERS, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)
        self.joiner = nn.Linear(HIDDEN, LETTERS)

    def forward(self, frames: cellrt.RaggedRows, at: Tensor, made: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Run one step of each row; ``stop`` behind the last frame."""
        starts, lengths = frames.offsets[:-1], frames.offsets.diff()
        frame = frames.values[starts + torch.minimum(at, lengths - 1)]
        letter = self.joiner(torch.tanh(frame + h)).argmax(1)
        is_blank = (letter == BLANK) | (made == MOST_LETTERS)
        letter = torch.where(is_blank, BLANK, letter)
        read = self.predictor(self.embedding(letter), h)
        h, at = torch.where(is_blank[:, None], h, read), at + is_blank
        return {"letter": letter, "at": at, "made": torch.where(is_blank, 0, made + 1), "h": h, "stop": at >= lengths}


def make_models() -> tuple[nn.LSTM, Search, nn.Linear, list[cellrt.Unfolder]]:
    """Return the modules, and the models "transducer" and "ctc": a request is frames ``[frames, FEATURES]``."""
    torch.manual_seed(0)  # yours come from a file
    encoder, search, head = nn.LSTM(FEATURES, HIDDEN), Search(), nn.Linear(HIDDEN, LETTERS)
    nn.init.constant_(search.joiner.bias[BLANK : BLANK + 1], 0.3)  # else these weights say none
    layers = unfolders.from_torch(encoder)
    inputs = {"frames": cellrt.ragged(HIDDEN), "at": cellrt.token, "made": cellrt.token, "h": (HIDDEN,)}
    step = cellrt.cell(search, inputs, name="search")
    best = cellrt.cell(lambda x: head(x).argmax(1), {"x": (HIDDEN,)}, name="best")

    @cellrt.unfold("transducer", example=torch.zeros(2, FEATURES))
    def transducer(graph: cellrt.Graph, frames: Tensor) -> dict[str, object]:
        heard = layers(graph, frames).steps[0]
        most = len(frames) * (MOST_LETTERS + 1)
        return {"letter": graph.loop(step, until="stop", max_steps=most, frames=heard).letter}

    @cellrt.unfold("ctc", example=torch.zeros(2, FEATURES))
    def ctc(graph: cellrt.Graph, frames: Tensor) -> dict[str, object]:
        return {"letter": graph.chain(best, x=layers(graph, frames).steps[0]).output}

    return encoder, search, head, [transducer, ctc]


def spoken(letters: Tensor) -> list[int]:
    """Return a transducer's letters without blanks."""
    return letters[letters != BLANK].tolist()


def collapsed(letters: Tensor) -> list[int]:
    """Return CTC's letters: those that repeat are one, then blanks go."""
    return spoken(torch.unique_consecutive(letters))
