"""Serve a trained encoder-decoder, spelling to phonemes. Needs its weights: pip install --no-deps g2p-en==2.1.0

The whole model is in ``cellrt/demo/g2p.py``: two cells and this unfolder.

    letters = graph.chain(encoder, token=letter_ids(word))
    sounds = graph.loop(decoder, until="stop", max_steps=20, h=letters.last.h, token=graph.constant(START))
    return {"phonemes": sounds.token}
"""

import sys

import cellrt
from cellrt.demo.g2p import arpabet, make_g2p

WORDS = ("batchmaker", "cellular", "torch", "serve", "any", "recurrent", "network")


def main(quick: bool = False) -> None:
    """Print how some words sound, then one word sound by sound, as its decoder's steps complete."""
    with cellrt.Engine(workers=1) as engine:
        engine.register(make_g2p())
        words = WORDS[:3] if quick else WORDS
        for word, future in zip(words, engine.submit_many("g2p", words), strict=True):
            print(f"{word:12} {arpabet(future.result()['phonemes'])}")

        with engine.stream("g2p", "pronunciation") as steps:
            for step in steps:
                print(arpabet([int(step["phonemes"])]), end=" ", flush=True)
            print()


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
