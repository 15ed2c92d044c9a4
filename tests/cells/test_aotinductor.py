"""What AOTInductor makes of cells gives what their modules give: of users' own modules, and of every ready-made cell.

Ten seconds and more for each of them, so these are slow.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.own_modules import MODULES
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.examples import random_inputs
from tests.cells.every_cell import CASES, MODES, Row, Subject, batch_of, seeded, subject_of
from tests.cells.test_every_cell import COUNTS, SEEDS, picked, shuffled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ELEMENTWISE = ("integers", "several outputs", "embedding")
STAYS_EAGER: dict[str, Reason] = {}
"""Ready-made cells that cannot be compiled, and why."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LibraryStore:
    return LibraryStore(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", MODULES)
def test_a_users_module_gives_the_same_or_says_why_not(store: LibraryStore, name: str) -> None:
    made = MODULES[name].cell(name)
    if (refused := MODULES[name].refused) is not None:
        with pytest.raises(NotCompiledError) as error:
            compile_cell(made, store)
        assert error.value.reason is Reason[refused]
        return
    form = compile_cell(made, store)
    if name in ELEMENTWISE:
        assert form.is_batch_invariant
    is_half = any(spec.dtype == torch.bfloat16 for spec in made.inputs.values())
    tolerance = MODES["bfloat16" if is_half else "plain"].tolerance
    for rows in (1, 2, 3, 17, 64, 512):
        inputs = random_inputs(made.inputs.values(), rows, seeded(rows))
        outputs = form.run(rows, dict(zip(made.inputs, inputs)))
        assert outputs is not None
        with torch.inference_mode():
            for value, expected in zip(outputs.values(), made.run(*inputs), strict=True):
                torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


class Compiled(Subject):
    """A subject whose cell runs in its form."""

    form: CompiledForm

    def run(self, some: list[Row]) -> Row:
        inputs = batch_of(self.cell.inputs, some)
        outputs = self.form.run(len(some), dict(zip(self.cell.inputs, inputs)))
        assert outputs is not None
        return outputs


@pytest.mark.parametrize("name", CASES)
def test_a_ready_made_cell_gives_what_its_module_gives_in_any_company(store: LibraryStore, name: str) -> None:
    plain = subject_of(name, "fused")
    try:
        form = compile_cell(plain.cell, store)
    except NotCompiledError as error:
        assert STAYS_EAGER.get(name) is error.reason, error
        return
    assert name not in STAYS_EAGER
    compiled = Compiled(*plain)
    compiled.form = form

    @settings(max_examples=20)
    @given(st.lists(COUNTS, min_size=1, max_size=3), SEEDS)
    def check(counts: list[int], seed: int) -> None:
        generator = seeded(seed)
        some, order = plain.draw(sum(counts), generator), shuffled(sum(counts), generator)
        together = compiled.run(some)
        compiled.assert_same(together, plain.run(some))
        for places in torch.tensor(order).split(counts):
            compiled.assert_same(compiled.run([some[k] for k in places.tolist()]), picked(together, places.tolist()))

    check()
