"""What serving calls is compiled before it serves: a request that found it not to be would wait for seconds."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from numba.core.dispatcher import Dispatcher
import cellrt
from cellrt.core.templates.partition import partition
from cellrt.worker.cpu.warm_up import warm_up

def signatures():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("cellrt.core.")]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)}
    found.remove(partition)  # for the priorities of a model that is registered
    return {(each.py_func.__module__, each.py_func.__name__, its) for each in found for its in each.signatures}

def unfold(graph, request):
    x, y = request
    chain = graph.chain(running_sum, x=x, keep=True)
    return {"every": chain.h, "last": chain.last.h, "pair": double(x=y).output}

running_sum = cellrt.cell(lambda x, h: {"h": x + h}, {"x": (2,), "h": (2,)}, carry={"h": "h"})
double = cellrt.cell(lambda x: 2 * x, {"x": (2,)})
model = cellrt.Unfolder("sums", unfold, (torch.zeros(3, 2), torch.zeros(2)))

warm_up()
before = signatures()
with cellrt.Engine(1) as engine:
    engine.register(model)
    rows = [torch.ones(length, 2) for length in (1, 2, 3, 7, 40)]
    for future, x in zip(engine.submit_many("sums", [(x, x[0]) for x in rows]), rows):
        assert torch.equal(future.result(30)["last"], x.sum(0))
    engine.submit("sums", (rows[-1], rows[0][0])).cancel()
    engine.submit("sums", (rows[-1], rows[0][0]), deadline=1e-6).exception(30)
for name in sorted(f"{module}.{name}" for module, name, its in signatures() - before):
    print(name)
"""


def test_requests_compile_nothing_of_the_core():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr + done.stdout
