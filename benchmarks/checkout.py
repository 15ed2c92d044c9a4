"""The commit of the repository that runs, for records of measurements. Uses the standard library alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit(folder: Path) -> str:
    """Return the short hash of the checkout at ``folder``, or ``unknown``; ``-dirty`` where a file differs.

    Where there is no git, the environment variable CELLRT_COMMIT may tell it.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("CELLRT_COMMIT", "unknown")
    return answer.stdout.strip() or "unknown"
