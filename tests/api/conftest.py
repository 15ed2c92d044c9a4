from collections.abc import Iterator

import pytest

from cellrt.engine import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One CPU worker that checks its invariants whenever it is idle; at the end all slots must be free."""
    made = Engine(workers=1, trace=True, debug=True, arena_bytes=4 << 20)
    try:
        yield made
        assert made.drain(timeout=60)
        made.check()
    finally:
        made.close()
