"""Serve an audio encoder of Whisper's shape (untrained): convolutions over time as windows, then attention."""

import torch

import cellrt
from models.audio_encoder import MELS, make_model


def main() -> None:
    """Print how many rows three recordings of different lengths have."""
    *_, model = make_model()
    with cellrt.Engine(1) as engine:
        engine.register(model)
        futures = engine.submit_many("audio", [torch.randn(frames, MELS) for frames in (30, 7, 100)])
        print([list(result["heard"].shape) for result in futures.results()])


if __name__ == "__main__":
    main()
