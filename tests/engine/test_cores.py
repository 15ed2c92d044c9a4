"""How many workers an engine has by itself: as many as there are cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cellrt.worker.cores import num_cores
from cellrt.worker.make import device_names


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("expected", "files"),
    [
        (6, {}),
        (6, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}),
        (2, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}),
        (1, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}),
        (6, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}),
        (3, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}),
        (
            4,
            {
                "proc/self/cgroup": "5:memory:/m\n3:cpu,cpuacct:/pod\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
            },
        ),
    ],
    ids=["none", "max", "v2", "less than one", "more than there are", "above", "v1"],
)
def test_cores_are_those_of_the_affinity_and_the_least_quota(
    tmp_path: Path, expected: int, files: dict[str, str]
) -> None:
    assert num_cores(written(tmp_path, files)) == expected


def test_an_engine_has_no_more_workers_than_its_process_may_run_on() -> None:
    assert 1 <= len(device_names(None)) <= 6
