"""The names of models on the command line: an import path, a file, or the name of a model that comes with cellrt."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from cellrt.errors import DefinitionError
from cellrt.process.imports import is_checkpoint, make_importable, said

NAMES = {"g2p": "cellrt.demo.g2p:make_g2p"}
"""The import paths of the models that come with cellrt."""


def sources_of(given: Sequence[str]) -> tuple[str, ...]:
    """Return the import paths of models. Raise DefinitionError if there is no such model."""
    return tuple(source_of(text) for text in given)


def source_of(text: str) -> str:
    """Return the import path of a model, as ``cellrt.process.source`` takes it.

    Afterwards its module can be imported here and in all processes that are started. For this the folder of a model's
    file, or else the current folder, is put on the import path. The path of a checkpoint (a folder or GGUF file) may
    have a name after it. Raise DefinitionError if there is no such model.
    """
    if text in NAMES:
        return NAMES[text]
    path, _, attribute = text.rpartition(":") if ":" in text and not is_checkpoint(text) else (text, "", "")
    if is_checkpoint(path):
        if not Path(path).exists():
            raise DefinitionError(f"model {text!r}: there is no file {path}")
        whole = Path(path).resolve()
        return f"{whole}:{attribute or whole.name.removesuffix('.gguf').replace(':', '-')}"
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise DefinitionError(f"model {text!r}: there is no file {path}")
        path = str(Path(path).resolve())
        make_importable(str(Path(path).parent))
        return f"{path}:{attribute or only_model(path)}"
    if not attribute:
        raise DefinitionError(
            f"model {text!r}: expected module:attribute, path.py:attribute, path.py, a checkpoint (a folder with a "
            f"config.json, or a file of GGUF), or one of {list(NAMES)}"
        )
    make_importable(str(Path.cwd()))
    try:
        is_there = importlib.util.find_spec(path) is not None
    except ValueError:
        is_there = False
    except Exception as error:  # one of its parent packages cannot be imported
        if not (isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}.")):
            raise DefinitionError(f"model {text!r}: {said(error)}") from error
        is_there = False
    if not is_there:
        raise DefinitionError(
            f"model {text!r}: there is no module {path!r} in {Path.cwd()}, nor installed; PYTHONPATH may name the "
            "folder that it is in"
        )
    return text


def only_model(path: str) -> str:
    """Return the name of the one model in a file. Raise DefinitionError if there are none or several."""
    from cellrt.graph.unfolder import Unfolder
    from cellrt.process.source import module_of_file

    try:
        found = [name for name, value in vars(module_of_file(path)).items() if isinstance(value, Unfolder)]
    except (Exception, SystemExit) as error:
        raise DefinitionError(f"{path}: {said(error)}") from error
    if not found:
        raise DefinitionError(f"{path} has no model; a function in it that makes one is named as {path}:function")
    if len(found) != 1:
        raise DefinitionError(f"{path} has the models {found}: name one, as {path}:{found[0]}")
    return found[0]
