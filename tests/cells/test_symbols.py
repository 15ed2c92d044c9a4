"""Whatever of cellrt is compiled, no two bodies have one symbol: neither in this process nor among what is kept."""

from __future__ import annotations

import importlib
import os
import pickle
import pkgutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import numba
import pytest
from numba.core.dispatcher import Dispatcher

from cellrt.definition.compiled_form import TaskFunction
from cellrt.native import kept_code
from cellrt.native.parts import bitcode_of
from cellrt.products.packed import _multiply_four, multiply_three
from cellrt.worker.cpu.warm_up import warm_up
from tests.cells.every_cell import CASES, WITH_FORM, subject_of

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")

ROOMS = ("core", "native", "products", "definition", "worker.cpu", "worker.device", "cells", "unfolders")


def kept() -> Iterator[tuple[Path, str, set[str]]]:
    """Of each file that this version kept of cellrt's functions: its own symbol, and all that it defines."""
    for room in ROOMS:
        package = importlib.import_module(f"cellrt.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    folders = {
        folder
        for module in list(sys.modules.values())
        if module.__name__.startswith("cellrt.") and getattr(module, "__file__", None)
        for folder in kept_code.folders_for(str(module.__file__))
    }
    for folder in sorted(folders):
        for path in sorted(folder.glob("*.code")):
            with path.open("rb") as file:
                if file.readline().startswith(f"cellrt {kept_code.FORMAT} ".encode()):
                    try:
                        payload = pickle.load(file)
                    except (ModuleNotFoundError, AttributeError):  # of what has moved since: nobody reads it any more
                        continue
                    described = payload[1]
                    symbols = set(kept_code.symbols_of(llvm.parse_bitcode(bitcode_of(payload))))
                    yield path, described.mangled_name, symbols


@pytest.mark.timeout(400)  # where nothing is compiled yet it compiles all cells
def test_all_that_is_kept_has_symbols_by_content_and_no_two_files_one_of_their_own() -> None:
    warm_up()
    for name in CASES.keys() & WITH_FORM:
        assert subject_of(name, "fused").cell.compiled_form is not None
    owners, numbered = defaultdict(list), set()
    for path, own, symbols in kept():
        assert own in symbols
        owners[own].append(path)
        numbered |= {symbol for symbol in symbols if not kept_code.is_ours(symbol)}
    assert len(owners) > 400 and not numbered
    assert not [paths for paths in owners.values() if len(paths) > 1]


def test_all_functions_of_cellrt_are_kept_by_content_and_none_goes_by_a_name_of_one_process() -> None:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("cellrt.")]
    found = [each for module in modules for each in vars(module).values()]
    functions = {each.py_func: each for each in found if isinstance(each, Dispatcher)}
    assert len(functions) > 300
    for function, dispatcher in functions.items():
        assert isinstance(dispatcher._cache, kept_code.KeptCode), function
        assert kept_code.content_of(function)  # raises where nobody can tell it
    for each in found:
        if isinstance(each, TaskFunction):
            assert kept_code.content_of(each._function)
    contents = [(kept_code.content_of(each.py_func), str(each.targetoptions)) for each in functions.values()]
    assert len(set(contents)) == len(contents)


DECODER = """
from torch import nn
import cellrt
from cellrt import cells, unfolders
words, lstm, projection = nn.Embedding(500, 16), nn.LSTM(16, 32, 2), nn.Linear(32, 500)
decoder = cells.EmbeddingLSTMDecoder.from_torch(words, lstm, projection, end_token=1)
cellrt.cell(decoder, decoder.input_specs())
unfolders.from_torch(lstm, embedding=words)
"""
RECURRENT = """
import torch, cellrt
from cellrt.cells import GRUCell
torch.manual_seed(0)
module = GRUCell(8, 16)
made = cellrt.cell(module, {"x": (8,), "h": (16,)})
x, h = torch.randn(3, 8), torch.randn(3, 16)
with torch.no_grad():
    want = module(x, h)[0]
assert not made.why_no_form, made.why_no_form
assert torch.allclose(made.compiled_form.run(3, {"x": x, "h": h})["h"], want, atol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cells_that_three_processes_made_with_an_empty_cache_compute_what_their_modules_do(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for program in (DECODER, RECURRENT, RECURRENT):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=500, env=environment
        )
        assert done.returncode == 0, done.stderr


def test_products_of_three_and_of_four_gates_have_symbols_of_their_own() -> None:
    """Two closures of one name and signature."""
    names = set()
    for product in (_multiply_four, multiply_three):
        signature = (numba.int64,) * 6
        product.compile(signature)
        names.add(product.overloads[signature].fndesc.mangled_name)
    assert len(names) == 2
