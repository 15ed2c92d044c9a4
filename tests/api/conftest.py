from collections.abc import Iterator

import pytest

from cellrt.engine.engine import Engine
from tests.engine.helpers import small_engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One CPU worker that checks its invariants whenever it is idle; at the end all slots must be free."""
    made = small_engine(max_nodes=1_000, trace=True, debug=True)
    try:
        yield made
        assert made.drain(timeout=60)
        made.check()
    finally:
        made.close()
