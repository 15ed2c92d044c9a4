"""The control groups of this process, which have a container's limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class ControlGroup(NamedTuple):
    """A folder with the files of one controller's limits; those of version 1 have other names."""

    folder: Path
    is_v1: bool


def control_groups(controller: str, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Yield the groups that limit this process: its own, and those above them. ``root`` has ``proc`` and ``sys``.

    Some of the folders may not exist: a container may see its own group at the root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted, group = root / "sys/fs/cgroup" / (controller if controllers else ""), Path(path.strip("/"))
        for each in (group, *group.parents):
            yield ControlGroup(mounted / each, bool(controllers))
