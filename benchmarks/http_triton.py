"""NVIDIA's Triton Inference Server, the real one, on the CPU, out of the wheel ``nvidia-pytriton``.

``CELLRT_TRITON`` names the folder of a virtual environment that has it, with torch and a numpy that Triton knows:

    python -m venv triton-environment
    triton-environment/bin/pip install 'nvidia-pytriton==0.7.0' 'numpy<2' 'torch==2.13.*'

The wheel has Triton's Python backend alone, so models are Python's, with torch, one instance each. ``whole``: dynamic
batching, ragged, so that requests of any lengths meet. ``steps``: iterative sequences: a request is batched anew for
each of its steps. There a batch waits up to 1 ms, which a single client pays at each step; without it, few of many
clients' requests met.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.http_classifier import Classifier
from benchmarks.http_server import MAX_BATCH, MAX_WAIT_S, TIMEOUT_S, Command, Server, Tokens, read

VARIABLE = "CELLRT_TRITON"
MODEL = "classify"
STEP_WAIT_US = 1000
MAX_SEQUENCES = 256
SHARED_MEMORY = Path("/dev/shm")
WHERE = """import json, sysconfig as s
print(json.dumps([s.get_path("platlib"), s.get_config_var("LIBDIR"), s.get_python_version()]))"""
SCHEDULING = {
    "whole": f"dynamic_batching {{ preferred_batch_size: {MAX_BATCH} "
    f"max_queue_delay_microseconds: {round(1e6 * MAX_WAIT_S)} }}",
    "steps": f"sequence_batching {{ iterative_sequence: true oldest {{ max_candidate_sequences: {MAX_SEQUENCES} "
    f"preferred_batch_size: {MAX_BATCH} max_queue_delay_microseconds: {STEP_WAIT_US} }} }}",
}
CONFIG = """name: "{model}"
backend: "python"
max_batch_size: {max_batch}
input {{ name: "tokens" data_type: TYPE_INT64 dims: -1 allow_ragged_batch: true }}
output {{ name: "class" data_type: TYPE_INT64 dims: 1 }}
instance_group {{ count: 1 kind: KIND_CPU }}
{scheduling}
"""


def server(way: str) -> Server:
    """Return Triton with the model ``whole`` or ``steps``."""
    return Server(f"/v2/models/{MODEL}/infer", partial(_prepared, way), missing, _body, _answered, _counts)


def missing() -> str | None:
    """Return why Triton cannot run here, or None if it can."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no virtual environment"
    if not Path(folder, "bin/python").exists():
        return f"{VARIABLE}: {folder} is no virtual environment"
    programs, _, version = _programs(Path(folder))
    wanted = (programs / "bin/tritonserver", _stub(programs, version))
    return next((f"{VARIABLE}: there is no {path}" for path in wanted if not path.exists()), None)


def write_repository(folder: Path, way: str) -> None:
    """Write a repository of one model, with the reference's weights."""
    version = folder / MODEL / "1"
    version.mkdir(parents=True)
    scheduling = SCHEDULING[way]
    (version.parent / "config.pbtxt").write_text(
        CONFIG.format(model=MODEL, max_batch=MAX_BATCH, scheduling=scheduling), encoding="utf-8"
    )
    shutil.copy(Path(__file__).with_name(f"http_triton_{way}.py"), version / "model.py")
    torch.save(Classifier().state_dict(), version / "weights.pt")


@contextmanager
def _prepared(way: str, port: int) -> Iterator[Command]:
    """Yield the command, with a repository and backend until it has ended; then what it left in shared memory is
    freed.
    """
    environment = Path(os.environ[VARIABLE]).absolute()
    programs, libraries, version = _programs(environment)
    shared = f"cellrt_triton_{os.getpid()}_{port}_"
    with tempfile.TemporaryDirectory() as name:
        repository, backend = Path(name, "models"), Path(name, "backends", "python")
        write_repository(repository, way)
        backend.mkdir(parents=True)
        for path in (*(programs / "backends" / "python").iterdir(), _stub(programs, version)):
            (backend / path.name).symlink_to(path)
        command = [
            str(programs / "bin" / "tritonserver"),
            *("--model-repository", str(repository)),
            *("--backend-directory", str(backend.parent)),
            *("--backend-config", f"python,shm-region-prefix-name={shared}"),
            *("--http-address", "127.0.0.1", "--http-port", str(port)),
            *("--allow-grpc", "false", "--allow-metrics", "false", "--exit-timeout-secs", "5"),
        ]
        try:
            yield command, _environment(environment, libraries)
        finally:
            for path in SHARED_MEMORY.glob(f"{shared}*"):
                path.unlink(missing_ok=True)


def _environment(folder: Path, libraries: list[Path]) -> Mapping[str, str]:
    """Return the environment of the process: the model's interpreter finds its packages by the path's ``python3``."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**ours, "PATH": path, "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))}


def _programs(folder: Path) -> tuple[Path, list[Path], str]:
    """Return Triton's program, the folders with its libraries, and Python's version in a virtual environment."""
    asked = subprocess.run(
        [folder / "bin" / "python", "-c", WHERE], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    packages, libpython, version = json.loads(asked.stdout)
    libraries = [Path(packages, "nvidia_pytriton.libs"), Path(libpython)]
    return Path(packages, "pytriton", "tritonserver"), libraries, version


def _stub(programs: Path, version: str) -> Path:
    """Return the program that runs a model in Python of this version."""
    return programs / "python_backend_stubs" / version / "triton_python_backend_stub"


def _body(tokens: Tokens) -> object:
    one = {"name": "tokens", "shape": [1, len(tokens)], "datatype": "INT64", "data": list(tokens)}
    return {"inputs": [one]}


def _answered(answer: Any) -> int:
    return int(answer["outputs"][0]["data"][0])


def _counts(address: str) -> tuple[int, int]:
    """Return batches and rows so far; a step counts as a row."""
    found = read(f"{address}/v2/models/{MODEL}/stats")["model_stats"][0]
    return found["execution_count"], found["inference_count"]
