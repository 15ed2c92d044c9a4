"""Programs as words: a model's cell types get the engine's numbers before a program is compiled."""

from __future__ import annotations

import random

import numba
import numpy as np
import pytest

from cellrt.core.templates.program import (
    CARRY,
    EACH,
    EMITTED,
    FIXED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    NOTHING,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_KEEP,
    OP_LOOP,
    OP_MEMBER,
    OP_NODE,
    OP_PAGES,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    OP_STATE,
    PAGED,
    RANGE,
    SAME,
    STEP,
    WORDS,
    WORDS_OF_INPUT,
    read_only,
    read_program,
)
from cellrt.core.templates.program_operations import operations, rename_types
from tests.core.lengthy import NUM_PORTS, Lengthy, processor_of_all

NUM_INPUTS, IDS = (1, 2), (20, 10)
INPUTS = (
    [FIXED, 0],
    [STEP, 0, 1],
    [EACH, 2, 0, 1],
    [CARRY, 0],
    [LIST, 3, 0, 1, 1],
    [RANGE, 0, 1, 1],
    [NEXT, 0, 1],
    [EMITTED, 0, 1],
    [PAGED, 0],
    [NOTHING, 0],
    [SAME, 0],
    [LAST, 0, 1],
    [LEADS, 0, 1, 2, 1],
)
OPERATIONS = (
    [OP_EXTERNAL, 0, 1],
    [OP_CONSTANT, 0, 1],
    [OP_RESULT, 0, 1, 1],
    [OP_RESULT_STEPS, 0, 1],
    [OP_RESULT_LAST, 0],
    [OP_STATE, 0, 1],
    [OP_KEEP, 0, 1, 1, 1],
    [OP_PAGES, 0, 1, 1],
)


def renamed(*words: int) -> list[int]:
    """What becomes of words that two nodes follow, of which the names must be found again."""
    follow, become = ([OP_NODE, one, FIXED, 0, OP_NODE, two, FIXED, 1, FIXED, 0] for one, two in ((0, 1), IDS))
    program = rename_types(np.array([*words, *follow], np.int32), NUM_INPUTS, IDS).tolist()
    assert program[len(words) :] == become
    return program[: len(words)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_without_inputs_stay_as_they_are(operation):
    assert renamed(*operation) == operation


@pytest.mark.parametrize("words", INPUTS)
@pytest.mark.parametrize("before", [[OP_NODE], [OP_CHAIN, 2], [OP_LOOP, 2, -1], [OP_MEMBER, 2, -1, 0]])
def test_the_type_alone_is_renamed_whatever_is_read(before, words):
    op, *rest = before
    assert renamed(op, 0, *rest, *words) == [op, IDS[0], *rest, *words]
    assert renamed(op, 1, *rest, *words, FIXED, 1) == [op, IDS[1], *rest, *words, FIXED, 1]


def test_the_types_of_each_step_of_a_loop_are_renamed():
    assert renamed(OP_MEMBER, 0, 2, -1, -2, 0, 1, FIXED, 0) == [OP_MEMBER, 20, 2, -1, -2, 20, 10, FIXED, 0]


TABLES = processor_of_all().tables


@pytest.mark.skipif(not numba.config.DISABLE_JIT, reason="a part of what is compiled, which Python cannot call")
@pytest.mark.parametrize("seed", range(60))
def test_what_compiles_and_everybody_else_read_the_same(seed: int):
    words = np.array(Lengthy(random.Random(seed)).graph(6), np.int32)
    draft = read_program(read_only(words), TABLES.types, TABLES.ports)
    tables = [iter(table) for table in (draft.units, draft.sources, draft.results, draft.keeps, draft.pages)]
    inputs = iter(draft.inputs)
    for operation in operations(words.tobytes(), NUM_PORTS):
        table, names = WORDS[operation.op]
        row = next(tables[table])
        assert [row[name] for name in ("op", *names)] == [getattr(operation, name) for name in ("op", *names)]
        assert draft.layers[row["layer"] :][: len(operation.layers)].tolist() == operation.layers
        for one in operation.inputs:
            read = next(inputs)
            for name in ("mode", *WORDS_OF_INPUT[one.mode]):
                assert name == "unused" or read[name] == getattr(one, name) or (name == "first" and not one.count)
            assert draft.listed[max(0, read["listed"]) :][: len(one.listed)].tolist() == one.listed
        if row["value"] >= 0:
            assert row["value"] == operation.value
    assert not any(list(table) for table in (*tables, inputs))
