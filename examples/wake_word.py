"""A streaming model from a file of weights to a client: ``cellrt serve`` with a websocket for each listener.

pip install '.[serve]'              # in the clone
python examples/wake_word.py        # writes weights, starts the server, listens, and ends it
python examples/wake_word.py --quick    # in this process, without a server
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import cellrt
from models.wake_word import FEATURES, WEIGHTS, WakeWord, make_model

FRAMES = 10
"""The frames of a piece: a tenth of a second, say."""


def listen(url: str, pieces: Iterable[torch.Tensor]) -> Iterator[list[float]]:
    """Send pieces ``[frames, FEATURES]`` over one websocket; yield the probabilities of each, as they are answered."""
    from websockets.sync.client import connect

    with connect(url.replace("http", "ws", 1) + "/v1/models/wake_word/session", proxy=None) as socket:
        for piece in pieces:
            socket.send(json.dumps({"request": piece.tolist()}))
            answer = json.loads(socket.recv(timeout=30))
            if "error" in answer:
                raise RuntimeError(answer["error"])
            yield [row[0] for row in answer["results"]["output"]]


def is_ready(url: str) -> bool:
    """Return whether the server serves its model; the first on a machine compiles for minutes before."""
    try:
        with urllib.request.urlopen(url + "/v2/health/ready", timeout=10) as answer:
            return answer.status == 200
    except OSError:  # nobody listens yet, or it answers 503
        return False


@contextmanager
def served(weights: Path) -> Iterator[str]:
    """Run the server, and give its address once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model, url = Path(__file__).parent / "models" / "wake_word.py", f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "cellrt", "serve", "--port", str(port), "--device", "cpu:1", f"{model}:served"]
    with subprocess.Popen(command, env={**os.environ, WEIGHTS: str(weights)}) as process:
        try:
            while not is_ready(url):
                if process.poll() is not None:
                    sys.exit("the server ended before it served: python examples/wake_word.py needs '.[serve]'")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def main(quick: bool = False) -> None:
    """Print the probabilities of three pieces of one listener."""
    torch.manual_seed(0)
    pieces = torch.randn(3, FRAMES, FEATURES)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "wake_word.pt"
        torch.save(WakeWord().state_dict(), weights)  # here it would have been trained
        if quick:
            with cellrt.Engine(1) as engine:
                engine.register(make_model(weights))
                with engine.session("wake_word") as listener:
                    for piece in pieces:
                        print(listener.submit(piece).result()["output"].flatten().tolist())
            return
        with served(weights) as url:
            for probabilities in listen(url, pieces):
                print(probabilities)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
