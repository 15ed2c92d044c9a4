"""The compiled graphs that a model keeps take the memory that they are said to take, and no more than they may."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellrt.core.processor import Processor
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits
from cellrt.core.templates.program import CARRY, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.core.templates.sized_template import SizedTemplate
from cellrt.core.templates.template import ARRAYS
from cellrt.engine.template_cache import OVERHEAD_BYTES, TemplateCache
from tests.api.models import SIZE, model, recurrent
from tests.engine.helpers import small_engine

PROCESSOR = Processor(1, Limits(max_sessions=1, max_events=8))
KIND = PROCESSOR.add_kind(1 << 16, 1 << 16)
CHAIN = PROCESSOR.add_type([Port(KIND), Port(KIND, carry=0)], [Port(KIND)], max_batch=4)


def chain(length: int) -> tuple[bytes, SizedTemplate]:
    words = [OP_EXTERNAL, KIND, length + 1, OP_CHAIN, CHAIN, length, STEP, 0, 1, CARRY, length]
    program = np.array([*words, OP_RESULT, 2 * length, 1, 1], np.int32)
    return program.tobytes(), PROCESSOR.compile(program)


def true_size(template: SizedTemplate) -> int:
    """Of what it does not share."""
    if template.lengths.size:
        return template.lengths.nbytes
    return sum(getattr(template.arrays, name).nbytes for name in ARRAYS)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 60), st.integers(1, 2000)), max_size=60),
    max_bytes=st.sampled_from([1, 10_000, 100_000, 1 << 30]),
)
def test_a_cache_is_never_larger_than_it_may_be_and_keeps_the_latest(lengths, max_bytes):
    cache, made = TemplateCache(max_bytes), {}
    for length in lengths:
        program, template = chain(length)
        made[program] = template
        cache.add(program, template)
        size = sum(
            len(program) + OVERHEAD_BYTES + true_size(template)
            for program, template in made.items()
            if cache.get(program) is not None
        )
        assert size <= cache.num_bytes <= max_bytes
        fits = len(program) + OVERHEAD_BYTES + template.num_bytes <= max_bytes
        assert (cache.get(program) is not None) == fits
    if max_bytes == 1 << 30:
        assert len(cache) == len(set(lengths))


def test_a_program_that_comes_once_pushes_out_none_that_comes_again():
    (first, template), *others = [chain(length) for length in range(1, 400)]
    cache: TemplateCache[SizedTemplate] = TemplateCache(4 * (OVERHEAD_BYTES + template.num_bytes + len(first)))
    for program, one in ((first, template), *others[:200]):
        assert cache.get(program) is None
        if cache.is_worth(program):
            cache.add(program, one)
    kept = {program for program, _ in ((first, template), *others) if cache.get(program) is not None}
    assert kept and kept <= {first, *(program for program, _ in others[:4])}
    for program, _ in others[200:]:
        assert not cache.is_worth(program) and cache.is_worth(program)
    cache.add(*others[-1])
    assert cache.get(others[-1][0]) is not None


def test_threads_that_compile_the_same_templates_leave_no_bytes_behind():
    templates = [chain(length) for length in range(1, 40)]
    cache = TemplateCache(sum(template.num_bytes for _, template in templates) // 2 + 20 * OVERHEAD_BYTES)
    begin = threading.Barrier(4)

    def compile_all() -> None:
        begin.wait()
        for _ in range(50):
            for program, template in templates:
                if cache.get(program) is None:
                    cache.add(program, template)

    threads = [threading.Thread(target=compile_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [(program, template) for program, template in templates if cache.get(program) is not None]
    assert cache.num_bytes == sum(len(program) + template.num_bytes + OVERHEAD_BYTES for program, template in kept)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_does_not_grow_with_the_number_of_lengths():
    """Chains of 2,000 different lengths: 130 MB of templates."""
    step = recurrent()
    engine = small_engine(limits=Limits(max_nodes=1 << 12), arena_bytes=1 << 20, max_nodes=2000)
    engine.register(model(lambda graph, x: {"h": graph.chain(step, x=x).last.h}, torch.zeros(1, SIZE)), warm_up=False)
    rows = torch.zeros(2000, SIZE)
    for length in range(1, 900):  # more than fill the cache
        engine.graph("m", rows[:length])
    gc.collect()
    before = resident_bytes()
    for length in range(900, 2000):
        engine.graph("m", rows[:length])
    gc.collect()
    assert resident_bytes() - before < 20 << 20
    engine.close()
