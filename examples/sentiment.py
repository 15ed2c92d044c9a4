"""Serve a Tree-LSTM over parse trees: how does a film critic like the film? Train it first: ``train_sentiment.py``.

    python examples/sentiment.py --model sentiment-model --trees data/trees/dev.txt

``train_sentiment.py`` says where to get the trees; without any, three sentences are served.
"""

import argparse
import sys
import time
from pathlib import Path

import cellrt
from models.sentiment import SENTIMENTS, load_model, make_sentiment, read_tree
from models.treebank import missing

TREES = (
    "(3 (2 (2 A) (2 (3 lovely) (2 film))) (3 (2 with) (3 (3 lovely) (2 performances))))",
    "(1 (2 (2 The) (2 plot)) (1 (2 is) (1 (1 dull) (1 (2 and) (1 predictable)))))",
    "(3 (2 It) (3 (3 (2 's) (3 (2 not) (3 bad))) (2 .)))",
)
"""Parse trees without meaning in their labels, which are not read."""


def main(model: str = "sentiment-model", trees: str | None = None, show: int = 10) -> None:
    """Print sentences with their predicted sentiment, then how fast all of them were served."""
    if not Path(model).is_dir():
        sys.exit(f"There is no trained model in {model}: python examples/train_sentiment.py (about a minute)")
    if trees and (what := missing(trees)):
        sys.exit(what)
    requests = Path(trees).read_text(encoding="utf-8").splitlines() if trees else TREES
    with cellrt.Engine() as engine:
        engine.register(make_sentiment(*load_model(model)))
        start = time.perf_counter()
        results = [result["probabilities"] for result in engine.submit_many("sentiment", requests).results()]
        seconds = time.perf_counter() - start
    for line, probabilities in list(zip(requests, results, strict=True))[:show]:
        best = int(probabilities.argmax())
        print(f"{SENTIMENTS[best]:>13} {float(probabilities[best]):4.0%}  {' '.join(read_tree(line).words)}")
    nodes = sum(line.count("(") for line in requests)
    print(f"{len(requests)} trees, {nodes} nodes in {seconds * 1000:.0f} ms: {len(requests) / seconds:.0f} trees/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentiment-model", help="folder that train_sentiment.py wrote")
    parser.add_argument("--trees", help="a file of the treebank (default: three sentences)")
    options = parser.parse_args()
    main(options.model, options.trees)
