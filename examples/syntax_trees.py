"""A Tree-LSTM names functions by the syntax of Python's own library, served as graphs of networkx.

It is trained first, in plain torch, in a minute or two, on four of five modules; the functions shown are from the
others, and their names were hidden. Equal parts of a syntax tree are one node (``models/syntax.py``).
"""

import sys
import time
from collections import Counter

import torch
from rich.progress import Progress, track

import cellrt
from models.syntax import VERBS, library_files, make_verbs, num_batches, read_functions, train

EPOCHS = 8


def main(quick: bool = False) -> None:
    files = library_files()
    functions = list(read_functions(track(files[:60] if quick else files, "reading")))
    modules = sorted({function.module for function in functions})
    chosen = torch.randperm(len(modules), generator=torch.Generator().manual_seed(0))[::5]
    held_out = {modules[number] for number in chosen.tolist()}
    known = [function for function in functions if function.module not in held_out]
    unknown = [function for function in functions if function.module in held_out]
    epochs = 1 if quick else EPOCHS
    with Progress() as progress:
        bar = progress.add_task("training", total=epochs * num_batches(known))
        *_, model = train(known, epochs, each_batch=lambda: progress.advance(bar))

    with cellrt.Engine() as engine:
        engine.register(make_verbs(model))
        start = time.perf_counter()
        requests = [model.as_networkx(function.tree) for function in unknown]
        results = [result["output"][0] for result in engine.submit_many("verbs", requests).results()]
        seconds = time.perf_counter() - start

    for function, logits in list(zip(unknown, results, strict=True))[:: max(1, len(unknown) // 12)]:
        guesses = [f"{VERBS[verb]} {logits.softmax(0)[verb]:.0%}" for verb in logits.topk(3).indices.tolist()]
        print(f"{function.module + '.' + function.name:40} perhaps {', '.join(guesses)}")
    right = sum(int(logits.argmax()) == function.verb for function, logits in zip(unknown, results, strict=True))
    commonest = Counter(function.verb for function in unknown).most_common(1)[0][1]
    nodes, unshared = (
        sum(map(count, unknown)) for count in (lambda one: len(one.tree.labels), lambda one: one.tree.num_nodes_as_tree)
    )
    print(f"{len(unknown)} functions of modules not trained on: {right / len(unknown):.0%} of the verbs are right;")
    print(f"always saying the commonest would be right for {commonest / len(unknown):.0%}.")
    print(f"{nodes} nodes (as trees {unshared}) in {seconds:.2f} s: {len(unknown) / seconds:.0f} functions/s")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
