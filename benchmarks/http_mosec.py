"""mosec, whose own HTTP server is compiled: ``python -m benchmarks.http_mosec PORT`` serves until it is ended."""

from __future__ import annotations

import sys
from typing import Any

import mosec
import torch

from benchmarks.http_classifier import Classifier
from benchmarks.http_server import MAX_BATCH, MAX_WAIT_S


class Worker(mosec.Worker):
    """The model behind its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = Classifier()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, int]]:
        """Return the answers of a batch."""
        return [{"class": found} for found in self.model.classes([each["request"] for each in data])]


if __name__ == "__main__":
    sys.argv = ["mosec", "--port", sys.argv[1], "--address", "127.0.0.1", "--log-level", "error", "--timeout", "30000"]
    server = mosec.Server()
    server.append_worker(Worker, num=1, max_batch_size=MAX_BATCH, max_wait_time=round(1000 * MAX_WAIT_S))
    server.run()
