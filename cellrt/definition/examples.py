"""Inputs to try a cell with: rows of zeros, and random rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec

NUM_PAGES = 8
"""The most pages of an example; further nodes share them."""


def zero_inputs(specs: Iterable[RowSpec], rows: int, device: str = "cpu") -> list[CellInput]:
    """Return zeros for each spec; a ragged input has two rows a node, a node with pages or spans one row."""
    inputs: list[CellInput] = []
    for spec in specs:
        if spec.has_nodes:
            inputs.append(_nodes(spec, rows, 1, 1, device))
            continue
        count = 2 * rows if spec.ragged else rows
        values = torch.zeros((count, *spec.shape), dtype=spec.dtype, device=device)
        inputs.append(RaggedRows(values, torch.arange(0, count + 1, 2, device=device)) if spec.ragged else values)
    return inputs


def random_inputs(specs: Iterable[RowSpec], rows: int, generator: torch.Generator) -> list[CellInput]:
    """Return random normal numbers for each spec; integers and bools are zeros; a ragged input has one or two rows
    a node.
    """
    inputs: list[CellInput] = []
    for spec in specs:
        if spec.has_nodes:
            made = _nodes(spec, rows, 1, 1, "cpu")
            if isinstance(made, PagedRows) and spec.dtype.is_floating_point:
                drawn = torch.randn(made.pages.shape, generator=generator, device="cpu")
                made = made._replace(pages=drawn.to(spec.dtype))
            inputs.append(made)
            continue
        counts = [1 + row % 2 for row in range(rows)]
        shape = (sum(counts) if spec.ragged else rows, *spec.shape)
        values = torch.zeros(shape, dtype=spec.dtype, device="cpu")
        if spec.dtype.is_floating_point:
            values = torch.randn(shape, generator=generator, device="cpu").to(spec.dtype)
        offsets = torch.tensor([0, *counts], device="cpu").cumsum(0)
        inputs.append(RaggedRows(values, offsets) if spec.ragged else values)
    return inputs


def zero_nodes(specs: Iterable[RowSpec], nodes: int, rows: int, keys: int, device: str) -> list[CellInput]:
    """Return zeros for each spec of a cell with pages or spans: ``nodes`` nodes of ``rows`` rows each.

    Their pages have room for at least ``keys`` rows.
    """
    return [
        _nodes(spec, nodes, rows, -(-keys // max(1, spec.page_size)), device)
        if spec.has_nodes
        else zero_inputs([spec], nodes * rows, device)[0]
        for spec in specs
    ]


def random_nodes(
    specs: Iterable[RowSpec], nodes: int, rows: int, before: int, generator: torch.Generator
) -> list[CellInput]:
    """Return random rows for a cell with pages or spans: ``rows`` rows a node, which has ``before`` already.

    No two nodes share a page. Numbers are as ``random_inputs`` has them.
    """
    inputs: list[CellInput] = []
    for spec in specs:
        if not spec.has_nodes:
            inputs += random_inputs([spec], nodes * rows, generator)
            continue
        width = -(-(before + rows) // max(1, spec.page_size))
        made = _nodes(spec, nodes, rows, width, "cpu")
        if isinstance(made, PagedRows):
            tables = torch.randperm(nodes * width, generator=generator, device="cpu").to(torch.int32).view(nodes, width)
            pages = torch.zeros((nodes * width, *spec.stored.shape), dtype=spec.dtype, device="cpu")
            if spec.dtype.is_floating_point:
                pages.copy_(torch.randn(pages.shape, generator=generator, device="cpu"))
            positions = made.positions + before if spec.appends else made.positions
            lengths = made.lengths + before
            made = made._replace(pages=pages, tables=tables, lengths=lengths, positions=positions)
        else:
            made = made._replace(positions=made.positions + (0 if spec.span == "whole" else before))
        inputs.append(made)
    return inputs


def _nodes(spec: RowSpec, nodes: int, rows: int, num_pages: int, device: str) -> PagedRows | Spans:
    """Return nodes of ``rows`` rows each, the first of their chains, with tables of ``num_pages`` pages each."""
    offsets = rows * torch.arange(nodes + 1, dtype=torch.int32, device=device)
    of_rows = torch.arange(nodes, dtype=torch.int32, device=device).repeat_interleave(rows)
    steps = torch.arange(rows, dtype=torch.int32, device=device).repeat(nodes)
    if spec.span:
        return Spans(offsets, steps, steps >= 0)
    count = min(nodes, NUM_PAGES)
    pages = torch.zeros((count, *spec.stored.shape), dtype=spec.dtype, device=device)
    tables = (torch.arange(nodes, dtype=torch.int32, device=device) % count)[:, None].repeat(1, num_pages)
    lengths = torch.full((nodes,), rows, dtype=torch.int32, device=device)
    positions = steps if spec.appends else 0 * steps
    return PagedRows(pages, tables, lengths, offsets, of_rows, positions, steps >= 0, spec.page_dim)
