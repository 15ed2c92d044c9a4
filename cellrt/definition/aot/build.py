"""The compiler of a step's program: ``python build.py OPERATORS PROGRAM LIBRARY NUM_WEIGHTS NUM_OUTPUTS``.

It is a process of its own, which needs nothing of cellrt but the files OPERATORS (``product_operator.py``,
``attention_operator.py`` and ``run_function.py``): compiling takes many seconds and holds the interpreter lock. It
writes LIBRARY, after its checksum with the suffix ``.sha256``. If the program cannot be compiled, for a reason that
will not pass, it writes LIBRARY with the suffix ``.refused`` instead: the name of the reason (of ``refusal.py``) and a
line. Of several processes that want the same library one compiles it, and on all the machine no more than half the
processors compile at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import runpy
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch._inductor.codegen.cpp import CppVecOverrides

CONFIGURATION: dict[str, Any] = {
    "cpp.threads": 1,  # one thread a worker; and with more, an index out of range would end the process
    "compile_threads": 1,
    "aot_inductor.enable_line_tables": False,
}
NEEDS_PYTHON = "aoti_torch_proxy_executor_call_function"


def build(operators_at: Sequence[str], program_at: Path, library_at: Path, num_weights: int, num_outputs: int) -> None:
    """Write the library, or the reason why there is none."""
    functions: dict[Any, list[str]] = {}
    for at in operators_at:
        functions |= runpy.run_path(at)["c_functions"]()
    configuration = {**CONFIGURATION, "aot_inductor.custom_ops_to_c_shims": functions}
    CppVecOverrides.expm1, CppVecOverrides.atanh = _of_vectors("expm1"), _of_vectors("atanh")  # type: ignore[method-assign]
    program = torch.export.load(program_at)
    given = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    examples = [_example(given[name]) for name in program.graph_signature.user_inputs]
    inputs_end = len(examples) - num_outputs
    program.example_inputs = ((examples[:num_weights], examples[num_weights:inputs_end], examples[inputs_end:]), {})
    with tempfile.TemporaryDirectory(dir=library_at.parent) as folder:
        package = Path(folder) / "step.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=configuration)
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
        called = [
            node["node"]["target"]
            for listed in Path(folder).rglob("*.wrapper.json")
            for node in json.loads(listed.read_text())["nodes"]
        ]
        if called or NEEDS_PYTHON in next(Path(folder).rglob("*.wrapper.cpp")).read_text():
            return _write(library_at.with_suffix(".refused"), f"NO_C_INTERFACE\n{', '.join(dict.fromkeys(called))}")
        library = next(Path(folder).rglob("*.so"))
        _write(library_at.with_suffix(".sha256"), hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(library, library_at)


def _of_vectors(name: str) -> Any:
    """Return what writes the call of torch's own function. The compiler's are shorter, as exp(x) - 1 for expm1, and
    lose the digits of small numbers.
    """
    return staticmethod(lambda x: f"{x}.{name}()")


def _example(value: torch.Tensor) -> torch.Tensor:
    """Return zeros of the sizes and strides of a traced tensor."""
    sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    strides = [stride if isinstance(stride, int) else stride.node.hint for stride in value.stride()]
    return torch.empty_strided(sizes, strides, dtype=value.dtype).zero_()


def _write(file: Path, text: str) -> None:
    """Write a file atomically."""
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, file)


def main() -> None:
    """Compile the program unless another process has done so meanwhile."""
    program_at, library_at = map(Path, sys.argv[2:4])
    os.nice(10)
    slot = int(library_at.stem[:8], 16) % max(1, (os.cpu_count() or 1) // 2)
    with (library_at.parent / f"compiler{slot}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library_at.exists() and not library_at.with_suffix(".refused").exists():
            build(sys.argv[1].split(os.pathsep), program_at, library_at, int(sys.argv[4]), int(sys.argv[5]))


if __name__ == "__main__":
    main()
