"""The import path: a model's folder comes first, like a program's. Also a test for paths that are checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path


def make_importable(folder: str) -> None:
    """Put a folder first on the import path, as Python does with the folder of the program that it runs."""
    if sys.path[:1] != [folder]:
        sys.path[:] = [folder, *(path for path in sys.path if path != folder)]


def said(error: BaseException) -> str:
    """Return the error of an import as text, with advice for a missing module."""
    is_missing = isinstance(error, ModuleNotFoundError)
    hint = ": install it, or have PYTHONPATH name the folder that it is in" if is_missing else ""
    return f"{type(error).__name__}: {error}{hint}"


def is_checkpoint(path: str) -> bool:
    """Return whether a path is that of a checkpoint: a folder with a config.json, or a GGUF file."""
    return path.endswith(".gguf") or (Path(path) / "config.json").is_file()
