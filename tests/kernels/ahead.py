"""Compiles kernels ahead of time, for a GPU that is not there, and reads what they use of it.

A kernel is compiled just as its launcher in ``triton.py`` would launch it: the launcher is called with tensors of
any device (meta tensors do: nothing is run), its launches are recorded, and each is compiled for an architecture:

    with recorded_launches() as launches:
        triton.project_argmax(h, ...)
    for launch in launches:
        assert compile_ahead(launch, 90).stack_bytes == 0

Needs Triton, imported without TRITON_INTERPRET=1 (see ``needs_compiler``).
"""

import functools
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from cellrt import kernels

ARCHITECTURES = (80, 90, 100)
"""The compute capabilities, times ten, that every kernel is compiled for."""

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler: pip install triton, and do not set TRITON_INTERPRET",
)


class Launch(NamedTuple):
    """One recorded launch: a ``triton.JITFunction`` and the arguments and options it was launched with.

    ``specialization`` is what Triton's own binder makes of them: launches of a kernel with one ``key`` share one
    compiled kernel.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    specialization: list[tuple[Any, Any]]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """What Triton keeps the compiled kernel by; a launch with another one compiles it anew."""
        from triton.runtime.jit import compute_cache_key

        return f"{self.kernel.__name__} {compute_cache_key({}, self.specialization, self.options)}"


class Compiled(NamedTuple):
    """A kernel's assembly and what it uses. ``stack_bytes`` is local memory of a thread: 0 if nothing spills."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str


@contextmanager
def recorded_launches() -> Generator[list[Launch]]:
    """Within this context kernels are not run: their launches are put in the list."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments, specialization, options = binder_of(self)(*args, **kwargs)
        shape = tuple(grid(arguments) if callable(grid) else grid)
        launches.append(Launch(self, shape, arguments, specialization, options))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


@contextmanager
def launches_for_the_host() -> Generator[list[Launch]]:
    """The same, within which operations launch their kernels for tensors on the CPU too."""
    for name in [module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg]:
        with suppress(ModuleNotFoundError):  # Triton decides at their import whether they are interpreted
            importlib.import_module(f"cellrt.kernels.{name}.triton")
    with recorded_launches() as launches, mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        yield launches


@functools.cache
def binder_of(kernel: Any) -> Callable[..., tuple[dict[str, Any], list[tuple[Any, Any]], dict[str, Any]]]:
    """Triton's function from arguments to what a kernel is compiled for; it needs no device."""
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, backend_of(ARCHITECTURES[0]))


@functools.cache
def backend_of(architecture: int) -> Any:
    """Triton's compiler for an architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return make_backend(GPUTarget("cuda", architecture, 32))


def compile_ahead(launch: Launch, architecture: int) -> Compiled:
    """Compiles a recorded launch for ``architecture`` (90 is sm_90), specialised as it would be on a device."""
    import triton
    from triton.compiler import ASTSource

    backend = backend_of(architecture)
    kernel, arguments = launch.kernel, launch.arguments
    packed = kernel._pack_args(backend, dict(launch.options), arguments, launch.specialization, launch.options)
    options, *specialised = packed
    compiled = triton.compile(ASTSource(kernel, *specialised), target=backend.target, options=options.__dict__)
    registers, stack_bytes = resource_usage(compiled.asm["cubin"])
    return Compiled(kernel.__name__, registers, stack_bytes, compiled.metadata.shared, compiled.asm["ptx"])


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread of a compiled kernel, by the ``cuobjdump`` inside Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage:\n{printed}")
    return int(found[1]), int(found[2])


def compile_everywhere(launches: list[Launch]) -> Iterator[Compiled]:
    """Every launch compiled for every architecture."""
    for launch in launches:
        for architecture in ARCHITECTURES:
            yield compile_ahead(launch, architecture)
