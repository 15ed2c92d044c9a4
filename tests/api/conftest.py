from collections.abc import Iterator

import pytest

from cellrt.core.settings import Limits
from cellrt.engine.engine import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One CPU worker that checks its invariants whenever it is idle; at the end all slots must be free.

    The validator reads every row and slot there is, so there are few.
    """
    limits = Limits(
        max_requests=512,
        max_nodes=16_384,
        max_values=32_768,
        max_links=65_536,
        max_subgraphs=2_048,
        max_sessions=16,
    )
    made = Engine(workers=1, limits=limits, max_nodes=1_000, trace=True, debug=True, arena_bytes=1 << 16)
    try:
        yield made
        assert made.drain(timeout=60)
        made.check()
    finally:
        made.close()
