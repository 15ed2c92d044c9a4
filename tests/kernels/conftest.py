"""Runs a kernel's test on a GPU, and once more in Triton's interpreter, which needs none.

A test with the argument ``device`` runs twice. With "cuda" it carries the marker ``gpu`` and runs here. With "cpu" it
runs in another process, because Triton decides when it is first imported whether kernels are compiled or
interpreted, and this process compiles (tests/kernels/ahead.py). That process imports the test's module and calls the
function with its other arguments, which must be picklable; what it raises is raised here.
"""

import importlib.util
import multiprocessing
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.kernels.interpreter import call, set_up


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of a test's tensors: on the "cpu" kernels are interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton")
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def interpreter() -> Generator[ProcessPoolExecutor]:
    """The process that interprets kernels, for all tests of a run."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=set_up) as executor:
        yield executor


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.funcargs.get("device") != "cpu":
        return None
    executor = pyfuncitem._request.getfixturevalue("interpreter")
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    executor.submit(call, pyfuncitem.module.__name__, pyfuncitem.originalname, arguments).result()
    return True
