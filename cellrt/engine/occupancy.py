"""The occupancy of the tables: rows and pages that are used and free by place, idle sessions' states, ready nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cellrt.core.processor import Processor
from cellrt.core.state.tables import LOCATION_SHIFT, MAX_KINDS, MAX_STATES, NUM_PERMANENT, NUM_PRIORITIES
from cellrt.definition.spec import RowSpec

UNITS = ("rows", "pages", "bytes")


def rows_by_place(processor: Processor, kinds: Sequence[RowSpec]) -> dict[str, dict[str, int]]:
    """Return rows, pages and bytes of arenas by place: "host", "worker 1", ...

    Any thread may call it; it may lag by a turn.
    """
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
        places[_name_of(location)] = counts
    return places


def session_bytes_by_place(processor: Processor, kinds: Sequence[RowSpec], sessions: Sequence[int]) -> dict[str, int]:
    """Return the bytes of states that sessions have in the arenas while no request of theirs runs, by place.

    A session -1 is a new one. Shared pages count once. Any thread may call it, as ``rows_by_place``.
    """
    tables, at = processor.tables, np.array([session for session in sessions if session >= 0], np.int64)
    slots = tables.slots.reshape(-1, MAX_STATES)[at].reshape(-1)
    row_bytes = np.array([spec.num_bytes for spec in kinds] or [0], np.int64)
    handles, of_kind = [slots["row"][slots["row"] >= NUM_PERMANENT]], [slots["kind"][slots["row"] >= NUM_PERMANENT]]
    for slot in slots[slots["pages"] > 0]:
        handles.append(tables.places[slot["place"] :][: slot["pages"]])
        of_kind.append(np.full(handles[-1].size, slot["kind"]))
    held = np.unique(np.concatenate(of_kind).astype(np.int64) << 32 | np.concatenate(handles))
    locations, sizes = (held & 0xFFFFFFFF) >> LOCATION_SHIFT, row_bytes[held >> 32]
    found = np.bincount(np.clip(locations, 0, processor.num_workers), sizes, processor.num_workers + 1)
    return {_name_of(location): int(size) for location, size in enumerate(found)}


def _name_of(location: int) -> str:
    return "host" if location == 0 else f"worker {location}"


def ready_nodes(processor: Processor, type_id: int) -> int:
    """Return the nodes of a cell type that could run now. Any thread may call it; it may lag by a turn."""
    first = type_id * NUM_PRIORITIES
    return int(processor.tables.ready[first : first + NUM_PRIORITIES].sum())
