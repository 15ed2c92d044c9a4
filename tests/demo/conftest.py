"""The demo's tests need the trained weights; words come from the dictionary where it is installed."""

from __future__ import annotations

import pytest

from tests.oracles.g2p import checkpoint_path

NEEDS_WEIGHTS = "needs the trained weights: pip install --no-deps g2p-en==2.1.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if checkpoint_path() is None:
        for item in items:
            if item.nodeid.startswith("tests/demo/"):
                item.add_marker(pytest.mark.skip(reason=NEEDS_WEIGHTS))
