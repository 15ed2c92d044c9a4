"""The other servers of the HTTP benchmark: modules that serve the model as each one's documentation has it, and Triton.

None of them is needed for anything else; one that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from benchmarks import http_triton
from benchmarks.http_server import Command, Server, Tokens


@contextmanager
def _prepared(module: str, port: int) -> Iterator[Command]:
    yield [sys.executable, "-m", f"benchmarks.{module}", str(port)], os.environ


def why_missing(package: str, python: str = sys.executable) -> str | None:
    """Return why a Python cannot use a package, or None; it may be there without what it needs itself."""
    if python == sys.executable and importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    tried = subprocess.run([python, "-c", f"import {package}"], capture_output=True, text=True, check=False)
    said = (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]
    return f"importing {package} ends in {said}" if tried.returncode else None


def _body(tokens: Tokens) -> object:
    return {"request": list(tokens)}


def _answered(answer: Mapping[str, int]) -> int:
    return answer["class"]


def _python(module: str, package: str, path: str) -> Server:
    """Return a server that a module of this folder is."""
    return Server(path, partial(_prepared, module), partial(why_missing, package), _body, _answered)


PEERS = {
    "LitServe": _python("http_litserve", "litserve", "/predict"),
    "mosec": _python("http_mosec", "mosec", "/inference"),
    "Ray Serve": _python("http_ray", "ray", "/"),
    "Triton, dynamic batching": http_triton.server("whole"),
    "Triton, iterative sequences": http_triton.server("steps"),
}
