"""What the tables hold at a moment: rows that are used and free, by place, and nodes that are ready, by cell type."""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.core.processor import Processor
from cellrt.core.tables import MAX_KINDS, NUM_PRIORITIES
from cellrt.definition.spec import RowSpec


def rows_by_place(processor: Processor, kinds: Sequence[RowSpec]) -> dict[str, dict[str, int]]:
    """Rows of arenas, and their bytes, by place: "host", "worker 1", ...; of any thread, may lag by a turn."""
    arenas = processor.tables.arenas
    places: dict[str, dict[str, int]] = {}
    for location in range(processor.num_workers + 1):
        counts = dict.fromkeys(("rows", "used_rows", "bytes", "used_bytes"), 0)
        for kind, spec in enumerate(kinds):
            arena = arenas[location * MAX_KINDS + kind]
            rows, used = int(arena["capacity"]), int(arena["capacity"]) - int(arena["num_free"])
            counts["rows"] += rows
            counts["used_rows"] += used
            counts["bytes"] += rows * spec.num_bytes
            counts["used_bytes"] += used * spec.num_bytes
        places["host" if location == 0 else f"worker {location}"] = counts
    return places


def ready_nodes(processor: Processor, type_id: int) -> int:
    """Nodes of a cell type that could run now; of any thread, may lag by a turn."""
    first = type_id * NUM_PRIORITIES
    return int(processor.tables.ready[first : first + NUM_PRIORITIES].sum())
