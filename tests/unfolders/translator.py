"""An encoder-decoder as somebody may have trained it in torch, and what serves it."""

import torch
from torch import nn

import cellrt
from cellrt import cells, unfolders
from tests.oracles.beam import search

TOKENS, WIDTH, SIZE, START, END, MOST = 9, 5, 8, 0, 2, 7
LAYERS = {nn.LSTM: cells.EmbeddingLSTMDecoder, nn.GRU: cells.EmbeddingGRUDecoder}
ATTENTION = {nn.LSTM: cells.AttentionLSTMDecoder, nn.GRU: cells.AttentionGRUDecoder}
SOURCES = [[3, 1, 4, 1, 5], [8], [2, 7, 1, 8, 2, 8, 1, 8], [6, 6]]


class Translator(nn.Module):
    """An encoder-decoder as somebody may have trained it in torch; states are ``[layers, size]``, one for each kind.

    The encoder's layers are half as wide if they run in both directions, so that a decoder may begin with both halves
    side by side, unless there is a ``bridge``, a layer from the last states of the top layer alone.
    """

    def __init__(self, kind, num_layers, is_both, has_bridge=False, attends=False):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.num_layers = kind, num_layers
        width = SIZE if has_bridge or not is_both else SIZE // 2
        self.memory_size = width * (1 + is_both)
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder = kind(WIDTH, width, num_layers, bidirectional=is_both, dropout=0.5 if num_layers > 1 else 0.0)
        depth = 1 if has_bridge else num_layers
        self.decoder = kind(WIDTH + SIZE * attends, SIZE, depth)
        self.bridge = nn.Linear(self.memory_size, SIZE) if has_bridge else None
        self.query, self.key, self.score = nn.Linear(SIZE, 6), nn.Linear(self.memory_size, 6), nn.Linear(6, 1)
        self.combine = nn.Linear(self.memory_size + SIZE, SIZE) if attends else None
        self.projection = nn.Linear(SIZE, TOKENS)
        nn.init.normal_(self.projection.weight, std=2.0)
        self.eval()

    def encode(self, source):
        """The encoder's outputs ``[n, size]``, and the decoder's first states."""
        memory, last = self.encoder(self.source(torch.tensor(source)))
        states = last if isinstance(last, tuple) else (last,)
        if self.bridge is not None:
            top = [state[-self.encoder_directions :].flatten() for state in states]
            return memory, [torch.tanh(self.bridge(state))[None] for state in top]
        by_layer = [state.view(self.num_layers, -1, state.shape[-1]) for state in states]
        return memory, [state.flatten(1) for state in by_layer]

    @property
    def encoder_directions(self):
        return 2 if self.encoder.bidirectional else 1

    def step(self, token, current, memory):
        """The logits after a token, and what the next step needs."""
        states, attended = current
        x = self.target(torch.tensor(token))
        x = x if self.combine is None else torch.cat([x, attended])
        output, after = self.decoder(x[None], tuple(states) if len(states) > 1 else states[0])
        h = output[0]
        if self.combine is not None:
            scores = self.score(torch.tanh(self.query(h) + self.key(memory)))[:, 0]
            h = torch.tanh(self.combine(torch.cat([scores.softmax(0) @ memory, h])))
        return self.projection(h), (after if len(states) > 1 else (after,), h)

    @torch.inference_mode()
    def greedy(self, source):
        """The tokens, and their log-probabilities."""
        memory, states = self.encode(source)
        current, tokens, chances = (states, torch.zeros(SIZE)), [], []
        while len(tokens) < MOST and END not in tokens:
            logits, current = self.step(tokens[-1] if tokens else START, current, memory)
            tokens.append(int(logits.argmax()))
            chances.append(logits.log_softmax(0).max())
        return tokens, torch.stack(chances)

    @torch.inference_mode()
    def beams(self, source, beams):
        memory, states = self.encode(source)

        def advance(token, current):
            return self.step(token, current, memory)

        return search(advance, (states, torch.zeros(SIZE)), START, END, beams, MOST)

    def layers(self):
        return unfolders.from_torch(self.encoder, embedding=self.source)

    def served_bridge(self):
        if self.bridge is None:
            return None
        top, names = self.num_layers - 1, ("h", "c") if self.kind is nn.LSTM else ("h",)
        places = [f"_l{top}", f"_l{top}_reverse"][: self.encoder_directions]
        sources = {name: [name + place for place in places] for name in names}
        return cells.Bridge(sources, dict.fromkeys(names, self.bridge), nn.Tanh())

    def decoder_module(self, **options):
        if self.combine is None:
            return LAYERS[self.kind].from_torch(self.target, self.decoder, self.projection, END, **options)
        attention = cells.AdditiveAttention.from_torch(self.query, self.key, self.score)
        parts = (self.target, self.decoder, self.combine, self.projection, END)
        return ATTENTION[self.kind].from_torch(*parts, attention=attention, **options)

    def keys(self, decoder):
        if self.combine is None:
            return None
        return cellrt.cell(cells.AttentionKeys(decoder.attention), {"h": (self.memory_size,)})
