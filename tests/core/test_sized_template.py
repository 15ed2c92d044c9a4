"""Programs that differ in their lengths alone share a template, which is each time what the program compiles to."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.templates import sized_template
from cellrt.core.templates.lengths import MOST_WORDS, Lengths
from cellrt.core.templates.program import (
    CARRY,
    FIXED,
    LEADS,
    LIST,
    NOTHING,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_KEEP,
    OP_LOOP,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_STEPS,
    OP_STATE,
    RANGE,
    STEP,
)
from cellrt.core.templates.sized_template import KnownTemplates, Room, SizedTemplate, compile_template
from cellrt.core.templates.template import ARRAYS, FITS, NUM_EXTERNALS, compile_program, open_words
from tests.core.author import CELLS, Author
from tests.core.graphs import add_step, add_tree, leaves, make_processor, tree
from tests.core.lengthy import NUM_PORTS, Lengthy, processor_of_all, with_lengths
from tests.core.machine import Machine
from tests.limits import SMALL

PROCESSOR = Machine(1, (4,) * len(CELLS), SchedulerSettings()).processor


def room_of(processor: Processor) -> Room:
    """So little room that of some lengths it is enough and of others not."""
    return Room(np.full(6, 40, np.int64), np.full((processor.num_kinds, 2), 12, np.int64))


LENGTHY = processor_of_all()


def lengths_of(program: NDArray[np.int32], processor: Processor = PROCESSOR) -> Lengths:
    """The lengths that a program has, if it has a template in common with others."""
    return compiled(program, KnownTemplates(), processor).lengths


def compiled(program: NDArray[np.int32], known: KnownTemplates, processor: Processor = PROCESSOR) -> SizedTemplate:
    return compile_template(program, processor.tables.types, processor.tables.ports, room_of(processor), known)


def assert_is_what_compiles(made: SizedTemplate, program: NDArray[np.int32], processor: Processor = PROCESSOR) -> None:
    alone = compile_program(program, processor.tables.types, processor.tables.ports, *room_of(processor))
    wanted = open_words(alone.words, alone.patches)
    for name in ARRAYS:
        one, other = getattr(made.arrays, name), getattr(wanted, name)
        assert one.shape == other.shape and one.tobytes() == other.tobytes(), name
    numbers = made.num_externals, made.num_results, made.num_places, made.num_steps, made.most_refs, made.fits
    assert numbers == tuple(alone.words[NUM_EXTERNALS : FITS + 1])


@given(
    draw=st.randoms(use_true_random=False),
    operations=st.integers(1, 6),
    others=st.lists(st.integers(2, 60), min_size=4, max_size=4, unique=True),
)
def test_a_template_with_lengths_is_what_the_program_with_them_compiles_to(draw: random.Random, operations, others):
    program, known = np.array(Lengthy(draw).graph(operations), np.int32), KnownTemplates()
    first = compiled(program, known, LENGTHY)
    assert_is_what_compiles(first, program, LENGTHY)
    assume(first.lengths.size)
    longer = with_lengths(program, NUM_PORTS, first.lengths, others)
    second = compiled(longer, known, LENGTHY)
    assert second.template is first.template and second.lengths.tolist() == others[: first.lengths.size]
    assert_is_what_compiles(second, longer, LENGTHY)
    assert_is_what_compiles(first, program, LENGTHY)


@given(draw=st.randoms(use_true_random=False), operations=st.integers(1, 4))
def test_a_template_of_what_is_run_elsewhere_is_what_the_program_compiles_to(draw: random.Random, operations):
    program = np.array(Author(draw).graph(operations).program, np.int32)
    assert_is_what_compiles(compiled(program, KnownTemplates()), program)


def stepped(length: int) -> NDArray[np.int32]:
    """A chain of ``add_step`` nodes from one row of the request over others; the last state is the result."""
    program = [OP_EXTERNAL, 0, 1, OP_EXTERNAL, 0, length, OP_CHAIN, 0, length, STEP, 1, 1, CARRY, 0]
    return np.array([*program, OP_RESULT, 2 * length, 1, 1], np.int32)


def backwards_above(length: int) -> NDArray[np.int32]:
    """A chain above another that reads it from its end, and a node that reads all; every step is a result."""
    program = [*stepped(length)[:-4].tolist(), OP_CHAIN, 0, length, STEP, 2 * length, -1, CARRY, 0]
    program += [OP_NODE, 1, RANGE, 1 + 2 * length, 1, length]
    return np.array([*program, OP_RESULT, 3 * length, -1, length], np.int32)


def looped(limit: int) -> NDArray[np.int32]:
    """A loop of ``add_step``; every step is a result."""
    program = [OP_EXTERNAL, 0, 1, OP_LOOP, 0, limit, 0, FIXED, 0, CARRY, 0]
    return np.array([*program, OP_RESULT_STEPS, 1, limit], np.int32)


def led(count: int) -> NDArray[np.int32]:
    """A loop whose first step reads rows of the request; every step is a result."""
    program = [OP_EXTERNAL, 0, count, OP_LOOP, 2, 50, 0, LEADS, 0, 1, count, 0, NOTHING, 0]
    return np.array([*program, OP_RESULT_STEPS, count, 50], np.int32)


@pytest.mark.parametrize("make", [stepped, backwards_above, looped, led])
def test_graphs_of_all_lengths_from_two_on_have_one_template(make):
    processor = make_processor()
    add_step(processor, 4)
    add_tree(processor, 4)
    processor.add_type([Port(0), Port(0, is_span=True)], [Port(0)], max_batch=4)
    first, *others = (processor.compile(make(length)) for length in (2, 3, 24, 1000))
    assert all(other.template is first.template for other in others)
    assert processor.compile(make(1)).template is not first.template


@pytest.mark.parametrize("make", [lambda n: leaves(1, n), lambda n: tree(1, 1, n)], ids=["leaves", "tree"])
def test_graphs_with_a_node_for_each_row_have_a_template_each(make):
    processor = make_processor()
    add_step(processor, 4)
    add_tree(processor, 4)
    first, second = (processor.compile(make(length)) for length in (4, 8))
    assert first.template is not second.template and not first.lengths.size


@pytest.mark.parametrize(("base", "stride"), [(6, 2), (5, -2), (6, 1)])
def test_outputs_of_one_step_that_are_as_many_as_the_steps_have_no_length(base: int, stride: int):
    """Of a chain of two steps two of the three outputs of one: of another length, they would reach beyond it."""
    program = [OP_EXTERNAL, 0, 2, OP_CONSTANT, 0, 1, OP_CHAIN, 1, 2, STEP, 0, 1, CARRY, 2, CARRY, 2]
    program += [OP_CHAIN, 0, 2, STEP, base, stride, CARRY, 2, OP_RESULT, 10, 1, 1]
    made = np.array(program, np.int32)
    assert not lengths_of(made).size
    assert_is_what_compiles(compiled(made, KnownTemplates()), made)


def test_a_cell_type_that_takes_the_number_of_another_does_not_meet_its_templates():
    processor = make_processor()
    add_step(processor, 4)
    before = processor.compile(stepped(5)).template
    assert processor.compile(stepped(7)).template is before
    processor.remove_type(0)
    assert add_step(processor, 4) == 0
    assert processor.compile(stepped(5)).template is not before


def test_requests_of_different_lengths_are_admitted_in_one_call_as_one_by_one():
    def admitted(together: bool) -> list[list[int]]:
        processor = make_processor()
        add_step(processor, 4)
        templates = [processor.compile(stepped(length)) for length in (5, 2, 9)]
        if together:
            lengths = np.array([template.lengths for template in templates])
            ids, rows = processor.admit_many(templates[0], np.arange(3), lengths=lengths)
            assert ids == [0, 1, 2]
        else:
            rows = np.concatenate([processor.admit(template, k)[1] for k, template in enumerate(templates)])
        tables = processor.tables
        return [array.tobytes() for array in (rows, tables.links, tables.places, tables.subgraphs, tables.values)]

    assert admitted(together=True) == admitted(together=False)


def test_requests_whose_graphs_have_nothing_in_common_are_admitted_in_one_call_as_one_by_one():
    def admitted(together: bool) -> list[bytes]:
        processor = make_processor(limits=replace(SMALL, max_requests=2))
        add_tree(processor, 4)
        add_tree(processor, 4)
        templates = [processor.compile(tree(0, 1, words)) for words in (4, 2, 8)]
        if together:
            ids, rows = processor.admit_many(templates, np.arange(3))
            assert ids == [0, 1]
            assert rows.size == sum(template.num_externals + 1 for template in templates)
        else:
            taken = [processor.admit(template, k) for k, template in enumerate(templates)]
            assert taken[2] is None
            rows = np.concatenate([its[1] for its in taken if its is not None])
        tables, num_rows = processor.tables, sum(template.num_externals + 1 for template in templates[:2])
        parts = rows[:num_rows], tables.nodes, tables.links, tables.places, tables.subgraphs, tables.values
        return [array.tobytes() for array in parts]

    assert admitted(together=True) == admitted(together=False)


def beside_two_rows(length: int) -> NDArray[np.int32]:
    """A chain, and a node that reads two rows of the request and its last step; these rows are no sequence."""
    program = [OP_EXTERNAL, 0, 2, *(OP_EXTERNAL, 0, length), OP_CHAIN, 0, length, STEP, 2, 1, CARRY, 0]
    last = 2 * length + 1
    return np.array([*program, OP_NODE, 1, LIST, 3, 0, 1, last, OP_RESULT, last + 1, 1, 1], np.int32)


def test_that_graphs_have_no_template_in_common_is_found_out_once(monkeypatch: pytest.MonkeyPatch):
    processor = make_processor()
    add_step(processor, 4)
    add_tree(processor, 4)
    second = beside_two_rows(7)
    assert not processor.compile(beside_two_rows(5)).lengths.size
    compiled: list[NDArray[np.int32]] = []
    compile_alone = sized_template.compile_program
    monkeypatch.setattr(
        sized_template, "compile_program", lambda *rest, **kw: (compiled.append(rest[0]), compile_alone(*rest, **kw))[1]
    )
    assert not processor.compile(second).lengths.size
    assert [each.tolist() for each in compiled] == [second.tolist()]


def test_known_templates_take_no_more_than_they_may():
    processor, known = make_processor(), KnownTemplates(max_bytes=1 << 12)
    add_step(processor, 4)
    template, kept = processor.compile(stepped(5)).template, 0
    for key in range(100):
        known.add(bytes([key]), template)
        kept = sum(known.get(bytes([one])) is not None for one in range(100))
        assert kept >= 1 and kept * (1 + template.num_bytes) <= 1 << 12
    assert kept > 1 and known.get(bytes([99])) is template


def test_a_long_program_has_no_lengths():
    processor, program = make_processor(), stepped(5).tolist()
    add_step(processor, 4)
    results = [OP_RESULT, 6, 1, 1] * (MOST_WORDS // 4)
    long = np.array(program + results, np.int32)
    assert lengths_of(np.array(program, np.int32), processor).tolist() == [5]
    assert not lengths_of(long, processor).size


def test_the_longest_program_with_a_length_is_what_it_compiles_to():
    def stacked(length: int) -> NDArray[np.int32]:
        """Chains, each above the one before, read backwards; every step of each is a result."""
        program, first = [OP_EXTERNAL, 0, length], 0
        while len(program) + 12 <= MOST_WORDS:
            program += [OP_CHAIN, 0, length, STEP, first + length - 1, -1, CARRY, 0]
            first += length
            program += [OP_RESULT, first + length - 1, -1, length]
        return np.array(program, np.int32)

    known = KnownTemplates()
    first, second = compiled(stacked(3), known), compiled(stacked(1000), known)
    assert second.template is first.template and second.lengths.tolist() == [1000]
    assert second.num_results == 85 * 1000 and second.num_places == (85 + 85) * 1000
    assert_is_what_compiles(first, stacked(3))
    assert_is_what_compiles(second, stacked(1000))


def test_a_session_s_new_state_has_no_value_to_begin_with_whatever_the_lengths():
    def kept(length: int) -> NDArray[np.int32]:
        program = [OP_EXTERNAL, 0, length, OP_STATE, 0, -1, OP_CHAIN, 0, length, STEP, 0, 1, CARRY, length]
        program += [OP_KEEP, length, length + 1, 1, length, OP_RESULT, 2 * length, 1, 1]
        return np.array(program, np.int32)

    known = KnownTemplates()
    for length in (5, 9):
        assert_is_what_compiles(compiled(kept(length), known), kept(length))
