"""Compiles for a wheel what an engine calls, so that who installs it need not.

    python -m tools.compile_ahead FOLDER

FOLDER holds the package ``cellrt``, of which ``setup.py`` makes the wheel; what is compiled lies in it afterwards. The
scheduler is compiled for the least of the processors of ``cellrt.native.baselines`` that this machine can run, and
the kernels of ready-made cells for each of these that it can run: a machine takes those of its own width.

The Python, Numba and llvmlite that this runs with are those whose users find it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def compile_scheduler() -> None:
    """Compile what each engine calls. Raise RuntimeError if some of it depends on how wide a machine is."""
    from numba.core.dispatcher import Dispatcher

    from cellrt.native.kept_code import SOURCES
    from cellrt.worker.cpu.warm_up import warm_up

    warm_up()
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("cellrt.")]
    for module in modules:
        functions = [value for value in vars(module).values() if isinstance(value, Dispatcher) and value.signatures]
        own = [function for function in functions if function.py_func.__module__ == module.__name__]
        if own and "cellrt.products.vectors" in SOURCES.modules(module.__name__, str(module.__file__)):
            raise RuntimeError(f"the scheduler is compiled for all widths, and {module.__name__} is written for one")


def compile_cells() -> None:
    """Compile the kernels of ready-made recurrent cells."""
    import torch

    from cellrt import cell, cells, ragged, rows

    size = 8
    x, h, token = {"x": rows(size)}, {"h": rows(size)}, {"token": rows(dtype=torch.int64)}
    states, children = h | {"c": rows(size)}, {name: ragged(size) for name in "hc"}
    pair = {f"{name}_{side}": rows(size) for side in ("left", "right") for name in "hc"}
    made = (
        (cells.LSTMCell(size, size), x | states),
        (cells.GRUCell(size, size), x | h),
        (cells.LSTMInput(size, size), x),
        (cells.GRUInput(size, size), x),
        (cells.EmbeddingLSTMCell(size, size, size), token | states),
        (cells.EmbeddingGRUCell(size, size, size), token | h),
        (cells.EmbeddingLSTMDecoder(size, size, size, 0), token | states),
        (cells.EmbeddingGRUDecoder(size, size, size, 0), token | h),
        (cells.TreeLSTMLeaf(size, size), x),
        (cells.EmbeddingTreeLSTMLeaf(size, size, size), token),
        (cells.BinaryTreeLSTMCell(None, size), pair),
        (cells.ChildSumTreeLSTMCell(size, size), x | children),
        (cells.Projection(size, size), h),
        (cells.ProjectionArgmax(size, size, 0), h),
    )
    for module, inputs in made:
        form = cell(module, inputs).compiled_form
        if form is None or not form.function.address:
            raise RuntimeError(f"{type(module).__name__} has no compiled form")


WORK = {"plain": compile_scheduler, "vector": compile_cells}


def compile_into(folder: Path) -> None:
    """Compile all for the package in a folder, into it."""
    sys.path.insert(0, str(folder))
    from numba.core.registry import cpu_target

    from cellrt.native.baselines import BASELINES, BROUGHT
    from cellrt.native.kept_code import SOURCES_FILE

    shutil.rmtree(BROUGHT, ignore_errors=True)
    processor = cpu_target.target_context.codegen().magic_tuple()
    runnable = [each for each in BASELINES if each.can_run(processor)]
    if not runnable:
        raise SystemExit(f"this machine can run code of none of {', '.join(each.name for each in BASELINES)}")
    for what in WORK:
        for each in runnable[-1:] if what == "plain" else runnable:
            print(f"cellrt: compiles {what} code for {each.name}", flush=True)
            with tempfile.TemporaryDirectory() as cache:
                environment = {
                    "NUMBA_CPU_NAME": each.name,
                    "NUMBA_CPU_FEATURES": each.told,
                    "NUMBA_CACHE_DIR": cache,
                    "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), *sys.path]),
                }
                command = [sys.executable, "-m", "tools.compile_ahead", what]
                subprocess.run(command, env=os.environ | environment, cwd=cache, check=True)
                target = each.folder(what == "vector")
                target.mkdir(parents=True)
                for path in Path(cache).rglob("*.code"):
                    shutil.copy(path, target)
                for path in Path(cache).rglob(SOURCES_FILE):
                    shutil.copy(path, BROUGHT)


if __name__ == "__main__":
    (asked,) = sys.argv[1:]
    if asked in WORK:
        WORK[asked]()
    else:
        compile_into(Path(asked).resolve())
