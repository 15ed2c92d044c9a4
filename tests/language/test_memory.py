"""What weights take in memory, where the system says how much a process has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.language import memory
from tests.language.memory import SMOLLM2, TINY, saved

SCRIPT = """
import sys
from pathlib import Path
import torch
import cellrt
from cellrt.language.checkpoints import read_checkpoint
from tests.language.memory import own_bytes, trim

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
with cellrt.Engine(page_bytes=1 << 20, workers=1) as engine:
    for name in ("tiny", "large"):
        trim()
        before, checkpoint = own_bytes(), read_checkpoint(folder / name, dtype=dtype)
        engine.register(checkpoint.make(name, max_tokens=4))
        tokens = range(checkpoint.vocabulary)[:: max(1, checkpoint.vocabulary // 2000)]  # all of the embedding is read
        for first in range(0, len(tokens), 200):
            engine.submit(name, list(tokens[first : first + 200])).result()
        print(own_bytes() - before, checkpoint.num_bytes)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stored", "served"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "int8"),
        ("bfloat16", "int8"),
    ],
)
def test_weights_are_in_memory_once(stored: str, served: str, tmp_path: Path) -> None:
    """The first model of a process: packed weights counted, and what is tried and compiled for its sizes; all that it
    has for itself beyond an engine that serves a model of hardly any weights."""
    if not memory.can_tell():
        pytest.skip("needs /proc")
    for name, sizes in {"tiny": TINY, "large": SMOLLM2}.items():
        saved(tmp_path / name, sizes, getattr(torch, stored))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), served]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout.splitlines()
    grown, num_bytes = map(int, lines[-1].split())
    print(f"{stored} served in {served}: {grown / num_bytes:.3f} of {num_bytes} bytes")
    assert grown < 1.2 * num_bytes
