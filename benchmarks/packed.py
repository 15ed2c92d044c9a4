"""Linear layers with their weights packed beforehand by oneDNN, as torch's own compiler packs them.

``torch.nn.functional.linear`` reads the weight as it lies, row after row; what is packed once is laid out for the
processor's vectors. From a few rows on, a product then takes about half the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


class PackedLinear:
    """``x [rows, inputs]`` times ``weight [outputs, inputs]`` transposed, plus ``bias [outputs]``; float32 on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product ``[rows, outputs]``."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


class PackedLSTM:
    """A step of an LSTM over word numbers: the embedding and the input half are one table, the other half is packed.

    Args:
        embedding: of the words.
        lstm: an ``nn.LSTM`` of one layer, or an ``nn.LSTMCell``.
    """

    def __init__(self, embedding: nn.Embedding, lstm: nn.LSTM | nn.LSTMCell) -> None:
        parameters = {name.removesuffix("_l0"): value.detach() for name, value in lstm.named_parameters()}
        bias = parameters["bias_ih"] + parameters["bias_hh"]
        self._inputs = nn.functional.linear(embedding.weight.detach(), parameters["weight_ih"], bias)
        self._recurrent = PackedLinear(parameters["weight_hh"])
        self.hidden = lstm.hidden_size

    def __call__(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next h and c ``[rows, hidden]`` of ``token [rows]``."""
        return self.gates(self._recurrent(h).add_(self._inputs[token]), c)

    def run(self, sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the last h and c ``[sentences, hidden]`` of each; no step past a sentence's end is computed."""
        order = sorted(range(len(sentences)), key=lambda k: -len(sentences[k]))
        words = pad_sequence([torch.tensor(sentences[k]) for k in order])
        h, c = torch.zeros(2, len(order), self.hidden).unbind()
        live = len(order)
        for step in range(len(words)):
            while len(sentences[order[live - 1]]) <= step:
                live -= 1
            h[:live], c[:live] = self(words[step, :live], h[:live], c[:live])
        places = torch.tensor(order).argsort()
        return h[places], c[places]

    def gates(self, sums: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c of the sums ``[rows, 4 * hidden]``: input, forget, cell and output gate."""
        size = self.hidden
        entry, forget = torch.sigmoid(sums[:, : 2 * size]).split(size, 1)
        c = torch.addcmul(forget * c, entry, torch.tanh(sums[:, 2 * size : 3 * size]))
        return torch.sigmoid(sums[:, 3 * size :]).mul_(torch.tanh(c)), c
