"""Cells as files: any number of rows, the same identity, no Python class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cellrt.cells import EmbeddingGRUDecoder, LSTMCell
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell, load_cell
from cellrt.definition.spec import CellInput, RaggedRows, rows
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError
from tests.api.models import INTEGER, SIZE, attending, child_sum, counter, leaf, model, recurrent

ATTRIBUTES = ["name", "inputs", "outputs", "carry", "finite", "max_batch", "min_batch", "batch_sizes", "priority"]
ROOT = Path(__file__).parents[2]


class Transformer(nn.Module):
    """A layer over sentences of fixed length, with a tied weight and tensors of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.plain = torch.ones(8)
        self.listed = [torch.ones(8)]
        self.register_buffer("kept", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.two(self.one(self.layer(x))) * self.plain + self.kept + self.listed[0]
        return y, y.bfloat16().sum(dim=1), y[:, 0, 0] > 0


CELLS: dict[str, Callable[[], Cell]] = {
    "module": recurrent,
    "ragged": child_sum,
    "ragged without weights": attending,
    "function": counter,
    "closure": leaf,
    "one row": lambda: cell(nn.GRUCell(4, 4), {"input": (4,), "hx": (4,)}, carry={"hx": "output"}, max_batch=1),
    "lstm": lambda: cell(LSTMCell(4, 8), {"x": (4,), "h": (8,), "c": (8,)}, finite="h", min_batch=2, priority=3),
    "decoder": lambda: cell(EmbeddingGRUDecoder(9, 4, 8, 1), {"token": INTEGER, "h": (8,)}, batch_sizes=[1, 2, 4, 8]),
    "transformer": lambda: cell(Transformer(), {"x": (5, 8)}, max_batch=32),
    "bfloat16": lambda: cell(nn.Linear(4, 4).bfloat16(), {"x": rows(4, dtype=torch.bfloat16)}),
}


def random_inputs(made: Cell, num_rows: int, ragged_counts: Callable[[int], int]) -> list[CellInput]:
    inputs: list[CellInput] = []
    for spec in made.inputs.values():
        counts = torch.tensor([ragged_counts(k) for k in range(num_rows)])
        shape = (int(counts.sum()) if spec.ragged else num_rows, *spec.shape)
        values = torch.randn(shape) if spec.dtype.is_floating_point else torch.randint(0, 9, shape)
        values = values.to(spec.dtype)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        inputs.append(RaggedRows(values, offsets) if spec.ragged else values)
    return inputs


@pytest.mark.parametrize("name", CELLS)
def test_a_loaded_cell_is_the_saved_one(name: str, tmp_path: Path) -> None:
    made = CELLS[name]()
    made.save(tmp_path / "made" / "here")
    loaded = load_cell(tmp_path / "made" / "here")
    loaded.save(tmp_path)
    for other in (loaded, load_cell(str(tmp_path))):
        for attribute in ATTRIBUTES:
            assert getattr(other, attribute) == getattr(made, attribute), attribute
        assert other.identity == made.identity
        assert list(other.inputs) == list(made.inputs) and list(other.outputs) == list(made.outputs)
        assert not other.has_steps
        for num_rows in {1, min(2, made.max_batch), min(7, made.max_batch), made.max_batch}:
            for counts in (lambda k: 0, lambda k: int(k == 0), lambda k: k % 4):
                inputs = random_inputs(made, num_rows, counts)
                with torch.inference_mode():
                    results = other.run(*inputs)
                    other.check_outputs(results, num_rows)
                    for result, expected in zip(results, made.run(*inputs)):
                        torch.testing.assert_close(
                            result, expected, rtol=1e-2 if name == "transformer" else 1e-4, atol=1e-4
                        )


def test_the_program_holds_no_weights(tmp_path: Path) -> None:
    weight = torch.randn(1000, 100)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    for k, made in enumerate((cell(function, {"x": (1000,)}), cell(nn.Linear(1000, 100), {"x": (1000,)}))):
        made.save(tmp_path / str(k))
        assert (tmp_path / str(k) / "program.pt2").stat().st_size < 50_000
        assert (tmp_path / str(k) / "weights.safetensors").stat().st_size > 400_000


SERVER = """
import sys
import torch
from cellrt.definition.define import load_cell
from cellrt.engine.engine import Engine
from cellrt.graph.unfolder import unfold

cell = load_cell(sys.argv[1])
assert not any(name.startswith("tests") for name in sys.modules)

@unfold("m", example=torch.zeros(2, 4))
def chain(graph, x):
    return {"h": graph.chain(cell, x=x).h}

with Engine(workers=1, arena_bytes=1 << 20) as engine:
    engine.register(chain, warm_up=False)
    xs = [torch.arange(4.0 * n).reshape(n, 4) / 10 for n in (1, 2, 9)]
    for future in engine.submit_many("m", xs):
        print(future.result(60)["h"][-1].tolist())
    engine.check()
"""


@pytest.mark.slow
def test_served_by_a_process_without_the_class(tmp_path: Path) -> None:
    made = recurrent()
    made.save(tmp_path)
    finished = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr
    for count, line in zip((1, 2, 9), finished.stdout.splitlines(), strict=True):
        h = torch.zeros(1, SIZE)
        for x in torch.arange(4.0 * count).reshape(count, 1, 4) / 10:
            h = made.run(x, h)[0]
        torch.testing.assert_close(torch.tensor(json.loads(line)), h[0], rtol=1e-5, atol=1e-5)


def test_a_loaded_cell_batches_with_the_saved_one(engine: Engine, tmp_path: Path) -> None:
    made = child_sum()
    made.save(tmp_path)
    for name, used in (("saved", made), ("loaded", load_cell(tmp_path))):
        engine.register(
            model(lambda graph, x, used=used: used(x=x, h=[used(x=x, h=[]).h, x]), torch.ones(SIZE), name),
            warm_up=False,
        )
    assert list(engine.statistics()["cells"]) == ["ChildSum"]
    one, two = engine.submit("saved", torch.ones(SIZE)), engine.submit("loaded", torch.ones(SIZE))
    torch.testing.assert_close(one.result(60), two.result(60))


def decides_by_values(x: torch.Tensor) -> torch.Tensor:
    return x if float(x.sum()) > 0 else -x


def decides_by_rows(x: torch.Tensor) -> torch.Tensor:
    return x if len(x) < 100 else -x


@pytest.mark.parametrize("function", [decides_by_values, decides_by_rows])
def test_code_that_cannot_be_exported(function: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    made = cell(function, {"x": (2,)})
    with pytest.raises(DefinitionError, match=f"cell '{function.__name__}' cannot be exported for any number of rows"):
        made.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_saving_again_replaces(tmp_path: Path) -> None:
    leaf().save(tmp_path)
    recurrent().save(tmp_path)
    assert load_cell(tmp_path).identity == recurrent().identity
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cell.json", "program.pt2", "weights.safetensors"]
