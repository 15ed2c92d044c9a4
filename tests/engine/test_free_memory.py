"""How much memory there is: the least of what the machine has free and what control groups allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellrt.worker.free_memory import free_bytes
from tests.engine.test_cores import written

MACHINE = {
    "proc/meminfo": "MemTotal: 8000 kB\nMemAvailable:    4000 kB\nCommitLimit: 3000 kB\nCommitted_AS: 2000 kB\n",
    "proc/sys/vm/overcommit_memory": "0\n",
}
V2 = {"proc/self/cgroup": "0::/pod/box\n"}


def group(folder: str, limit: str) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": "500000\n",
        f"{folder}/memory.stat": "anon 5\ninactive_file 100000\n",
    }


@pytest.mark.parametrize(
    ("expected", "files"),
    [
        (None, {}),
        (4000 << 10, MACHINE),
        (1000 << 10, MACHINE | {"proc/sys/vm/overcommit_memory": "2\n"}),
        (4000 << 10, MACHINE | V2 | group("sys/fs/cgroup/pod/box", "max")),
        (600_000, MACHINE | V2 | group("sys/fs/cgroup/pod/box", "1000000")),
        (600_000, MACHINE | V2 | group("sys/fs/cgroup/pod", "1000000")),
        (0, MACHINE | V2 | group("sys/fs/cgroup/pod", "300000")),
        (
            300_000,
            MACHINE
            | {
                "proc/self/cgroup": "5:memory:/pod\n3:cpu,cpuacct:/\n",
                "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "1000000\n",
                "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": "800000\n",
                "sys/fs/cgroup/memory/pod/memory.stat": "cache 7\ntotal_inactive_file 100000\n",
            },
        ),
    ],
    ids=["unknown", "machine", "strict", "no limit", "v2", "above", "none left", "v1"],
)
def test_what_is_free_is_the_least_that_any_limit_leaves(
    tmp_path: Path, expected: int | None, files: dict[str, str]
) -> None:
    assert free_bytes(written(tmp_path, files)) == expected


def test_this_machine_says_how_much_is_free() -> None:
    assert (free_bytes() or 0) > 1 << 20
