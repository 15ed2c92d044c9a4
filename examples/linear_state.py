"""Serve a linear-state language model in plain torch (untrained): the prompt is a chain, the answer a loop."""

import torch

import cellrt
from models.linear_state import make_model

PROMPTS = ([5, 9, 3], [8, 1, 4, 4, 2, 7], [1])


def main() -> None:
    """Print what three prompts of different lengths are answered, all at once."""
    _, model = make_model()
    with cellrt.Engine(1) as engine:
        engine.register(model)
        futures = engine.submit_many("linear", [torch.tensor(prompt) for prompt in PROMPTS])
        for prompt, future in zip(PROMPTS, futures):
            print(prompt, "->", future.result()["token"].tolist())


if __name__ == "__main__":
    main()
