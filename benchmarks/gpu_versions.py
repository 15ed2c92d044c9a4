"""The versions and GPU of a machine: ``python -m benchmarks.gpu_versions`` prints JSON; it fails without a GPU.

Versions of Python, torch, its CUDA and cuDNN, Triton, Numba and the driver; of the GPU its name, capability, processors
and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from benchmarks.record import machine


def versions() -> dict[str, object]:
    """Return all that is known; of a machine without a GPU, ``gpu`` is None."""
    found: dict[str, object] = {**machine(), "cuda": torch.version.cuda, "gpu": None}
    try:
        import triton

        found["triton"] = triton.__version__
    except ModuleNotFoundError:
        found["triton"] = "absent"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "capability": list(torch.cuda.get_device_capability(0)),
            "processors": properties.multi_processor_count,
            "shared_bytes": getattr(properties, "shared_memory_per_block_optin", 0),
            "memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    return found


def _driver() -> str:
    """Return the version of NVIDIA's driver, or ``unknown``."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split()[0] if done.stdout.split() else "unknown"


if __name__ == "__main__":
    shown = versions()
    print(json.dumps(shown), flush=True)
    sys.exit(0 if shown["gpu"] is not None else 1)
