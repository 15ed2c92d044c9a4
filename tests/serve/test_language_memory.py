"""Where the weights of a served checkpoint are: in the engine's process, and in no front end."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from tests.language import memory
from tests.language.memory import SMOLLM2, TINY, saved
from tests.serve.helpers import Server, children


def front_ends_of(path: Path) -> tuple[list[int], list[set[str]]]:
    """What two front ends that have answered have for themselves, and their files."""
    asked = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 3}
    with Server(["--port", "0", "--device", "cpu:1", "--front-ends", "2", f"{path}:model"]) as server:
        for _ in range(16):  # over connections of their own, which both have some of
            assert httpx.post(f"{server.url}/v1/completions", json=asked, trust_env=False).status_code == 200
        pids = children(server, "front_end")
        assert len(pids) == 2
        return [memory.own_bytes(pid) for pid in pids], [memory.files_of(pid) for pid in pids]


@pytest.mark.slow
def test_front_ends_have_none_of_the_weights(tmp_path: Path) -> None:
    if not memory.can_tell():
        pytest.skip("needs /proc")
    large = {**SMOLLM2, "num_hidden_layers": 8}
    before, _ = front_ends_of(saved(tmp_path / "tiny", TINY, torch.float32))
    after, files = front_ends_of(saved(tmp_path / "large", large, torch.float32))
    num_bytes = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert num_bytes > 200 << 20
    assert max(after) - min(before) < 0.05 * num_bytes
    assert not any(".safetensors" in path for each in files for path in each)
