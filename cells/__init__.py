"""Ready-made cells: one family a file, each with its equations and the paper they come from."""

from cellrt.cells.gru import (
    EmbeddingGRUCell,
    EmbeddingGRUDecoder,
    GRUCell,
    GRUInput,
    GRURecurrent,
)
from cellrt.cells.lstm import (
    EmbeddingLSTMCell,
    LSTMCell,
    LSTMInput,
    LSTMRecurrent,
)

__all__ = [
    "EmbeddingGRUCell",
    "EmbeddingGRUDecoder",
    "EmbeddingLSTMCell",
    "GRUCell",
    "GRUInput",
    "GRURecurrent",
    "LSTMCell",
    "LSTMInput",
    "LSTMRecurrent",
]
