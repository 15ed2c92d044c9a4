"""Copies of rows: the large ones give up the interpreter lock, also when they are loaded from disk."""

from __future__ import annotations

import numba
import pytest

from cellrt.core.state import copying

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="about what is compiled")

NAMES = "put_columns", "get_rows", "get_rows_of", "move_rows", "get_rows_nogil", "get_rows_of_nogil", "move_rows_nogil"


def test_no_two_copies_are_one_on_disk() -> None:
    functions = [getattr(copying, name) for name in NAMES]
    kept = [each._cache._key("of any types") for each in functions]
    assert len({key.stem for key, _ in kept}) == len({content for _, content in kept}) == len(NAMES)
