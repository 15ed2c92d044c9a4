"""Registering a model: its example is unfolded, its new cells compiled, tried and measured, and arenas made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cellrt.core.processor import Processor
from cellrt.definition.define import Cell
from cellrt.definition.row_wise import warn_unless_row_wise
from cellrt.definition.spec import RowSpec
from cellrt.engine.patience import announced
from cellrt.engine.registry import Discovery, Model, Registry, check_example, default_priorities
from cellrt.errors import DefinitionError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.arenas import Arenas, rows_for
from cellrt.worker.device.device import Device
from cellrt.worker.step_times import measure_steps

MAX_ARENA_ROWS = 1 << 18


class Registrar:
    """Adds models to an engine; one thread at a time.

    Args:
        registry, processor, arenas: of the engine; arenas by location, the host first.
        arena_bytes: as of ``Engine``.
        device: where cells are measured; None: the CPU.
        num_threads: torch threads of a CPU worker.
        run_in_turn: calls a function when nobody else changes the engine's state.
    """

    def __init__(
        self,
        registry: Registry,
        processor: Processor,
        arenas: list[Arenas],
        arena_bytes: int,
        device: Device | None,
        num_threads: int,
        run_in_turn: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._registry, self._processor, self._arenas, self._arena_bytes = registry, processor, arenas, arena_bytes
        self._device, self._num_threads, self._run_in_turn = device, num_threads, run_in_turn

    def register(self, unfolder: Unfolder, priorities: Mapping[str, int], warm_up: bool) -> None:
        """See ``Engine.register``."""
        if not isinstance(unfolder, Unfolder):
            raise DefinitionError(f"register: expected what @cellrt.unfold makes, got {type(unfolder).__name__}")
        if unfolder.name in self._registry.models:
            raise DefinitionError(f"a model {unfolder.name!r} is registered already")
        discovery = Discovery(self._registry.max_nodes)
        recorded = check_example(unfolder, discovery)
        names = {cell.name for cell in discovery.cells}
        if unknown := priorities.keys() - names:
            raise DefinitionError(
                f"priorities: {sorted(unknown)} are no cells of {unfolder.name!r}; it has {sorted(names)}"
            )
        times = self._prepare(unfolder.name, discovery.cells, warm_up)
        chosen = [
            priorities.get(cell.name, default if cell.priority is None else cell.priority)
            for cell, default in zip(discovery.cells, default_priorities(recorded, discovery))
        ]
        memory = self._allocate(discovery.specs)
        self._run_in_turn(lambda: self._add(discovery, chosen, times, memory))
        model = Model(unfolder, self._registry, self._processor)
        model.states = model.plan(unfolder.example).states
        self._registry.models[unfolder.name] = model

    def _prepare(self, model: str, cells: list[Cell], warm_up: bool) -> dict[str, dict[int, float]]:
        """Does for the cells that are new what no request shall wait for; returns their step times by identity."""
        new = [cell for cell in cells if not self._registry.has_type(cell)]
        if self._device is None:
            with announced(f"cellrt compiles the cells of {model!r}, once for this machine"):
                for cell in new:
                    _ = cell.host_kernel
        if not warm_up:
            return {}
        for cell in new:
            warn_unless_row_wise(cell, depth=4)  # who called Engine.register
        return {cell.identity: measure_steps(cell, self._device, self._num_threads) for cell in new}

    def _allocate(self, specs: list[RowSpec]) -> dict[RowSpec, list[torch.Tensor]]:
        """Memory of the kinds that are new, by location; takes long on a device, and no turn waits for it."""
        return {
            spec: [arenas.allocate(spec, rows) for arenas, rows in zip(self._arenas, self._num_rows(spec))]
            for spec in specs
            if spec not in self._registry.kinds
        }

    def _num_rows(self, spec: RowSpec) -> list[int]:
        """Rows of a kind at each location, the host first."""
        host_rows = rows_for(spec, 4 * self._arena_bytes, 4 * MAX_ARENA_ROWS)
        return [host_rows, *[rows_for(spec, self._arena_bytes, MAX_ARENA_ROWS)] * (len(self._arenas) - 1)]

    def _add(
        self,
        discovery: Discovery,
        priorities: list[int],
        times: Mapping[str, Mapping[int, float]],
        memory: Mapping[RowSpec, list[torch.Tensor]],
    ) -> None:
        """Adds a model's kinds, constants and cells; in a turn of the manager, while tasks may run."""
        for spec, allocated in memory.items():
            host_rows, worker_rows, *_ = self._num_rows(spec)
            self._registry.add_kind(spec, worker_rows, host_rows)
            for arenas, each in zip(self._arenas, allocated):
                arenas.add(spec, each)
        for spec, value in discovery.constants:
            row = self._registry.add_constant(spec, value)
            if row is not None:
                for arenas in self._arenas:
                    arenas.set_constant(self._registry.kind(spec), row, value)
        for cell, priority in zip(discovery.cells, priorities):
            made = self._registry.add_type(cell, priority)
            if made is not None:
                for rows, seconds in times.get(cell.identity, {}).items():
                    self._processor.set_step_time(made.id, rows, seconds)
