"""A small random encoder-decoder of torch's own layers: one sequence at a time, without a cache."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import relu

from cellrt.cells.transformer import TransformerLayer
from cellrt.cells.transformer_stack import StackSizes, TransformerStack, encoder_decoder_cells

SIZES = StackSizes(vocabulary=30, positions=40, hidden=24, inner=40, layers=2, heads=4, activation=relu, scale=3.0)
START, END, MAX_STEPS = 1, 5, 20


class Reference(nn.Module):
    """Torch's layers with our embeddings, and our layers with their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        options = {"batch_first": True, "activation": "relu", "dropout": 0.0}
        self.encoder = TransformerStack(SIZES)
        self.decoder = TransformerStack(SIZES, is_decoder=True)
        self.head = nn.Linear(24, 30)
        self.encoder_layers = nn.ModuleList(nn.TransformerEncoderLayer(24, 4, 40, **options) for _ in range(2))
        self.decoder_layers = nn.ModuleList(nn.TransformerDecoderLayer(24, 4, 40, **options) for _ in range(2))
        self.eval()
        for ours, theirs in ((self.encoder, self.encoder_layers), (self.decoder, self.decoder_layers)):
            for k, layer in enumerate(theirs):
                ours.layers[k] = TransformerLayer.from_torch(layer)

    def embedded(self, stack, tokens):
        return (3.0 * stack.embedding(tokens) + stack.positions(torch.arange(len(tokens))))[None]

    def encoded(self, tokens):
        x = self.embedded(self.encoder, tokens)
        for layer in self.encoder_layers:
            x = layer(x)
        return x

    def sentence(self, tokens):
        mean = self.encoded(tokens)[0].mean(0)
        return mean / mean.norm()

    def translate(self, tokens):
        memory, made = self.encoded(tokens), [START]
        while len(made) <= MAX_STEPS and made[-1] != END:
            made.append(int(self.logits(memory, made).argmax()))
        return made[1:]

    def logits(self, memory, tokens):
        """Of the token after these."""
        x = self.embedded(self.decoder, torch.tensor(tokens))
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens))
        for layer in self.decoder_layers:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return self.head(x[0, -1])


REFERENCE = Reference()
CELLS, OTHER_CELLS = (
    encoder_decoder_cells(
        REFERENCE.encoder, REFERENCE.decoder, REFERENCE.head, END, page_size=size, max_batch=most, max_batch_rows=40
    )
    for size, most in ((4, 4), (1, 16))
)
"""With pages of four rows and few requests a task, and with pages of one and more."""


def draw(seed: int, length: int) -> torch.Tensor:
    return torch.randint(0, 30, (length,), generator=torch.Generator().manual_seed(seed))
