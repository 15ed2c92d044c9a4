"""``make gpu`` can be green: what it runs is collected on a bare machine, and none of it skips there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_parts import SETS

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [command for parts in SETS.values() for part in parts for command in part.commands]
TESTS = sorted({word for command in COMMANDS for word in command if re.fullmatch(r"tests/\S+?(?<!\.ini)", word)})


def collect(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/bare.ini", "--rootdir", ".", "--confcutdir", "."]
    command += ["-ptests.gpu.bare_machine", "-pno:cacheprovider", "--collect-only", "-q"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *options, *TESTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )


@pytest.mark.slow
def test_tests_for_a_gpu_need_nothing_else_and_never_skip() -> None:
    done = collect("-m", "gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_cuda_device.py" in done.stdout
