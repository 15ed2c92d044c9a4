"""Every operation works without Triton: its reference is used."""

import subprocess
import sys

PROGRAM = """
import importlib.abc, importlib.util, pkgutil, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
import torch
import cellrt.kernels
for module in pkgutil.iter_modules(cellrt.kernels.__path__, "cellrt.kernels."):
    if module.ispkg:
        print(importlib.import_module(module.name).__name__)

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.project_argmax import Projection, project_argmax
token, rows = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
stop = torch.ones(1, dtype=torch.bool)
given = ArenaRows(torch.ones(1, 2), rows)
project_argmax(given, Projection(torch.eye(3, 2)), ArenaRows(token, rows), ArenaRows(stop, rows))
assert (token.item(), stop.item()) == (0, False)
"""


def test_operations_are_imported_and_run() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert {"sample", "signal", "project_argmax", "lstm_chain"} <= {
        name.rpartition(".")[2] for name in done.stdout.split()
    }
