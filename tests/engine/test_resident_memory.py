"""Memory stays what it is, however many requests of however many lengths have been served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.graph.unfolder import Unfolder

LONGEST, REQUESTS, TOGETHER = 4_000, 1_000_000, 500
ALLOWED_BYTES = 64 << 20
PAGE_BYTES = 4096


def resident_bytes() -> int:
    """What of the process lies in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell what lies in memory")
def test_a_million_requests_of_four_thousand_lengths_leave_no_memory_behind():
    """Lengths from 1 to 4,000, the logarithm evenly drawn, so that all come and most are short."""
    add = cell(lambda x, h: {"h": h + x}, {"x": (), "h": ()})
    model = Unfolder("sum", lambda graph, x: {"h": graph.chain(add, x=x).last.h}, torch.zeros(3))
    draw, ones = np.random.default_rng(0), torch.ones(LONGEST)
    seen: set[int] = set()
    with Engine(1) as engine:
        engine.register(model)
        before = 0
        for served in range(0, REQUESTS, TOGETHER):
            lengths = np.exp(draw.uniform(0, np.log(LONGEST + 1), TOGETHER)).astype(int).clip(1, LONGEST).tolist()
            futures = engine.submit_many("sum", [ones[:length] for length in lengths], deadline=600.0)
            for length, future in zip(lengths, futures):
                assert float(future.result(600)["h"]) == length
            seen.update(lengths)
            if served == REQUESTS // 5:
                before = resident_bytes()
        assert len(seen) > 0.99 * LONGEST
        assert resident_bytes() - before < ALLOWED_BYTES
