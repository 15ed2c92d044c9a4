"""Speech to letters (untrained): a transducer's greedy search as a loop over frames, and CTC, in one engine."""

import torch

import cellrt
from models.transducer import FEATURES, collapsed, make_models, spoken


def main() -> None:
    """Print what is heard in three recordings of different lengths by both."""
    *_, models = make_models()
    recordings = [torch.randn(frames, FEATURES) for frames in (12, 30, 7)]
    with cellrt.Engine(1) as engine:
        for model in models:
            engine.register(model)
        heard = [(engine.submit("transducer", sound), engine.submit("ctc", sound)) for sound in recordings]
        for transducer, ctc in heard:
            print(spoken(transducer.result()["letter"]), collapsed(ctc.result()["letter"]))


if __name__ == "__main__":
    main()
