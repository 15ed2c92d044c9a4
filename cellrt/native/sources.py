"""The source files of a compiled function's machine code, and one digest of them.

Machine code contains that of the functions it calls and the constants of their modules. So kept code is valid only as
long as all these files are unchanged. A module's functions reach others only by the module's imports, anywhere in its
file: the digest is of the module and of all that it imports, directly or not. It does not count comments, docstrings,
line breaks or the time when a file was written: none of these changes compiled code.

Installed packages other than cellrt and the function's own count by the file that is imported, not by its own imports;
``LIBRARIES`` do not count.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

LIBRARIES = frozenset({"llvmlite", "numba", "numpy", "torch", *sys.stdlib_module_names})
"""The packages that do not count: a cache's key has their versions, or they reach no machine code of cellrt's."""
_OWN = __name__.partition(".")[0]
_INSTALLED = ("site-packages", "dist-packages")
_MOST_KNOWN = 4096


class Source(NamedTuple):
    """The parts of one file that matter.

    Attributes:
        digest: the digest of its code.
        imports: ``a.b`` for ``import a.b``, ``a.b:c`` for ``from a.b import c``, with the dots of relative ones.
        of_types: the imports for type checkers only, by name (a package may load them on demand): the same of these.
        names: the names that a package itself defines or imports; empty for a module.
    """

    digest: str
    imports: tuple[str, ...]
    of_types: dict[str, str]
    names: tuple[str, ...]


class _Found(NamedTuple):
    """The place of a module: its file, if it has one, and the folders of a package."""

    file: str | None
    folders: tuple[str, ...]


class _Module(NamedTuple):
    name: str
    file: str


_LOCATED: dict[str, _Found | None] = {}


class Sources:
    """Digests of modules. The parts of a file with known bytes are read from ``kept``.

    ``brought``: the same of an installation, which is only read.
    """

    def __init__(self, kept: Path | None, brought: Path | None = None) -> None:
        self._kept, self._brought = kept, brought
        self._known: dict[str, Source] = {}
        """The parts of files, by the digest of a file's bytes and whether it is a package."""
        self._is_read = False
        self._files: dict[str, tuple[tuple[int, int], Source]] = {}
        """The parts of files by path, with the file system's state when each was read."""
        self._stamps: dict[_Module, tuple[dict[str, tuple[int, int]], str]] = {}

    def stamp(self, name: str, file: str) -> str:
        """Return the digest of a module and of all that it imports. Raise OSError if the file cannot be read."""
        root = _Module(name, os.path.abspath(file))
        found = self._stamps.get(root)
        if found is not None and all(_state_of(path) == state for path, state in found[0].items()):
            return found[1]
        if not self._is_read:
            self._read()
        num_known = len(self._known)
        sources = self._closure(root)
        digest = hashlib.sha256()
        for module, source in sorted(sources.items()):
            digest.update(f"{module.name} {source.digest}\n".encode())
        self._stamps[root] = {module.file: self._files[module.file][0] for module in sources}, digest.hexdigest()
        if len(self._known) > num_known:
            self._write()
        return digest.hexdigest()

    def modules(self, name: str, file: str) -> set[str]:
        """Return the names of the modules whose code is part of a module's stamp."""
        return {module.name for module in self._closure(_Module(name, os.path.abspath(file)))}

    def _closure(self, root: _Module) -> dict[_Module, Source]:
        found: dict[_Module, Source] = {}
        waiting = [root]
        while waiting:
            module = waiting.pop()
            if module in found:
                continue
            found[module] = source = self._source(module.file)
            is_own = module is root or _top(module.name) in (_OWN, _top(root.name))
            if is_own or not _is_installed(module.file):
                waiting += self._imported(module, source)
        return found

    def _imported(self, module: _Module, source: Source) -> Iterator[_Module]:
        for text in source.imports:
            yield from self._modules_of(_absolute(module, text))

    def _modules_of(self, text: str, asking: tuple[str, ...] = ()) -> Iterator[_Module]:
        """Yield the modules that one import brings; for a package that is imported itself, all that are in it.

        ``asking``: the imports on the way to this one; a package may import a name from itself.
        """
        if text in asking:
            return
        dotted, _, name = text.partition(":")
        if _top(dotted) in LIBRARIES:
            return
        found, inner = _locate(dotted), _locate(f"{dotted}.{name}") if name and name != "*" else None
        if inner is not None:
            yield from _all_of(f"{dotted}.{name}", inner)
        if found is None or found.file is None:
            return
        if not name or name == "*":
            yield from _all_of(dotted, found)
            return
        package = _Module(dotted, found.file)
        source = self._source(found.file)
        if inner is None or name in source.names:
            yield package
        if name in source.of_types:
            yield from self._modules_of(_absolute(package, source.of_types[name]), (*asking, text))

    def _source(self, path: str) -> Source:
        state = _state_of(path)
        read = self._files.get(path)
        if read is None or read[0] != state:
            text, is_package = Path(path).read_bytes(), _is_package(path)
            key = hashlib.sha256(text).hexdigest() + (" package" if is_package else "")
            if not self._is_read:
                self._read()
            if key not in self._known:
                self._known[key] = read_source(text, is_package)
            self._files[path] = read = state, self._known[key]
        return read[1]

    def _read(self) -> None:
        self._is_read = True
        for path in (self._brought, self._kept):
            with suppress(OSError, ValueError, TypeError, AttributeError):
                if path is not None:
                    for key, (digest, imports, of_types, names) in json.loads(path.read_text()).items():
                        self._known[key] = Source(digest, tuple(imports), dict(of_types), tuple(names))

    def _write(self) -> None:
        """Keep what is known, in a file that is never found half written.

        If it cannot be written, others parse the files again.
        """
        if self._kept is None:
            return
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        partial = self._kept.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            partial.write_text(json.dumps(self._known))
            os.replace(partial, self._kept)


def read_source(text: bytes, is_package: bool = False) -> Source:
    """Return the parts of a file's text that matter; if Python cannot read it, all of it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Source(hashlib.sha256(text).hexdigest(), (), {}, ())
    imports: list[str] = []
    of_types: dict[str, str] = {}
    for_types: set[ast.AST] = set()
    # Collect imports, and remove strings that stand alone, before the tree is hashed.
    for node in ast.walk(tree):  # parents come before their children
        if isinstance(node, ast.If) and "TYPE_CHECKING" in (
            getattr(node.test, "id", ""),
            getattr(node.test, "attr", ""),
        ):
            for_types.update(inner for each in node.body for inner in ast.walk(each))
        told = _imports_of(node)
        if node in for_types:
            of_types.update(told)
        else:
            imports += told.values()
        for body in ("body", "orelse", "finalbody"):
            statements = getattr(node, body, None)
            if isinstance(statements, list):
                setattr(node, body, [each for each in statements if not _is_text(each)])
    names = {name for node in tree.body if is_package for name in _bound_by(node)}
    digest = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return Source(digest, tuple(dict.fromkeys(imports)), of_types, tuple(sorted(names)))


def _imports_of(node: ast.AST) -> dict[str, str]:
    """Return what an import brings, by the name that it gives it."""
    if isinstance(node, ast.Import):
        return {each.asname or each.name: each.name for each in node.names}
    if isinstance(node, ast.ImportFrom):
        return {each.asname or each.name: f"{'.' * node.level}{node.module or ''}:{each.name}" for each in node.names}
    return {}


def _is_text(statement: ast.AST) -> bool:
    """Return whether a statement is a string by itself, such as a docstring."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _bound_by(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement at the top level binds."""
    yield from _imports_of(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _absolute(module: _Module, text: str) -> str:
    """Return an import of a module, without the dots of a relative one."""
    named = text.lstrip(".")
    level = len(text) - len(named)
    if not level:
        return text
    parts = module.name.split(".")
    if not _is_package(module.file):
        level += 1
    package = ".".join(parts[: len(parts) - level + 1])
    return package + named if named.startswith(":") else f"{package}.{named}"


def _locate(name: str) -> _Found | None:
    """Return where a module lies. Nothing is imported for it."""
    if name not in _LOCATED:
        parent, _, last = name.rpartition(".")
        above = _locate(parent) if parent else None
        if (parent and above is None) or (not parent and (found := _locate_top(name)) is None):
            return None  # it may still come
        _LOCATED[name] = found if above is None else _locate_in(above, last)
    return _LOCATED[name]


def _locate_top(name: str) -> _Found | None:
    with suppress(ImportError, ValueError, AttributeError):
        module = sys.modules.get(name)
        spec = find_spec(name) if module is None else module.__spec__
        if spec is not None:
            file = spec.origin if spec.has_location and str(spec.origin).endswith(".py") else None
            return _Found(file, tuple(spec.submodule_search_locations or ()))
    return None


def _locate_in(package: _Found, name: str) -> _Found | None:
    for folder in package.folders:
        inner = os.path.join(folder, name)
        if os.path.isfile(file := os.path.join(inner, "__init__.py")):
            return _Found(file, (inner,))
        if os.path.isfile(file := f"{inner}.py"):
            return _Found(file, ())
        if os.path.isdir(inner):
            return _Found(None, (inner,))
    return None


def _all_of(name: str, found: _Found) -> Iterator[_Module]:
    """Yield a module, or all modules of a package; for an installed one that is not cellrt, only its own file."""
    if found.file is not None:
        yield _Module(name, found.file)
    if _top(name) != _OWN and any(map(_is_installed, found.folders)):
        return
    seen: set[str] = set()
    for top in found.folders:
        for folder, folders, files in os.walk(top, followlinks=True):
            if os.path.realpath(folder) in seen:  # a link to a folder around it
                folders.clear()
                continue
            seen.add(os.path.realpath(folder))
            folders[:] = [each for each in folders if each.isidentifier() and each != "__pycache__"]
            inner = ".".join([name, *Path(folder).relative_to(top).parts])
            for file in files:
                if file.endswith(".py"):
                    path = os.path.join(folder, file)
                    yield _Module(inner if file == "__init__.py" else f"{inner}.{file[:-3]}", path)


def _is_installed(path: str) -> bool:
    return any(part in _INSTALLED for part in Path(path).parts)


def _is_package(path: str) -> bool:
    return os.path.basename(path) == "__init__.py"


def _top(name: str) -> str:
    return name.partition(".")[0]


def _state_of(path: str) -> tuple[int, int]:
    """Return the state by which a change of a file while this process runs is noticed."""
    state = os.stat(path)
    return state.st_mtime_ns, state.st_size
