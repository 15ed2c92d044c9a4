"""Ray Serve, with its decorator for batches: ``python -m benchmarks.http_ray PORT`` serves until it is ended."""

from __future__ import annotations

import signal
import sys
from typing import Any

import ray
import torch
from ray import serve

from benchmarks.http_classifier import Classifier
from benchmarks.http_server import MAX_BATCH, MAX_WAIT_S


class Deployed:
    """The model behind its batches."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = Classifier()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_WAIT_S)
    async def classes(self, requests: list[list[int]]) -> list[int]:
        """Return the classes of a batch."""
        return self.model.classes(requests)

    async def __call__(self, request: Any) -> dict[str, int]:
        """Return the answer."""
        found: Any = await self.classes((await request.json())["request"])
        return {"class": found}


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(serve.deployment(Deployed, max_ongoing_requests=1024).bind())
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    serve.shutdown()
    ray.shutdown()
