"""Checks of the inputs that a user gives to a compiled form's ``run``; compiled code gets addresses and cannot
check.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, conversion, describe
from cellrt.errors import DefinitionError

_OFFSETS, _NUMBER, _FLAG = (RowSpec((), dtype) for dtype in (torch.int64, torch.int32, torch.bool))


def check_inputs(specs: Mapping[str, RowSpec], num_rows: int, inputs: Mapping[str, CellInput]) -> None:
    """Raise DefinitionError for inputs whose memory does not hold just these rows.

    Tasks of an engine, whose rows are gathered for the form, do not come here.
    """
    if type(num_rows) is not int or num_rows < 1:
        raise DefinitionError(f"num_rows: expected at least 1, got {num_rows!r}")
    if inputs.keys() != specs.keys():
        raise DefinitionError(f"expected inputs {list(specs)}, got {list(inputs)}")
    offsets: dict[str, list[int]] = {}
    for name, spec in specs.items():
        value, count = inputs[name], num_rows
        kinds = {RaggedRows: spec.ragged, PagedRows: bool(spec.page_size), Spans: bool(spec.span)}
        if any(isinstance(value, kind) != is_wanted for kind, is_wanted in kinds.items()):
            raise DefinitionError(f"input {name!r}: expected {spec}, got {type(value).__name__}")
        if isinstance(value, PagedRows | Spans):
            offsets[name] = _checked_offsets(name, value, num_rows)
            if isinstance(value, PagedRows):
                _check_pages(name, spec, value)
            continue
        if isinstance(value, RaggedRows):
            _check_rows(name, "offsets", value.offsets, num_rows + 1, _OFFSETS)
            if int(value.offsets[0]) != 0 or bool((value.offsets.diff() < 0).any()):
                found = value.offsets.tolist()
                raise DefinitionError(f"input {name!r}: expected offsets from 0 that never fall, got {found}")
            count = int(value.offsets[-1])
            value = value.values
        _check_rows(name, "rows", value, count, spec.stored)
    if len(set(map(tuple, offsets.values()))) > 1:
        raise DefinitionError(f"expected the same nodes of each input, got offsets {offsets}")


def _checked_offsets(name: str, value: PagedRows | Spans, num_rows: int) -> list[int]:
    """Return the offsets of nodes that have all rows between them, each at least one; what is said of each row is
    looked at, too.
    """
    found = value.offsets
    _check_rows(name, "offsets", found, max(2, found.numel()), _NUMBER)
    if found[0] != 0 or found[-1] != num_rows or (found.diff() < 1).any():
        raise DefinitionError(f"input {name!r}: expected offsets that rise from 0 to {num_rows}, got {found.tolist()}")
    _check_rows(name, "positions", value.positions, num_rows, _NUMBER)
    if (value.positions < 0).any():
        raise DefinitionError(f"input {name!r}: expected positions from 0 on, got {value.positions.tolist()}")
    _check_rows(name, "flags is_read", value.is_read, num_rows, _FLAG)
    offsets: list[int] = found.tolist()
    return offsets


def _check_pages(name: str, spec: RowSpec, value: PagedRows) -> None:
    """Check pages; their offsets are checked before."""
    nodes, rows = len(value.offsets) - 1, len(value.positions)
    if value.page_dim != spec.page_dim:
        raise DefinitionError(f"input {name!r}: expected page_dim {spec.page_dim}, got {value.page_dim}")
    _check_rows(name, "pages", value.pages, value.pages.shape[0] if value.pages.dim() else 0, spec.stored)
    _check_rows(name, "tables", value.tables, nodes, RowSpec(tuple(value.tables.shape[1:2]) or (1,), torch.int32))
    _check_rows(name, "lengths", value.lengths, nodes, _NUMBER)
    _check_rows(name, "nodes", value.nodes, rows, _NUMBER)
    room = value.tables.shape[1] * value.page_size
    of_rows = torch.repeat_interleave(value.offsets.diff())
    for what, wrong in (
        (f"tables of pages 0 to {len(value.pages) - 1}", (value.tables < 0) | (value.tables >= len(value.pages))),
        (f"lengths from 0 to {room}, for which its tables have room", (value.lengths < 0) | (value.lengths > room)),
        ("each row's node by its offsets as nodes", value.nodes != of_rows),
        ("positions within its lengths", value.positions >= value.lengths[of_rows] if spec.appends else of_rows < 0),
    ):
        if wrong.any():
            raise DefinitionError(f"input {name!r}: expected {what}")


def _check_rows(name: str, what: str, value: object, count: int, spec: RowSpec) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != (count, *spec.shape) or value.dtype != spec.dtype:
        got = describe(value) if isinstance(value, torch.Tensor) else type(value).__name__
        hint = conversion(spec.dtype, value.dtype) if isinstance(value, torch.Tensor) else ""
        raise DefinitionError(f"input {name!r}: expected {count} {what} of {spec}, got {got}{hint}")
    if not value.is_cpu or not value.is_contiguous():
        got = f"strides {value.stride()} on {value.device}"
        raise DefinitionError(f"input {name!r}: expected contiguous {what} on the CPU, got {got}")
