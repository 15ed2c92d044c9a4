"""A task of a cell with pages or spans in one compiled call leaves behind what the module leaves, bit by bit."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cellrt
from cellrt.cells.language_models import language_model, layered_language_model
from cellrt.core.state.task_layout import TaskView
from cellrt.unfolders import complete
from cellrt.worker.cpu import cpu_executor
from cellrt.worker.cpu.cpu_executor import Executor
from cellrt.worker.cpu.run_span_task import run_span_task
from tests.engine.helpers import WAIT_S
from tests.unfolders.language_models import draw_prompt, small_llama

BEHIND = 171
"""What lies behind the memory that a task may use."""


def in_just_enough_memory(*arguments: Any) -> int:
    """Runs a task in as much scratch memory as it asks for, and looks whether it wrote behind that."""
    *what, scratch = arguments
    wanted = run_span_task(*what, scratch[:0])
    if wanted <= 0:
        return wanted
    memory = np.full(wanted + 4_096, BEHIND, np.uint8)
    done: int = run_span_task(*what, memory[:wanted])
    assert (memory[wanted:] == BEHIND).all()
    return done


class BothWays:
    """Has every task run by its module first, then, from the same memory, in one call; what each leaves is compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, int]] = []
        """Of each task its nodes and rows."""
        in_one_call = Executor._run_compiled

        def run(own: Executor, cell: Any, buffer: np.ndarray) -> bool:
            own.cells["is_there"] = 0  # compiled code runs none without Python
            before, by_module = self._memory(own), buffer.copy()
            cell_type = next(each for each in own._types.values() if each.form is cell.keeps)
            assert not own._run_module(replace(cell_type, form=None), by_module)
            wanted = self._memory(own)
            for arena, held in zip(self._arenas(own), before):
                arena[:] = held
            assert in_one_call(own, cell, buffer)
            assert np.array_equal(buffer, by_module)
            assert all(map(np.array_equal, self._memory(own), wanted))
            if cell_type.cell.has_spans:
                view = TaskView(buffer)
                self.rows.append((len(view.spans) - 1, view.num_rows))
            return True

        monkeypatch.setattr(Executor, "_run_compiled", run)
        monkeypatch.setattr(cpu_executor, "run_span_task", in_just_enough_memory)

    def _arenas(self, own: Executor) -> list[np.ndarray]:
        return [each for arenas in own._arenas for each in arenas._bytes]

    def _memory(self, own: Executor) -> list[np.ndarray]:
        return [each.copy() for each in self._arenas(own)]


@pytest.mark.parametrize("make", [language_model, layered_language_model])
def test_prompts_pieces_and_single_steps_of_a_language_model(make, monkeypatch):
    both = BothWays(monkeypatch)
    cell = make(small_llama(), 39, page_size=4, max_batch_rows=8, max_batch=4)
    with cellrt.Engine(1, page_bytes=1 << 16, arena_bytes=1 << 16) as engine:
        engine.register(complete("lm", cell, max_tokens=9))
        asked = [{"prompt": draw_prompt(k, length), "max_tokens": 9} for k, length in enumerate((1, 9, 3, 21, 2, 8))]
        engine.submit("lm", asked[3]).cancel()
        engine.check()  # the last turn of another thread, which would write to the memory that is compared
        futures = engine.submit_many("lm", asked)
        assert all(len(each["token"]) for each in futures.results(WAIT_S))
        assert re.search(r"(\d+) of \1 cells compiled; .* written by hand", repr(engine))
    assert any(nodes < rows for nodes, rows in both.rows) and any(nodes == rows > 1 for nodes, rows in both.rows)


def with_neighbours(x: Tensor, near: cellrt.RaggedRows, far: cellrt.RaggedRows, text: cellrt.Spans) -> Tensor:
    """Rows beside two inputs of any number of rows, and the length of their node's span."""
    sums = [torch.segment_reduce(each.values, "sum", offsets=each.offsets, axis=0, initial=0.0) for each in (near, far)]
    lengths = text.offsets.diff()[text.nodes]
    return x + sums[0] + 8 * sums[1] + 64 * lengths[:, None]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_user_s_cell_of_spans_that_reads_any_number_of_rows_besides(monkeypatch):
    both = BothWays(monkeypatch)
    inputs = {"x": (3,), "near": cellrt.ragged(3), "far": cellrt.ragged(3), "text": cellrt.span(whole=True)}
    cell = cellrt.cell(with_neighbours, inputs, max_batch=8, max_batch_rows=64)

    def unfolded(graph: cellrt.Graph, request: dict[str, Tensor]) -> dict[str, object]:
        return {"y": graph.chain(cell, **request).output}

    def numbers(rows: int, seed: int) -> Tensor:  # whole ones, so that no order of a sum matters
        return torch.randint(0, 5, (rows, 3), generator=torch.Generator().manual_seed(seed)).float()

    requests = [
        {"x": numbers(steps, 1), "near": numbers(near, 2), "far": numbers(far, 3)}
        for steps, near, far in ((1, 1, 1), (4, 3, 2), (7, 1, 5), (2, 6, 1))
    ]
    with cellrt.Engine(1, compile="wait") as engine:
        engine.register(cellrt.unfold("m", example=requests[1])(unfolded))
        assert "1 of 1 cells compiled" in repr(engine)
        for request, result in zip(requests, engine.submit_many("m", requests).results(WAIT_S)):
            wanted = request["x"] + request["near"].sum(0) + 8 * request["far"].sum(0) + 64 * len(request["x"])
            assert torch.equal(result["y"], wanted)
    assert any(nodes > 1 for nodes, _ in both.rows)
