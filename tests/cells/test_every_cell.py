"""Every ready-made cell is row-wise: a row's outputs depend on that row alone, not on its place or on its company.

Each cell of ``every_cell.py`` runs in float32 on the fused path and on the plain one (with gradients), in bfloat16 and
in float16. Integers must be equal, floats within the tolerance of their type.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from cellrt import cells
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.cells.every_cell import (
    CASES,
    MADE,
    MODES,
    MOST_ROWS,
    MOST_STEPS,
    NOT_CELLS,
    POOL_ROWS,
    RAGGED,
    STEPPED,
    WITH_FORM,
    Row,
    Subject,
    batch_of,
    seeded,
    subject_of,
)
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, small_engine


def spoiled(row: Row, generator: torch.Generator) -> Row:
    """The row with NaN, infinity or the largest number there is in all of its floats."""
    kind = int(torch.randint(4, (), generator=generator))
    result = dict(row)
    for name, value in row.items():
        if value.is_floating_point():
            bad = (torch.nan, torch.inf, -torch.inf, torch.finfo(value.dtype).max)[kind]
            result[name] = torch.full_like(value, bad)
    return result


def picked(outputs: Row, places: Sequence[int]) -> Row:
    return {name: value[list(places)] for name, value in outputs.items()}


def shuffled(count: int, generator: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def sizes_of(lengths: Sequence[int]) -> list[int]:
    """How many of these chains have each step."""
    return [sum(length > step for length in lengths) for step in range(max(lengths))]


SEEDS = st.integers(0, 1 << 30)
COUNTS = st.integers(1, MOST_ROWS)
LENGTHS = st.lists(st.integers(1, MOST_STEPS), min_size=1, max_size=24).map(lambda some: sorted(some, reverse=True))
FEW = settings(max_examples=examples(3))

every_cell = pytest.mark.parametrize("name", CASES)
every_stepped_cell = pytest.mark.parametrize("name", STEPPED)
every_mode = pytest.mark.parametrize("mode", MODES)


def cells_not_in_the_table() -> set[str]:
    """Exported names, and public module classes of the package's files, that are neither cases nor ``NOT_CELLS``."""
    found = {*cells.__all__}
    for info in pkgutil.iter_modules(cells.__path__, cells.__name__ + "."):
        if not info.name.rpartition(".")[2].startswith("_"):
            for name, value in vars(importlib.import_module(info.name)).items():
                is_module = isinstance(value, type) and issubclass(value, nn.Module)
                if is_module and value.__module__ == info.name and not name.startswith("_"):
                    found.add(name)
    return found - {type(module).__name__ for module in MADE.values()} - NOT_CELLS.keys()


def test_every_cell_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cells_not_in_the_table() == set()
    monkeypatch.setattr(cells, "__all__", [*cells.__all__, "NewCell"])
    assert cells_not_in_the_table() == {"NewCell"}


@pytest.mark.one_in(3)
@every_mode
@every_cell
@FEW
@example([MOST_ROWS, 1], 0)
@given(st.lists(COUNTS, min_size=1, max_size=3), SEEDS)
def test_permuting_and_splitting_rows_permutes_and_splits_the_outputs(
    name: str, mode: str, counts: list[int], seed: int
) -> None:
    subject, generator = subject_of(name, mode), seeded(seed)
    some, order = subject.draw(sum(counts), generator), shuffled(sum(counts), generator)
    together = subject.run(some)
    subject.assert_same(subject.run([some[k] for k in order]), picked(together, order))
    for places in torch.tensor(order).split(counts):
        subject.assert_same(subject.run([some[k] for k in places.tolist()]), picked(together, places.tolist()))


@every_mode
@every_cell
@FEW
@example(1, MOST_ROWS, True, 0)
@given(COUNTS, COUNTS, st.booleans(), SEEDS)
def test_rows_do_not_depend_on_their_company(
    name: str, mode: str, count: int, others: int, spoils: bool, seed: int
) -> None:
    subject, generator = subject_of(name, mode), seeded(seed)
    company = subject.draw(others, generator)
    if spoils:
        company = [spoiled(row, generator) for row in company]
    some, places = subject.draw(count, generator), shuffled(count + others, generator)
    mixed = [row for _, row in sorted(zip(places, some + company), key=lambda pair: pair[0])]
    subject.assert_same(picked(subject.run(mixed), places[:count]), subject.run(some))


@pytest.mark.one_in(2)  # the test before this one draws such rows, too
@every_mode
@every_cell
def test_a_row_alone_gives_what_it_gives_among_all(name: str, mode: str) -> None:
    subject = subject_of(name, mode)
    alone = [subject.run([row]) for row in subject.pool[:8]]
    joined = {output: torch.cat([row[output] for row in alone]) for output in alone[0]}
    subject.assert_same(picked(subject.run(subject.pool), range(8)), joined)


@pytest.mark.parametrize("name", WITH_FORM)
def test_a_form_written_by_hand_gives_a_row_the_same_bits_in_any_company(name: str) -> None:
    subject = subject_of(name, "fused")
    form = subject.cell.compiled_form
    assert form is not None and form.is_batch_invariant

    def run(places: Sequence[int]) -> Row:
        inputs = batch_of(form.inputs, [subject.pool[k] for k in places])
        made = form.run(len(places), dict(zip(form.inputs, inputs, strict=True)))
        assert made is not None
        return made

    together = run(range(POOL_ROWS))
    for few in ([0], [5, 2], range(20, 33), range(1, POOL_ROWS)):
        assert all(torch.equal(value, together[name][list(few)]) for name, value in run(few).items())


@every_mode
@pytest.mark.parametrize("name", RAGGED)
def test_rows_with_nothing_ragged_may_make_up_the_batch(name: str, mode: str) -> None:
    subject = subject_of(name, mode)
    lengths = [sum(len(row[key]) for key, spec in subject.cell.inputs.items() if spec.ragged) for row in subject.pool]
    places = [k for k, length in enumerate(lengths) if length == 0]
    assert 3 < len(places) < POOL_ROWS
    empty = subject.run([subject.pool[k] for k in places])
    subject.assert_same(empty, picked(subject.run(subject.pool), places))


@every_mode
@every_stepped_cell
@FEW
@given(LENGTHS, SEEDS)
def test_steps_equal_the_plain_form_step_by_step(name: str, mode: str, lengths: list[int], seed: int) -> None:
    subject, generator, sizes = subject_of(name, mode), seeded(seed), sizes_of(lengths)
    chains = subject.draw_chains(lengths, generator)
    before: Row = {}
    for step, (size, after) in enumerate(zip(sizes, subject.run_chains(chains, sizes), strict=True)):
        some = [dict(chain[step]) for chain in chains[:size]]
        for k, row in enumerate(some if step else []):
            row |= {state: before[output][k] for state, output in subject.cell.carry.items()}
        subject.assert_same(after, subject.run(some))
        before = after


@every_mode
@every_stepped_cell
@FEW
@given(LENGTHS, SEEDS)
def test_permuting_chains_of_equal_length_permutes_their_steps(
    name: str, mode: str, lengths: list[int], seed: int
) -> None:
    subject, generator, sizes = subject_of(name, mode), seeded(seed), sizes_of(lengths)
    chains = subject.draw_chains(lengths, generator)
    order = sorted(shuffled(len(chains), generator), key=lambda k: -lengths[k])
    permuted = subject.run_chains([chains[k] for k in order], sizes)
    for size, actual, expected in zip(sizes, permuted, subject.run_chains(chains, sizes), strict=True):
        subject.assert_same(actual, picked(expected, order[:size]), MOST_STEPS)


@every_mode
@every_stepped_cell
@FEW
@example([5, 5, 4, 2, 2, 1], True, 0)
@given(LENGTHS, st.booleans(), SEEDS)
def test_a_chain_does_not_depend_on_its_company(
    name: str, mode: str, lengths: list[int], spoils: bool, seed: int
) -> None:
    subject, generator, sizes = subject_of(name, mode), seeded(seed), sizes_of(lengths)
    chains = subject.draw_chains(lengths, generator)
    mine = int(torch.randint(len(chains), (), generator=generator))
    if spoils:
        chains = [chain if k == mine else [spoiled(row, generator) for row in chain] for k, chain in enumerate(chains)]
    together = subject.run_chains(chains, sizes)[: lengths[mine]]
    for actual, expected in zip(together, subject.run_chains([chains[mine]], [1] * lengths[mine]), strict=True):
        subject.assert_same(picked(actual, [mine]), expected, MOST_STEPS)


def model_of(subject: Subject) -> Unfolder:
    """A model of one cell: a single node, or of a cell with ``steps`` a chain or a loop; requests are lists of rows."""
    made = subject.cell
    own = [name for name in made.inputs if name not in made.carry]

    def unfold(graph: Any, request: list[Row]) -> dict[str, Any]:
        if not made.has_steps:
            node = made(**request[0])
        elif own:
            stepped = {name: torch.stack([row[name] for row in request]) for name in own}
            node = graph.chain(made, **request[0] | stepped)
        else:
            node = graph.loop(made, max_steps=len(request), **request[0])
        return {output: getattr(node, output) for output in made.outputs}

    return Unfolder(made.name.replace(" ", "-"), unfold, subject.pool[:2])


def test_an_engine_that_serves_all_cells_at_once_gives_what_their_nodes_give_one_by_one() -> None:
    generator = seeded(0)
    subjects = [subject_of(name, "fused") for name in CASES]
    models = [model_of(subject) for subject in subjects]
    engine = small_engine(arena_bytes=1 << 20)
    try:
        for model in models:
            engine.register(model, warm_up=False)
        asked = []
        for k in shuffled(4 * len(models), generator):
            length = int(torch.randint(1, MOST_STEPS, (), generator=generator))
            asked.append((k % len(models), subjects[k % len(models)].draw(length, generator)))
        futures = [engine.submit(models[k].name, request) for k, request in asked]
        for (k, request), future in zip(asked, futures, strict=True):
            expected = run_one_by_one(models[k], request)
            subjects[k].assert_same(future.result(WAIT_S), expected, MOST_STEPS)
        assert engine.statistics()["done"] == len(asked)
    finally:
        close_and_check(engine)
