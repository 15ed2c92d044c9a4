"""What the tables hold at a moment: rows and pages that are used and free, by place, and nodes ready, by cell type."""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.core.processor import Processor
from cellrt.core.tables import MAX_KINDS, NUM_PRIORITIES
from cellrt.definition.spec import RowSpec

UNITS = ("rows", "pages", "bytes")


def rows_by_place(processor: Processor, kinds: Sequence[RowSpec]) -> dict[str, dict[str, int]]:
    """Rows, pages and bytes of arenas by place: "host", "worker 1", ...; of any thread, may lag by a turn."""
    arenas, is_paged = processor.tables.arenas, processor.tables.kinds["is_paged"]
    places: dict[str, dict[str, int]] = {}
    for location in range(processor.num_workers + 1):
        counts = {f"{used}{unit}": 0 for unit in UNITS for used in ("", "used_")}
        for kind, spec in enumerate(kinds):
            arena = arenas[location * MAX_KINDS + kind]
            rows, used = int(arena["capacity"]), int(arena["capacity"]) - int(arena["num_free"])
            unit = "pages" if is_paged[kind] else "rows"
            counts[unit] += rows
            counts[f"used_{unit}"] += used
            counts["bytes"] += rows * spec.num_bytes
            counts["used_bytes"] += used * spec.num_bytes
        places["host" if location == 0 else f"worker {location}"] = counts
    return places


def ready_nodes(processor: Processor, type_id: int) -> int:
    """Nodes of a cell type that could run now; of any thread, may lag by a turn."""
    first = type_id * NUM_PRIORITIES
    return int(processor.tables.ready[first : first + NUM_PRIORITIES].sum())
