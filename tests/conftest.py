"""Options and rules that hold for every test.

Torch is imported only when a test needs a GPU, as the core's tests run without it.
"""

import functools
import gc
import importlib.util
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest

from tests.effort import IN_A_NIGHT, IN_MAKE_SLOW, IN_MAKE_TEST

INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
WITH_PROCESSES = {"tests/kernels", "tests/process", "tests/serve"}
"""Folders whose tests share servers, engines elsewhere, or an interpreter of kernels."""

# Tests make engines by the hundred, whose cells nobody compiles beside them: those that want it say so.
os.environ.setdefault("CELLRT_COMPILE", "off")

# Compiling the core makes a first example slow, so examples have no deadline of their own. CI draws the same
# examples every time. `make slow` draws many more, by --hypothesis-profile; a night ten times as many again.
hypothesis.settings.register_profile("cellrt", deadline=None, derandomize="CI" in os.environ, max_examples=IN_MAKE_TEST)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("cellrt"), max_examples=IN_MAKE_SLOW)
hypothesis.settings.register_profile("night", hypothesis.settings.get_profile("cellrt"), max_examples=IN_A_NIGHT)
hypothesis.settings.load_profile("cellrt")


@functools.cache
def reason_without_gpu() -> str | None:
    """Why GPU tests cannot run here, or None where they can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA device"


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a run share a folder for what torch's compiler finds out, and headers that it compiles: that is
    half of what a small cell takes."""
    if INDUCTOR_VARIABLE not in os.environ:
        folder = os.environ[INDUCTOR_VARIABLE] = tempfile.mkdtemp(prefix="cellrt-tests-inductor-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail a test marked gpu that would be skipped")


def pytest_collection_finish() -> None:
    """What importing all tests has made stays to the end: no collection of garbage goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With ``--dist loadfile`` whole folders whose tests share a process of their own go to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class ByProcess(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = "/".join(nodeid.split("/")[:2])
            return folder if folder in WITH_PROCESSES else super()._split_scope(nodeid)

    return ByProcess(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="module")
def thawed() -> Iterator[None]:
    """For what freezes or unfreezes by itself: nothing is frozen at first, and behind its module all is again."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``one_in(n)``, all cases but each n-th are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker("slow")
            seen[test] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := reason_without_gpu()) is not None:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn every skip of a GPU test, whatever its reason, into a failure under --require-gpu."""
    report = yield
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and item.config.getoption("--require-gpu") and item.get_closest_marker("gpu") is not None:
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-gpu: {call.excinfo and call.excinfo.value}"
    return report
