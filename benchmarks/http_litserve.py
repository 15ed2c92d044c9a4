"""LitServe with its own batching: ``python -m benchmarks.http_litserve PORT`` serves until it is ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import litserve
import torch

from benchmarks.http_classifier import Classifier
from benchmarks.http_server import MAX_BATCH, MAX_WAIT_S


class Api(litserve.LitAPI):
    """The model behind its batches."""

    def setup(self, device: str) -> None:
        """Make the model."""
        torch.set_num_threads(1)
        self.model = Classifier()

    def decode_request(self, request):  # LitServe reads annotations
        """Return the tokens."""
        return list(request["request"])

    def batch(self, inputs: Sequence[list[int]]) -> Sequence[list[int]]:
        """Return the inputs as they are: the model pads."""
        return inputs

    def predict(self, x: Any, **_: Any) -> list[int]:
        """Return the classes of a batch."""
        return self.model.classes(x)

    def unbatch(self, output: list[int]) -> list[int]:
        """Return the outputs as they are."""
        return output

    def encode_response(self, output: Any, **_: Any) -> dict[str, int]:
        """Return the answer."""
        return {"class": output}


if __name__ == "__main__":
    api = Api(max_batch_size=MAX_BATCH, batch_timeout=MAX_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
