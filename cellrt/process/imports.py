"""Where imports look: in a model's folder first, as in that of a program; and which paths are no code to import."""

from __future__ import annotations

import sys
from pathlib import Path


def make_importable(folder: str) -> None:
    """Has imports look into a folder first, as Python does with that of the program which it runs."""
    if sys.path[:1] != [folder]:
        sys.path[:] = [folder, *(path for path in sys.path if path != folder)]


def said(error: BaseException) -> str:
    """What an import raised, with what to do about a module that is not there."""
    is_missing = isinstance(error, ModuleNotFoundError)
    hint = ": install it, or have PYTHONPATH name the folder that it is in" if is_missing else ""
    return f"{type(error).__name__}: {error}{hint}"


def is_checkpoint(path: str) -> bool:
    """Whether a path is that of a model's files: a folder with a config.json, or a file of GGUF."""
    return path.endswith(".gguf") or (Path(path) / "config.json").is_file()
