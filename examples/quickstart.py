"""Serve an LSTM over sentences of any length: define a cell, unfold a request into it, submit."""

import torch

import cellrt
from cellrt.cells import LSTMCell

lstm = cellrt.cell(LSTMCell(16, 32), inputs={"x": (16,), "h": (32,), "c": (32,)}, max_batch=64)


@cellrt.unfold("sentence", example=torch.zeros(3, 16))
def sentence(graph: cellrt.Graph, words: torch.Tensor) -> object:
    state = graph.zeros(lstm)
    for word in words:  # or, for the whole chain at once: graph.chain(lstm, x=words)
        state = lstm(x=word, h=state.h, c=state.c)
    return {"h": state.h}


def main() -> None:
    with cellrt.Engine() as engine:
        engine.register(sentence)
        futures = [engine.submit("sentence", torch.randn(length, 16)) for length in (2, 9, 5)]
        for future in futures:
            print(future.result()["h"].shape)


if __name__ == "__main__":
    main()
