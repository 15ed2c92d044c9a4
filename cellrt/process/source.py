"""The source of a model: an import path, the same in the engine's process and in every client's.

A checkpoint, a folder or a GGUF file, is read by the engine's process alone; clients make the model of its outline.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from cellrt.definition.cell import Cell
from cellrt.errors import DefinitionError
from cellrt.graph.unfolder import Unfolder
from cellrt.process.imports import is_checkpoint, make_importable, said
from cellrt.worker.python_process import importing

OF_FILES = "_cellrt_model_"
"""The beginning of the names of modules that were loaded from files."""
_LOADING = threading.RLock()  # a module may load another
EXPECTED = (
    "expected 'module:attribute', 'file.py:attribute' or 'checkpoint:name', or a model that is an attribute of its "
    "module"
)
READER = "cellrt.language.served:load"
"""The function that makes a model of a checkpoint's path and a name."""


class _NoAttributeError(Exception):
    """An imported object lacks an attribute that its path names."""


class ModelSource:
    """The path of a model: ``module:attribute``, ``file.py:attribute`` or ``checkpoint:name``.

    The attribute is an unfolder, or a function without arguments that makes it. A checkpoint is a folder or GGUF file,
    and
    the name is that of its model. ``text`` is the path, a file's absolute. Raises DefinitionError for any other.
    """

    def __init__(self, given: object) -> None:
        path, _, name = given.rpartition(":") if isinstance(given, str) else ("", "", "")
        self._is_checkpoint = is_checkpoint(path)
        if not path or not name or not (self._is_checkpoint or all(map(str.isidentifier, name.split(".")))):
            raise DefinitionError(f"{EXPECTED}, got {given!r:.200}")
        if path.endswith(".py") or self._is_checkpoint:
            path = str(Path(path).resolve())
        self.text = f"{path}:{name}"
        self._path, self._name = path, name

    def __repr__(self) -> str:
        return f"ModelSource({self.text!r})"

    def load(self) -> Unfolder:
        """Return the model, in this process. Raise DefinitionError, whatever the import raised."""
        try:
            if self._is_checkpoint:
                read: Unfolder = named(READER)(self._path, self._name)
                return read
            with importing():
                found: Any = (
                    module_of_file(self._path) if self._path.endswith(".py") else importlib.import_module(self._path)
                )
                for part in self._name.split("."):
                    found = self._attribute(found, part)
                model = found if isinstance(found, Unfolder | Cell) or not callable(found) else found()
        except _NoAttributeError as error:
            raise DefinitionError(f"model {self.text!r}: {error}") from None
        except (Exception, SystemExit) as error:
            raise DefinitionError(f"model {self.text!r}: {said(error)}") from error
        if not isinstance(model, Unfolder):
            what = f"cell {model.name!r}" if isinstance(model, Cell) else type(model).__name__
            raise DefinitionError(f"model {self.text!r}: expected what @cellrt.unfold makes, got {what}")
        return model

    def _attribute(self, owner: object, name: str) -> Any:
        try:
            return getattr(owner, name)
        except AttributeError:
            models = [each for each, value in getattr(owner, "__dict__", {}).items() if isinstance(value, Unfolder)]
            where = self._path if isinstance(owner, ModuleType) else f"{owner!r:.80}"
            raise _NoAttributeError(f"{where} has no {name!r}; the models there are {models}") from None


def named(text: str) -> Callable[..., Any]:
    """Return the function of cellrt's own that ``module:function`` names."""
    module, _, name = text.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def made_of(outline: Mapping[str, Any]) -> Unfolder:
    """Return the model of an outline (see ``Unfolder``). Raise DefinitionError, whatever its maker raised."""
    try:
        model = named(outline["maker"])(outline["value"])
    except Exception as error:
        raise DefinitionError(f"model of {outline['maker']}: {said(error)}") from error
    if not isinstance(model, Unfolder):
        raise DefinitionError(f"{outline['maker']}: expected a model, got {type(model).__name__}")
    return model


def source_of(model: object) -> ModelSource:
    """Return the source of a model that is given itself, or by its path. Raise DefinitionError if it has none."""
    if not isinstance(model, Unfolder):
        return ModelSource(model)
    module = sys.modules.get(model.function.__module__)
    names = [name for name, value in vars(module).items() if value is model] if module is not None else []
    if module is None or not names or module.__name__ == "__main__":
        raise DefinitionError(
            f"model {model.name!r} cannot be found from another process: {EXPECTED} "
            "(the program that is run, __main__, is no such module)"
        )
    origin = getattr(module, "__file__", None)
    is_file = module.__name__.startswith(OF_FILES) and origin is not None
    return ModelSource(f"{origin if is_file else module.__name__}:{names[0]}")


class _Anew(SourceFileLoader):
    """A loader that reads a file as it is now, not its bytecode.

    Python uses bytecode on disk while size and second of a file's last change agree.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the file, as ``importlib`` requires."""
        return self.source_to_code(self.get_data(self.path), self.path)


def module_of_file(path: str) -> ModuleType:
    """Return the module of a file, loaded anew when the file has changed. Raise what the module raises.

    It may import modules beside it, then and later. The module before, which may be large, stays only as long as
    something
    of it is used.
    """
    content = hashlib.blake2b(path.encode() + b"\0" + Path(path).read_bytes(), digest_size=8)
    name = OF_FILES + content.hexdigest()
    with _LOADING:  # other threads wait until it is whole
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path, loader=_Anew(name, path))
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        make_importable(str(Path(path).resolve().parent))
        try:
            with importing():
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        for before, known in list(sys.modules.items()):
            if before.startswith(OF_FILES) and known is not module and known.__file__ == path:
                del sys.modules[before]
        return module
