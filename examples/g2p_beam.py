"""Spelling to phonemes, greedy and with beam search. Needs the weights: pip install --no-deps g2p-en==2.1.0

Both models are made of the same two cells of ``cellrt.cells``; a step of the search has a whole beam as one row, so the
beams of all requests are batched with each other.
"""

import sys

import torch

import cellrt
from cellrt.cells import EmbeddingGRUCell, EmbeddingGRUDecoder
from cellrt.demo.g2p import MAX_STEPS, START, STOP, arpabet, letter_ids, torch_modules
from cellrt.unfolders import beam_search, encoder_decoder

WORDS = ("batchmaker", "cellular", "recurrent", "tough", "colonel", "queueing", "xylophone", "read")
BEAMS = 4


def models() -> tuple[cellrt.Unfolder, cellrt.Unfolder]:
    """Return the greedy model and the one that searches."""
    modules = torch_modules()
    inputs = {"token": cellrt.rows(dtype=torch.int64), "h": (modules.encoder.hidden_size,)}
    encoder = cellrt.cell(EmbeddingGRUCell.from_torch(modules.letters, modules.encoder), inputs, name="encoder")
    decoder = EmbeddingGRUDecoder.from_torch(modules.phonemes, modules.decoder, modules.projection, STOP)
    greedy = encoder_decoder(
        "greedy", encoder=encoder, decoder=cellrt.cell(decoder, inputs), start=START, max_steps=MAX_STEPS
    )
    searching = beam_search(
        "beam",
        encoder=encoder,
        decoder=decoder,
        inputs=inputs,
        start=START,
        end=STOP,
        max_steps=MAX_STEPS,
        beams=BEAMS,
        best=2,
    )
    return greedy, searching


def main(quick: bool = False) -> None:
    """Print for each word what greedy decoding says, and the two best of the search with their probabilities."""
    with cellrt.Engine(workers=1) as engine:
        for model in models():
            engine.register(model)
        words = WORDS[:3] if quick else WORDS
        requests = [{"source": torch.tensor(letter_ids(word))} for word in words]
        futures = zip(words, engine.submit_many("greedy", requests), engine.submit_many("beam", requests), strict=True)
        for word, greedy, found in futures:
            best = found.result()
            print(f"{word:12} greedy        {arpabet(greedy.result()['tokens'])}")
            for ids, score in zip(best["tokens"], best["score"].exp().tolist(), strict=True):
                print(f"{'':12} beam   {score:6.3f} {arpabet(ids)}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
