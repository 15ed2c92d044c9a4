"""Other servers of the same model over HTTP, each a module that serves it as its own documentation has it for batches.

Up to 64 requests that arrive within 5 ms, one worker, one thread of torch. None of them is needed for anything else;
one that is not installed is left out.
"""

from __future__ import annotations

import importlib.util

MAX_BATCH, MAX_WAIT_S = 64, 0.005
MODULES = {"LitServe": "http_litserve", "mosec": "http_mosec", "Ray Serve": "http_ray"}
PACKAGES = {"LitServe": "litserve", "mosec": "mosec", "Ray Serve": "ray"}
PATHS = {"LitServe": "/predict", "mosec": "/inference", "Ray Serve": "/"}


def installed() -> list[str]:
    """The peers that can be run here."""
    return [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
