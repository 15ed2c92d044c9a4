"""Models by what an operator calls them: by import path, by file, or by the name of one that comes with cellrt."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from cellrt.errors import DefinitionError

NAMES = {"g2p": "cellrt.demo.g2p:make_g2p"}
"""Models that come with cellrt."""


def sources_of(given: Sequence[str]) -> tuple[str, ...]:
    """The import paths of models. Raises DefinitionError if one is not there."""
    return tuple(source_of(text) for text in given)


def source_of(text: str) -> str:
    """The import path of a model: see ``cellrt.process.source``."""
    if text in NAMES:
        return NAMES[text]
    path, _, attribute = text.rpartition(":") if ":" in text else (text, "", "")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise DefinitionError(f"model {text!r}: there is no file {path}")
        path = str(Path(path).resolve())
        return f"{path}:{attribute or only_model(path)}"
    if not attribute:
        raise DefinitionError(
            f"model {text!r}: expected module:attribute, path.py:attribute, path.py, or one of {list(NAMES)}"
        )
    try:
        is_there = importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise DefinitionError(f"model {text!r}: there is no module {path!r}")
    return text


def only_model(path: str) -> str:
    """The name of the one model in a file. Raises DefinitionError if there are none or several."""
    from cellrt.graph.unfolder import Unfolder
    from cellrt.process.source import module_of_file

    try:
        found = [name for name, value in vars(module_of_file(path)).items() if isinstance(value, Unfolder)]
    except (Exception, SystemExit) as error:
        raise DefinitionError(f"{path}: {type(error).__name__}: {error}") from error
    if not found:
        raise DefinitionError(f"{path} has no model; a function in it that makes one is named as {path}:function")
    if len(found) != 1:
        raise DefinitionError(f"{path} has the models {found}: name one, as {path}:{found[0]}")
    return found[0]
