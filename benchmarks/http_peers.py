"""The other servers of the HTTP benchmark: modules that serve the model as each one's documentation has it, and Triton.

None of them is needed for anything else; one that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from benchmarks import http_triton
from benchmarks.http_server import Command, Server, Tokens


@contextmanager
def _prepared(module: str, port: int) -> Iterator[Command]:
    yield [sys.executable, "-m", f"benchmarks.{module}", str(port)], os.environ


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"the package {package} is not installed"


def _body(tokens: Tokens) -> object:
    return {"request": list(tokens)}


def _answered(answer: Mapping[str, int]) -> int:
    return answer["class"]


def _python(module: str, package: str, path: str) -> Server:
    """Return a server that a module of this folder is."""
    return Server(path, partial(_prepared, module), partial(_missing, package), _body, _answered)


PEERS = {
    "LitServe": _python("http_litserve", "litserve", "/predict"),
    "mosec": _python("http_mosec", "mosec", "/inference"),
    "Ray Serve": _python("http_ray", "ray", "/"),
    "Triton, dynamic batching": http_triton.server("whole"),
    "Triton, iterative sequences": http_triton.server("steps"),
}
