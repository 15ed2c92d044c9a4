"""Default priorities from the example's type graph, and what overrides them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError
from tests.api.models import SIZE, attending, counter, embedded, leaf, model, pair, recurrent


def priorities(engine: Engine, function, cells=()) -> dict[str, int]:
    """By cell name, of an engine with this model."""
    engine.register(model(function, cells=cells), warm_up=False)
    found = engine._processor.tables.types["priority"]
    return {made.cell.name: int(found[made.id]) for made in engine._registry.types.values()}


def test_decoder_before_encoder(engine: Engine) -> None:
    encoder, decoder = embedded(), attending()

    def function(graph, request):
        encoded = graph.chain(encoder, token=[1, 2, 3])
        return {"h": graph.loop(decoder, max_steps=4, memory=encoded.h, x=encoded.last.h).last.h}

    assert priorities(engine, function) == {"Embedded": 0, "Attending": 1}


def test_internal_before_leaf(engine: Engine) -> None:
    bottom, inner = leaf(), pair()

    def function(graph, request):
        parents = [2, 2, 6, 5, 5, 6, -1]
        return graph.tree(parents, leaf=bottom, inner=inner, leaf_inputs={"x": torch.ones(SIZE)})

    assert priorities(engine, function) == {"tree_leaf": 0, "tree_pair": 1}


def test_cells_on_a_cycle_share_a_depth_and_unused_ones_are_last(engine: Engine) -> None:
    first, second, third = recurrent(), cell(lambda x: {"h": x}, {"x": (SIZE,)}, name="second"), leaf()

    def function(graph, request):
        a = first(x=torch.ones(SIZE))
        b = second(x=a.h)
        c = first(x=b.h)
        return {"h": third(x=c.h).h}

    assert priorities(engine, function, cells=(counter(),)) == {
        "Recurrent": 0,
        "second": 0,
        "tree_leaf": 1,
        "count_up": 0,
    }


def test_longest_path_decides(engine: Engine) -> None:
    low = cell(lambda x: {"h": x + 1}, {"x": (SIZE,)}, name="low")
    middle = cell(lambda x: {"h": x + 2}, {"x": (SIZE,)}, name="middle")
    high = cell(lambda x, y: {"h": x + y}, {"x": (SIZE,), "y": (SIZE,)}, name="high")

    def function(graph, request):
        a = low(x=torch.ones(SIZE))
        return {"h": high(x=a.h, y=middle(x=a.h).h).h}

    assert priorities(engine, function) == {"low": 0, "high": 2, "middle": 1}


def test_overrides(engine) -> None:
    own = cell(lambda x: {"h": x}, {"x": (SIZE,)}, name="own", priority=7)
    after, given = leaf(), recurrent()

    def function(graph, request):
        return {"h": given(x=after(x=own(x=request).h).h).h}

    engine.register(model(function, torch.ones(SIZE)), priorities={"Recurrent": 3}, warm_up=False)
    priorities = engine._processor.tables.types["priority"]
    found = {made.cell.name: int(priorities[made.id]) for made in engine._registry.types.values()}
    assert found == {"own": 7, "tree_leaf": 1, "Recurrent": 3}


def test_a_priority_for_an_unknown_cell_is_a_mistake(engine) -> None:
    only = leaf()
    with pytest.raises(DefinitionError, match=r"\['typo'\] are no cells of .*'tree_leaf'"):
        engine.register(
            model(lambda graph, request: {"h": only(x=request).h}, torch.ones(SIZE)), priorities={"typo": 3}
        )


def test_cells_of_one_name_are_counted_apart(engine) -> None:
    first, second = (cell(lambda x, by=by: {"h": x * by}, {"x": (SIZE,)}, name="scale") for by in (2.0, 3.0))
    engine.register(model(lambda graph, x: {"h": second(x=first(x=x).h).h}, torch.ones(SIZE)), warm_up=False)
    assert sorted(engine.statistics()["cells"]) == sorted(f"scale {made.identity[:8]}" for made in (first, second))


def test_a_model_is_registered_without_networkx() -> None:
    script = """if True:
        import sys, torch, cellrt
        net = cellrt.cell(torch.nn.Linear(2, 2), inputs={"x": (2,)})
        with cellrt.Engine() as engine:
            engine.register(cellrt.unfold("net", example={"x": torch.zeros(2)})(lambda graph, request: net(**request)))
        print("networkx" in sys.modules)
    """
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert made.stdout.strip() == "False"
