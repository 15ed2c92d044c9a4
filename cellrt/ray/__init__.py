"""Engines as replicas of Ray Serve: sessions find the replica that has their state, and move when replicas come and go.

``application`` and ``build`` need the package ``ray[serve]``; what decides here does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cellrt.errors import DefinitionError

if TYPE_CHECKING:
    from cellrt.ray.deployed import application as application
    from cellrt.ray.deployed import build as build
    from cellrt.ray.scaling import Scaling as Scaling

__all__ = ["Scaling", "application", "build"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'cellrt.ray' has no attribute {name!r}")
    home = "scaling" if name == "Scaling" else "deployed"
    try:
        return getattr(importlib.import_module(f"cellrt.ray.{home}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise DefinitionError("cellrt.ray needs more packages: pip install '.[ray]' in a clone") from error
