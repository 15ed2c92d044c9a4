"""Whether a request has room: in an empty engine, and now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cellrt.core import page_list
from cellrt.core.settings import Limits
from cellrt.core.sized_template import SizedTemplate
from cellrt.core.tables import Tables
from cellrt.core.template import pages_wanted


def why_too_large(
    template: SizedTemplate,
    limits: Limits,
    kind_rows: Sequence[tuple[int, int]],
    most_refs: int,
    kinds: Sequence[object],
) -> str | None:
    """Says what of a template would not fit even in an empty engine; None if it fits.

    Args:
        template: of the request.
        limits: of the tables.
        kind_rows: rows of each kind at a worker and at the host.
        most_refs: most inputs of a node.
        kinds: their names.
    """
    if template.fits:
        return None
    arrays = template.arrays
    links = arrays.links.size + arrays.lists.size + arrays.states.size + arrays.needs.size
    links += page_list.WORDS * len(arrays.pages)
    for what, wanted, limit in (
        ("nodes", arrays.nodes.size, limits.max_nodes),
        ("values", arrays.values.size, limits.max_values),
        ("links", links, limits.max_links),
        ("subgraphs", arrays.subgraphs.size, limits.max_subgraphs),
        ("rows of results and sequences", template.num_places, limits.max_places),
    ):
        if wanted > limit:
            return f"{wanted} {what}, the tables hold {limit}"
    for kind, ((worker, host), (worker_rows, host_rows)) in enumerate(zip(arrays.needs.tolist(), kind_rows)):
        if worker > worker_rows or host > host_rows:
            return (
                f"{worker} rows of {kinds[kind]} at a worker and {host} at the host, the arenas hold {worker_rows} "
                f"and {host_rows} (see Engine(arena_bytes=...))"
            )
        if (pages := pages_wanted(arrays.pages, kind)) > worker_rows:
            return f"{pages} {kinds[kind]}, a worker has {worker_rows} (see Engine(page_bytes=...))"
    if template.most_refs > most_refs:
        return (
            f"a node with {template.most_refs} inputs, at most {most_refs} are possible "
            "(a cell with a larger max_batch makes room for more)"
        )
    return None


def has_rows(t: Tables, template: SizedTemplate) -> bool:
    """Whether the arenas have room for a request now, if its session keeps nothing."""
    arrays = template.arrays
    kinds = t.kinds[: arrays.needs.shape[0]]
    reserved = np.stack([kinds["reserved_worker"], kinds["reserved_host"]], 1)
    rows = np.stack([kinds["worker_rows"], kinds["host_rows"]], 1)
    has_pages = all(
        kinds["reserved_worker"][kind] + pages_wanted(arrays.pages, kind)
        <= kinds["worker_rows"][kind] + kinds["host_rows"][kind]
        for kind in set(arrays.pages[:, 0].tolist())
    )
    has_rows = (reserved + arrays.needs <= rows) | (kinds["is_paged"] != 0)[:, None]
    return has_pages and bool(has_rows.all())
