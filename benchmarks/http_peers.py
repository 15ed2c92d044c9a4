"""Other servers of the same model over HTTP: ``python -m benchmarks.http_peers NAME PORT`` serves until it is ended.

Each as its own documentation has it for batches: up to 64 requests that arrive within 5 ms, one worker, one thread of
torch. None of them is needed for anything else; one that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.http_model import Classifier

MAX_BATCH, MAX_WAIT_S = 64, 0.005
PACKAGES = {"LitServe": "litserve", "mosec": "mosec", "Ray Serve": "ray"}
PATHS = {"LitServe": "/predict", "mosec": "/inference", "Ray Serve": "/"}


def installed() -> list[str]:
    """The peers that can be run here."""
    return [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]


def serve_litserve(port: int) -> None:
    """LitServe, with its own batching."""
    import litserve

    class Api(litserve.LitAPI):  # type: ignore[misc]
        def setup(self, device: str) -> None:
            torch.set_num_threads(1)
            self.model = Classifier()

        def decode_request(self, request: dict[str, Any]) -> list[int]:
            return list(request["request"])

        def batch(self, inputs: Sequence[list[int]]) -> Sequence[list[int]]:
            return inputs

        def predict(self, batch: Any) -> list[int]:
            return self.model.classes(batch)

        def unbatch(self, output: list[int]) -> list[int]:
            return output

        def encode_response(self, output: int) -> dict[str, int]:
            return {"class": output}

    api = Api(max_batch_size=MAX_BATCH, batch_timeout=MAX_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", track_requests=False)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")


def serve_mosec(port: int) -> None:
    """mosec, whose own HTTP server is compiled."""
    import mosec

    class Worker(mosec.Worker):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.set_num_threads(1)
            self.model = Classifier()

        def forward(self, data: list[dict[str, Any]]) -> list[dict[str, int]]:
            return [{"class": found} for found in self.model.classes([each["request"] for each in data])]

    sys.argv = ["mosec", "--port", str(port), "--address", "127.0.0.1", "--log-level", "error"]
    server = mosec.Server()
    server.append_worker(Worker, num=1, max_batch_size=MAX_BATCH, max_wait_time=round(1000 * MAX_WAIT_S))
    server.run()


def serve_ray(port: int) -> None:
    """Ray Serve, with its decorator for batches."""
    import signal

    import ray
    from ray import serve

    class Deployed:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.model = Classifier()

        @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_WAIT_S)  # type: ignore[untyped-decorator]
        async def classes(self, requests: list[list[int]]) -> list[int]:
            return self.model.classes(requests)

        async def __call__(self, request: Any) -> dict[str, int]:
            return {"class": await self.classes((await request.json())["request"])}

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(serve.deployment(Deployed, max_ongoing_requests=1024).bind())
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    serve.shutdown()
    ray.shutdown()


SERVE: dict[str, Callable[[int], None]] = {
    "LitServe": serve_litserve,
    "mosec": serve_mosec,
    "Ray Serve": serve_ray,
}

if __name__ == "__main__":
    SERVE[sys.argv[1]](int(sys.argv[2]))
