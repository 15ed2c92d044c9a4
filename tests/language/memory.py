"""What memory a process has for itself: what it would cost to run one more."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def can_tell() -> bool:
    """Whether the system says so."""
    return Path("/proc/self/smaps").exists()


def trim() -> None:
    """Give back what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def own_bytes(process: int | str = "self") -> int:
    """Bytes in memory, without pages of libraries and other code that are as they are in their files: all processes
    share those. With pages of weights' files, and of files without a name."""
    total, is_code = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            path = line.split(maxsplit=5)[5:]
            is_code = bool(path) and path[0].startswith("/") and not _is_of_weights(path[0])
        elif key == ("Anonymous:" if is_code else "Rss:"):
            total += 1024 * int(rest.split()[0])
    return total


def files_of(process: int) -> set[str]:
    """The names of the files that a process has mapped."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {path for line in lines for path in line.split(maxsplit=5)[5:]}


def _is_of_weights(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", "(deleted)"))
