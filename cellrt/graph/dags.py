"""Trees and other acyclic graphs, whose nodes read each other: each is recorded in one piece, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.node_sets import FOR_EACH_SOURCE, PICK, READ_WORDS
from cellrt.core.templates.program import CARRY, FIXED, LIST, OP_DAG, OP_TREE, STEP
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError
from cellrt.graph.children import Word, child_word
from cellrt.graph.dag_checks import is_dag, why_no_dag
from cellrt.graph.recorder import Recorder, Source
from cellrt.graph.row_bits import LISTS, as_integers, num_steps
from cellrt.graph.symbols import Dag, Tree
from cellrt.graph.tree_checks import count_leaves, why_no_tree

OF_A_TREE = -1
"""A value in place of the number of sources: nodes read their children, and nothing is given for each of them."""
A_NODE, A_SOURCE = "a node", "a source"
A_LEAF, AN_INNER_NODE = "for each leaf of parents", "for each node of parents that has children"


def tree_of_cells(
    graph: Recorder,
    parents: object,
    leaf: Cell,
    inner: Cell,
    leaf_inputs: Mapping[str, Source],
    inner_inputs: Mapping[str, Source],
) -> Tree:
    """Record a tree; see ``Graph.tree``."""
    checked = as_integers(parents, "tree: expected parents as integers [nodes], at least one", 1)
    num_leaves, *num_children = count_leaves(checked) if checked.dtype == np.int32 else (-1,)
    if num_leaves < 0:
        raise RequestError(f"tree: {why_no_tree(checked)}")
    size = checked.size
    words = [OP_TREE, graph._begin(leaf), graph._begin(inner), size, num_leaves]
    graph._count_nodes(size, inner)
    picked: list[int] = []
    read = _words(graph, leaf, None, leaf_inputs, num_leaves, OF_A_TREE, picked)
    of_children = _words(graph, inner, leaf, inner_inputs, size - num_leaves, OF_A_TREE, picked)
    named = _num_named(of_children) if inner_inputs else _reading_of(inner, leaf, True).num_named
    if named and size > 1 and num_children != [named, named]:
        raise RequestError(f"tree: {_why_other_children(checked, inner, named)}")
    program = graph._program
    program.fromlist([*words, len(picked), *read, *of_children, *picked])  # which takes half of what ``extend`` does
    program.frombytes(checked.tobytes())
    leaf_values, inner_values = len(leaf.outputs), len(inner.outputs)
    first = graph._take_values(num_leaves * leaf_values + (size - num_leaves) * inner_values)
    return Tree(graph, (leaf, inner), checked, first, graph._num_values - (inner_values if size > 1 else leaf_values))


def _num_named(read: Sequence[int]) -> int:
    """Return how many children an inner cell reads by name, from the words of its inputs; 0 if it reads all."""
    return max([1 + child for mode, child in zip(read[::READ_WORDS], read[1::READ_WORDS]) if mode == CARRY], default=0)


def _why_other_children(parents: NDArray[np.int32], inner: Cell, named: int) -> str:
    """Return which node has not as many children as its cell names."""
    counts = np.bincount(parents[parents >= 0], minlength=parents.size)
    node = int(np.flatnonzero((counts > 0) & (counts != named))[0])
    return f"node {node} has {counts[node]} children, cell {inner.name!r} reads {named} by name"


def dag_of_cell(graph: Recorder, cell: Cell, offsets: object, sources: object, inputs: Mapping[str, Source]) -> Dag:
    """Record an acyclic graph of one cell; see ``Graph.dag``."""
    begins = as_integers(offsets, "dag: expected offsets as integers [nodes + 1], at least two", 2)
    read = as_integers(sources, "dag: expected sources as integers [sources]", 0)
    if begins.dtype != np.int32 or read.dtype != np.int32 or not is_dag(begins, read):
        raise RequestError(f"dag: {why_no_dag(begins, read)}")
    count = begins.size - 1
    words = [OP_DAG, graph._begin(cell), count, read.size]
    graph._count_nodes(count, cell)
    picked: list[int] = []
    input_words = _words(graph, cell, cell, inputs, count, read.size, picked)
    if read.size and LIST not in input_words[::READ_WORDS]:
        raise RequestError(
            f"dag: cell {cell.name!r} reads no source: none of its outputs {list(cell.outputs)} has the name of a "
            "ragged input"
        )
    program = graph._program
    program.fromlist([*words, len(picked), *input_words, *picked])
    program.frombytes(begins.tobytes())
    program.frombytes(read.tobytes())
    return Dag(graph, cell, graph._take_values(count * len(cell.outputs)), count)


class _Unread(NamedTuple):
    """An input of a cell of many nodes.

    Attributes:
        name, spec: the name and the spec of the input.
        otherwise: what it reads where it is not given: a word, nothing for zeros, or a text that says what is wrong.
        refused: why it cannot be given; empty if it can.
        whose: a row of it is for each of these.
    """

    name: str
    spec: RowSpec
    otherwise: Word | str | None
    refused: str
    whose: str


class _Reading(NamedTuple):
    """The words of a cell at many nodes.

    Attributes:
        inputs: one by one.
        words: the words of the inputs if none is given; None if one must be given, or is zeros.
        num_named: how many children it reads by name then; 0 if it reads all.
    """

    inputs: Sequence[_Unread]
    words: Sequence[int] | None
    num_named: int


@lru_cache(maxsize=256)
def _reading_of(cell: Cell, maker: Cell | None, is_tree: bool) -> _Reading:
    """Return how a cell reads at many nodes; ``maker``: see ``_words``."""
    found: list[_Unread] = []
    for name, spec in cell.inputs.items():
        otherwise: Word | str | None = f"missing; expected {spec}"
        refused, whose = "", A_SOURCE if spec.ragged else A_NODE if not is_tree else AN_INNER_NODE if maker else A_LEAF
        if spec.has_nodes:
            otherwise = refused = f"a cell of a {'tree' if is_tree else 'dag'} can have no {spec}"
        elif spec.ragged and (is_tree or name in cell.outputs):
            refused = f"reads the {'children' if is_tree else 'sources'} of a node and cannot be given"
            otherwise = (LIST, 0, 0) if maker is None else child_word(cell, name, maker)
        elif is_tree and maker is not None:
            otherwise = child_word(cell, name, maker)
        elif name in cell.carry:
            otherwise = None
        elif spec.ragged:
            otherwise = f"missing, and not the name of an output, of which it would get the sources'; expected {spec}"
        found.append(_Unread(name, spec, otherwise, refused, whose))
    words = [word for each in found if isinstance(each.otherwise, tuple) for word in each.otherwise]
    return _Reading(found, words if len(words) == READ_WORDS * len(found) else None, _num_named(words))


def _words(
    graph: Recorder,
    cell: Cell,
    maker: Cell | None,
    inputs: Mapping[str, Source],
    num_nodes: int,
    num_sources: int,
    picked: list[int],
) -> Sequence[int]:
    """Return mode, a and b of each input of a cell at many nodes, as ``core/templates/node_sets.py`` reads them.

    Args:
        maker: the cell whose outputs the nodes read; None for leaves.
        picked: values that are listed; it is added to.

    Raise RequestError naming the input.
    """
    reading = _reading_of(cell, maker, num_sources == OF_A_TREE)
    if not inputs and reading.words is not None:
        return reading.words
    for name in inputs:
        if name not in cell.inputs:
            raise RequestError(f"{graph._where(cell, name)}: unknown; the cell has inputs {list(cell.inputs)}")
    words: list[int] = []
    for name, spec, otherwise, refused, whose in reading.inputs:
        word: Word | str | None = otherwise
        if name in inputs:
            count = num_sources if spec.ragged else num_nodes
            word = refused or _given(graph, cell, name, inputs[name], count, whose, picked)
        if isinstance(word, str):
            raise RequestError(f"{graph._where(cell, name)}: {word}")
        words += (FIXED, graph._zero(spec), 0) if word is None else word
    return words


def _given(
    graph: Recorder, cell: Cell, name: str, source: Source, count: int, whose: str, picked: list[int]
) -> Word | str:
    """Return the word of an input, or a text that says what is wrong with it.

    The input has one row for all nodes, or one for each of ``count`` nodes, or of sources if it is ragged. ``whose``: a
    row is for each of these.
    """
    spec, mode = cell.inputs[name], 0
    if spec.ragged:
        spec, mode = RowSpec(spec.shape, spec.dtype), FOR_EACH_SOURCE
    given = len(source) if isinstance(source, LISTS) and not source else num_steps(source, spec)
    if given < 0:
        return mode + FIXED, graph._value(cell, name, spec, source), 0
    if given != count:
        return f"expected {count} rows, one {whose}, got {given}"
    try:
        values = graph._stepped(cell, name, spec, source) if count else range(1)
    except RequestError as error:
        raise RequestError(str(error).replace("for each step", "a row").replace(" for all steps", "")) from None
    if isinstance(values, range):
        return mode + STEP, values.start, values.step
    picked += values
    return mode + PICK, len(picked) - count, 0
