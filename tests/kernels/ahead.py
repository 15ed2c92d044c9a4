"""Compiles kernels ahead of time, for a GPU that is not there, and reads what they use of it.

A kernel is compiled just as its launcher in ``triton.py`` would launch it: the launcher is called with tensors of
any device (meta tensors do: nothing is run), its launches are recorded, and each is compiled for an architecture:

    with recorded_launches() as launches:
        gather_rows_on_device(arena, ...)
    for launch in launches:
        assert compile_ahead(launch, 90).stack_bytes == 0

Needs Triton, imported without TRITON_INTERPRET=1 (see ``needs_compiler``).
"""

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import pytest
import torch

ARCHITECTURES = (80, 90, 100)
"""The compute capabilities, times ten, that every kernel is compiled for."""

POINTERS = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
DIVISIBLE = [["tt.divisibility", 16]]

Paths: TypeAlias = dict[tuple[int, ...], Any]
"""By the number of an argument, followed by its place in a tuple if it is in one."""

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler: pip install triton, and do not set TRITON_INTERPRET",
)


class Launch(NamedTuple):
    """One recorded launch: a ``triton.JITFunction`` and the arguments and options it was launched with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


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
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.arg_names}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        launches.append(Launch(self, tuple(grid(arguments) if callable(grid) else grid), arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


def compile_ahead(launch: Launch, architecture: int) -> Compiled:
    """Compiles a recorded launch for ``architecture`` (90 is sm_90), specialised as it would be on a device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, *specialise(launch))
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    registers, stack_bytes = resource_usage(compiled.asm["cubin"])
    return Compiled(launch.kernel.__name__, registers, stack_bytes, compiled.metadata.shared, compiled.asm["ptx"])


def specialise(launch: Launch) -> tuple[dict[str, Any], Paths, Paths]:
    """What a launch compiles its kernel for: the arguments' types, constants and attributes.

    Launches of a kernel for which all three are equal share one compiled kernel.
    """
    signature: dict[str, Any] = {}
    constants: Paths = {}
    attributes: Paths = {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        signature[parameter.name] = type_of(value, parameter, (parameter.num,), constants, attributes)
    return signature, constants, attributes


def type_of(value: Any, parameter: Any, path: tuple[int, ...], constants: Paths, attributes: Paths) -> Any:
    """An argument's type in a kernel's signature; enters constants and divisible values under their path.

    Specialises as a launch does: the integer 1 is a constant, and pointers and integers may be multiples of 16. What
    a parameter says against that holds for itself, not for what is in a tuple.
    """
    if parameter.is_constexpr or value is None:
        constants[path] = value
        return "constexpr"
    if isinstance(value, tuple):
        return tuple(type_of(item, parameter, (*path, k), constants, attributes) for k, item in enumerate(value))
    is_special = len(path) > 1 or not parameter.do_not_specialize
    is_aligned = is_special and (len(path) > 1 or not parameter.do_not_specialize_on_alignment)
    if isinstance(value, torch.Tensor):
        if is_aligned and value.storage_offset() * value.element_size() % 16 == 0:
            attributes[path] = DIVISIBLE
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if not isinstance(value, int):
        raise TypeError(f"{parameter.name}: cannot pass {type(value).__name__} to a kernel")
    if value == 1 and is_special:
        constants[path] = 1
        return "constexpr"
    if value % 16 == 0 and is_aligned:
        attributes[path] = DIVISIBLE
    return "i32" if -(2**31) <= value < 2**31 else "i64"


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
