"""The memory that this process may still take: the machine's free memory, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cellrt.worker.control_groups import ROOT, ControlGroup, control_groups

STRICT = "2"
"""The value of ``vm.overcommit_memory`` at which requested memory counts, whether it is used or not."""


def free_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes of host memory that are free for this process; None if the system does not say.

    ``root`` has ``proc`` and ``sys``.
    """
    found = [*_of_machine(root), *_of_groups(root)]
    return max(0, min(found)) if found else None


def _of_machine(root: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError, KeyError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        yield kib["MemAvailable"] << 10
        if (root / "proc/sys/vm/overcommit_memory").read_text().strip() == STRICT:
            yield (kib["CommitLimit"] - kib["Committed_AS"]) << 10


def _of_groups(root: Path) -> Iterator[int]:
    for group in control_groups("memory", root):
        with suppress(OSError, ValueError, IndexError, KeyError):  # no such file, or "max"
            yield _left_in(group)


def _left_in(group: ControlGroup) -> int:
    """Return the bytes that a group may still take. Pages of files that were not used lately count as free."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if group.is_v1 else ("memory.max", "memory.current")
    limit, used = (int((group.folder / name).read_text()) for name in names)
    counts = dict(line.split() for line in (group.folder / "memory.stat").read_text().splitlines())
    return limit - used + int(counts["total_inactive_file" if group.is_v1 else "inactive_file"])
