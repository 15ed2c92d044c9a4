"""The cache of compiled functions on disk, under names that tell two functions apart in any two processes.

Numba's own cache has three faults that end in wrong numbers. It distinguishes the symbols of functions with one
qualified name and signature by a counter that each process begins anew. So the code of two processes may have one
symbol for two bodies, and a process that loads both is linked with either. It checks the file of a function and not
those of its callees. And two processes that write at the same time may leave one function's code under the other's key.
So here

- a symbol has a digest of the function's code, of its closure's contents and of its sources (``sources.py``) in place
  of the counter, and so have the functions of others (Numba's own, a user's) that are compiled on the way;
- code with any other symbol is not kept;
- each signature is one file, which begins with a digest of everything that its content comes from.

The code of an installation (``baselines.py``) is read if none was kept for this very processor.

If nothing can be written, compiled code lasts as long as the process, and a warning says what to set.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy as np
from numba.core import config, types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import _Cache, _CacheLocator
from numba.core.compiler import Compiler
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from cellrt.native.baselines import BROUGHT, Processor, brought_for
from cellrt.native.parts import PartLibrary, rebuilt
from cellrt.native.sources import LIBRARIES, Sources
from cellrt.native.thrift import thrift

Function = Callable[..., Any]

FORMAT = 1
"""The version of the files' format; files of earlier versions of cellrt, in Numba's own format, are never read."""
_DIGITS = 32
_OURS = re.compile(rf"B{_DIGITS + 1}v[0-9a-f]{{{_DIGITS}}}B")
"""The digest in a mangled name that ``_identify`` put in place of Numba's counter."""
_PLAIN_NAME = re.compile(r"(?!_Z|cfunc\._Z)")
"""The names of the few functions of Numba's runtime, which are the same for a version of Numba."""

_plain_identity = FunctionIdentity.from_function.__func__
_numbers = itertools.count()
_owners: dict[str, weakref.ref[type]] = {}
"""The compiler that uses a digest in this process, by the digest."""
_warned: list[Path] = []
_stamps: weakref.WeakKeyDictionary[Function, str] = weakref.WeakKeyDictionary()
"""The stamps of functions when their modules were imported: later their files may have changed."""


class NotToldError(Exception):
    """An error: a function depends on something for which no digest exists."""


def folders_for(file: str) -> tuple[Path, ...]:
    """Return the folders where the code of a file's functions may be.

    They are the folder of ``NUMBA_CACHE_DIR``, one beside the file, and one of the user's, as Numba has it. The first
    of the result is the one to write to: the first that can be written to, if any.
    """
    return _folders_for(os.path.dirname(os.path.abspath(file)), config.CACHE_DIR)


@cache
def _folders_for(source_folder: str, named: str) -> tuple[Path, ...]:
    inner = _CacheLocator.get_suitable_cache_subpath(os.path.join(source_folder, "any.py"))
    folders = [Path(named, inner)] if named else []
    folders.append(Path(source_folder, "__pycache__"))
    users = Path(AppDirs(appname="numba", appauthor=False).user_cache_dir, inner)
    if users.is_absolute():  # without a home it is none
        folders.append(users)
    kept_in = next(filter(_can_be_written, folders), folders[0])
    return kept_in, *(each for each in folders if each != kept_in)


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


SOURCES_FILE = f"cellrt-sources.{sys.implementation.cache_tag}.json"
SOURCES = Sources(folders_for(__file__)[0] / SOURCES_FILE, BROUGHT / SOURCES_FILE)


def named_compiler(options: object, is_part: bool = False) -> type[Compiler]:
    """Return a compiler for one function with these options: its symbols have digests in place of numbers.

    ``is_part``: only compiled code calls it (``parts.py``).

    While it works, the same holds for all functions that are compiled on the way. Numba lets one thread compile at a
    time, so this touches no other thread's functions.
    """

    class NamedCompiler(Compiler):  # type: ignore[misc]
        def compile_extra(self, func: Function) -> Any:
            outer = FunctionIdentity.__dict__["from_function"]
            owner = type(self)

            def identify(cls: Any, function: Any) -> Any:
                made = _plain_identity(cls, function)
                name = _name_of(made.func)
                made.unique_id = _own_name(name, options, owner) if function is func else name
                made.unique_name = f"{made.func_qualname}${made.unique_id}"
                return made

            if is_part:
                self.state.library = PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
            FunctionIdentity.from_function = classmethod(identify)
            try:
                with thrift():
                    return super().compile_extra(func)
            finally:
                FunctionIdentity.from_function = outer

    return NamedCompiler


def _name_of(function: Any) -> str:
    """Return the name of a function in its symbols: a digest of its content, or a number if there is no digest."""
    try:
        return content_of(function)[:_DIGITS]
    except NotToldError:
        return f"only{next(_numbers)}"


def _own_name(name: str, options: object, owner: type) -> str:
    """Return the name of a function that has a compiler of its own.

    If another function of the same content was compiled in this process, maybe with other constants, it gets a number
    in its name, and is not kept.
    """
    if len(name) == _DIGITS:
        name = _digest_of((name, str(options)))[:_DIGITS]
    known = _owners.get(name)
    if known is not None and known() not in (None, owner):
        return f"{name}_{next(_numbers)}"
    _owners[name] = weakref.ref(owner)
    return name


def content_of(function: Any, outer: tuple[object, ...] = ()) -> str:
    """Return a digest of a Python function: of its names, code, closure, defaults, and the sources of its module.

    Raise NotToldError if it holds something else than numbers, texts, dtypes, arrays, types, functions and tuples of
    these, or its source is no file.
    """
    if any(function is each for each in outer):
        return "itself"
    outer = (*outer, function)
    digest = hashlib.sha256()
    for text in _parts_of(function, outer):
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()


def _parts_of(function: Any, outer: tuple[object, ...]) -> Iterator[str]:
    yield str(function.__module__)
    yield function.__qualname__
    yield _told_of_code(function.__code__, function.__doc__, outer)
    yield _stamp_of(function)
    for held in (function.__defaults__, *(function.__kwdefaults__ or {}).items()):
        yield _told(held, outer)
    for cell in function.__closure__ or ():
        try:
            yield _told(cell.cell_contents, outer)
        except ValueError:
            raise NotToldError from None  # nothing is in it yet


def _told_of_code(code: CodeType, docstring: str | None, outer: tuple[object, ...]) -> str:
    """Return the parts of code that distinguish it.

    Its docstring does not, which is the first of its constants, nor do its flags, which Numba changes under a profiler.
    """
    skipped = docstring is not None and code.co_consts[:1] == (docstring,)
    consts = [_told(each, outer) for each in code.co_consts[skipped:]]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {names} {counts} {consts}"


def _told(value: Any, outer: tuple[object, ...]) -> str:
    """Return the text that distinguishes a value in compiled code. Raise NotToldError if there is none."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes | np.dtype):
        return f"{kind} {value!r}"
    if isinstance(value, CodeType):
        return f"{kind} {_told_of_code(value, None, outer)}"
    if isinstance(value, tuple | frozenset):
        inner = [_told(each, outer) for each in value]
        return f"{kind} {sorted(inner) if isinstance(value, frozenset) else inner}"
    if isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
        return f"{kind} {value.dtype!r} {value.shape} {value.strides} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, types.Type):
        return f"{kind} {value!r}"
    if isinstance(value, Dispatcher):
        return f"{kind} {sorted(value.targetoptions.items())} {content_of(value.py_func, outer)}"
    if isinstance(value, FunctionType):
        return f"{kind} {content_of(value, outer)}"
    if str(getattr(value, "__module__", "")).partition(".")[0] in LIBRARIES and hasattr(value, "__qualname__"):
        return f"{kind} {value.__module__}.{value.__qualname__}"
    raise NotToldError


def _stamp_of(function: Any) -> str:
    """Return the stamp of a function's sources. Numba's own are known by its version."""
    known = _stamps.get(function)
    if known is not None:
        return known
    name = str(function.__module__)
    if name.partition(".")[0] in LIBRARIES:
        return ""
    try:
        return SOURCES.stamp(_real_name(function), function.__code__.co_filename)
    except OSError:
        raise NotToldError from None


def _real_name(function: Any) -> str:
    """Return the name of a function's module, also if Python runs that module as a program."""
    spec = function.__globals__.get("__spec__")
    return str(function.__module__) if spec is None else spec.name


class KeptCode(_Cache):  # type: ignore[misc]
    """A dispatcher's or C function's cache: one file a signature.

    Args:
        function: the function to compile. Its sources are read now.
        options: the options that it is compiled with.
    """

    def __init__(self, function: Function, options: object = "") -> None:
        self._function, self._options, self._is_enabled = function, str(options), True
        self._file = function.__code__.co_filename
        try:
            _stamps[function] = SOURCES.stamp(_real_name(function), self._file)
        except OSError:  # as of what is typed at a prompt
            self._is_enabled = False

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(folders_for(self._file)[0])

    def enable(self) -> None:
        """Keep code, as it does from the start."""
        self._is_enabled = True

    def disable(self) -> None:
        """Keep no code."""
        self._is_enabled = False

    def flush(self) -> None:
        """Remove the code that it keeps of the function, for all signatures."""
        for path in folders_for(self._file)[0].glob(f"{self._stem()}-*"):
            path.unlink(missing_ok=True)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature, if it was kept and everything that it was made of is the same."""
        target_context.refresh()
        processor = target_context.codegen().magic_tuple()
        try:
            key, content = self._key(sig)
        except NotToldError:
            return None
        places = [(folder, processor) for folder in folders_for(self._file)] + brought_for(processor)
        for folder, compiled_for in places:
            name, first_line = _place(key, content, compiled_for)
            payload = _read(folder / name, first_line)
            if payload is not None:
                return rebuilt(target_context, payload)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for a signature, if its symbols are unique and there is a folder to write to."""
        if not self._is_enabled or not can_be_kept(data):
            return
        try:
            name, first_line = _place(*self._key(sig), data.codegen.magic_tuple())
        except NotToldError:
            return
        content = first_line + dumps(data._replace(type_annotation="")._reduce())  # a text that is never read
        folder = folders_for(self._file)[0]
        partial = folder / f"{name}.{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(content)
                os.replace(partial, folder / name)  # it is never found half written
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            _warn_once(folder, error)

    def _stem(self) -> str:
        module = os.path.splitext(os.path.basename(self._file))[0]
        return re.sub(r"[^\w.]", "", f"{module}.{self._function.__qualname__}")

    def _key(self, signature: Any) -> tuple[_Key, str]:
        """Return the key of a signature, and the digest of the function's content.

        Raise NotToldError if there is none.
        """
        if not self._is_enabled:
            raise NotToldError
        content = content_of(self._function)
        held = [_told(cell.cell_contents, (self._function,)) for cell in self._function.__closure__ or ()]
        names = self._function.__module__, self._function.__qualname__
        return _Key(self._stem(), (*names, self._options, str(signature), held)), content


class _Key(NamedTuple):
    """The key of a signature: the beginning of its file's name, and all of its parts."""

    stem: str
    parts: tuple[object, ...]


def _place(key: _Key, content: str, processor: Processor) -> tuple[str, bytes]:
    """Return the name of a signature's file for a processor, and its first line, a digest of what it comes from."""
    parts = [*key.parts, processor]
    name = f"{key.stem}-{_digest_of(parts)[:16]}.{sys.implementation.cache_tag}.code"
    return name, f"cellrt {FORMAT} {_digest_of([*_versions(), *parts, content])}\n".encode()


def _read(path: Path, first_line: bytes) -> Any:
    """Return the content of a file with this first line, if it is there and whole."""
    try:
        with path.open("rb") as file:
            return pickle.load(file) if file.readline() == first_line else None
    except Exception:  # besides OSError: half of a file, of a disk that was full or a machine that lost its power
        return None


def can_be_kept(made: Any) -> bool:
    """Return whether a compiled function can be kept: it holds no addresses, and content names all its symbols."""
    if made.library.has_dynamic_globals or any(not each.can_cache for each in made.lifted):
        return False
    return all(map(is_ours, symbols_of(made.library._final_module)))


def symbols_of(module: Any) -> Iterator[str]:
    """Yield the functions and variables that an LLVM module defines for others."""
    for value in itertools.chain(module.functions, module.global_variables):
        if not value.is_declaration and value.linkage.name not in ("internal", "private"):
            yield value.name


def is_ours(symbol: str) -> bool:
    """Return whether a symbol belongs to one body only."""
    return bool(_OURS.search(symbol) or _PLAIN_NAME.match(symbol))


def _versions() -> list[object]:
    """Return everything besides its sources that changes compiled code. Python without assertions compiles none."""
    flags = (sys.flags.optimize, config.BOUNDSCHECK, config.DEBUGINFO_DEFAULT)
    return [FORMAT, numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, *flags]


def _digest_of(parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _warn_once(folder: Path, error: OSError) -> None:
    if not _warned:
        _warned.append(folder)
        warnings.warn(
            f"cellrt cannot keep what it compiles: {folder} cannot be written to ({error.strerror or error}). It goes "
            "on in memory, and compiles the same again in each process, which takes minutes: set NUMBA_CACHE_DIR to a "
            "folder that can be written to and that lasts",
            RuntimeWarning,
            stacklevel=2,
        )
