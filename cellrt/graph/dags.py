"""Trees and other acyclic graphs, whose nodes read each other: each is recorded in one piece."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.program import CARRY, FIXED, LIST, STEP
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError
from cellrt.graph.children import Word, child_word
from cellrt.graph.dag_program import FOR_EACH_SOURCE, PICK, dag_program, is_dag, why_no_dag
from cellrt.graph.recorder import Recorder, Source
from cellrt.graph.row_bits import LISTS, as_integers, num_steps
from cellrt.graph.symbols import Dag, Tree
from cellrt.graph.tree_program import count_leaves, tree_program, why_no_tree

OF_A_TREE = -1
"""A value in place of the number of sources: nodes read their children, and nothing is given for each of them."""
A_NODE, A_SOURCE = "a node", "a source"
A_LEAF, AN_INNER_NODE = "for each leaf of parents", "for each node of parents that has children"
NO_VALUES = np.empty(0, np.int32)


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
    num_leaves = count_leaves(checked) if checked.dtype == np.int32 else -1
    if num_leaves < 0:
        raise RequestError(f"tree: {why_no_tree(checked)}")
    num_inner = checked.size - num_leaves
    leaf_type, inner_type = graph._begin(leaf), graph._begin(inner)
    graph._count_nodes(checked.size, inner)
    picked: list[int] = []
    leaf_words = _words(graph, leaf, None, leaf_inputs, num_leaves, OF_A_TREE, picked)
    inner_words = _words(graph, inner, leaf, inner_inputs, num_inner, OF_A_TREE, picked)
    words, firsts, problem = tree_program(
        checked,
        leaf_type,
        inner_type,
        len(leaf.outputs),
        len(inner.outputs),
        leaf_words,
        inner_words,
        _listed(picked),
        graph._num_values,
    )
    if problem >= 0:
        named = 1 + int(inner_words[inner_words[:, 0] == CARRY, 1].max())
        given = int((checked == problem).sum())
        raise RequestError(f"tree: node {problem} has {given} children, cell {inner.name!r} reads {named} by name")
    graph._program.frombytes(words.tobytes())
    graph._take_values(num_leaves * len(leaf.outputs) + num_inner * len(inner.outputs))
    return Tree(graph, (leaf, inner), checked, firsts)


def dag_of_cell(graph: Recorder, cell: Cell, offsets: object, sources: object, inputs: Mapping[str, Source]) -> Dag:
    """Record an acyclic graph of one cell; see ``Graph.dag``."""
    begins = as_integers(offsets, "dag: expected offsets as integers [nodes + 1], at least two", 2)
    read = as_integers(sources, "dag: expected sources as integers [sources]", 0)
    if begins.dtype != np.int32 or read.dtype != np.int32 or not is_dag(begins, read):
        raise RequestError(f"dag: {why_no_dag(begins, read)}")
    cell_type, count = graph._begin(cell), begins.size - 1
    graph._count_nodes(count, cell)
    picked: list[int] = []
    input_words = _words(graph, cell, cell, inputs, count, read.size, picked)
    if read.size and LIST not in input_words[:, 0]:
        raise RequestError(
            f"dag: cell {cell.name!r} reads no source: none of its outputs {list(cell.outputs)} has the name of a "
            "ragged input"
        )
    words = dag_program(begins, read, cell_type, len(cell.outputs), input_words, _listed(picked), graph._num_values)
    graph._program.frombytes(words.tobytes())
    return Dag(graph, cell, graph._take_values(count * len(cell.outputs)), count)


def _words(
    graph: Recorder,
    cell: Cell,
    maker: Cell | None,
    inputs: Mapping[str, Source],
    num_nodes: int,
    num_sources: int,
    picked: list[int],
) -> NDArray[np.int32]:
    """Return (mode, a, b) for each input of a cell at many nodes, as ``graph/dag_program.py`` reads them.

    Args:
        maker: the cell whose outputs the nodes read; None for leaves.
        picked: values that are listed; it is added to.

    Raise RequestError naming the input.
    """
    for name in inputs:
        if name not in cell.inputs:
            raise RequestError(f"{graph._where(cell, name)}: unknown; the cell has inputs {list(cell.inputs)}")
    is_tree = num_sources == OF_A_TREE
    words: list[Word] = []
    for name, spec in cell.inputs.items():
        word: Word | str
        if spec.has_nodes:
            word = f"a cell of a {'tree' if is_tree else 'dag'} can have no {spec}"
        elif spec.ragged and (is_tree or name in cell.outputs):
            if name in inputs:
                word = f"reads the {'children' if is_tree else 'sources'} of a node and cannot be given"
            else:
                word = (LIST, 0, 0) if maker is None else child_word(cell, name, maker)
        elif name in inputs:
            whose = A_SOURCE if spec.ragged else A_NODE if not is_tree else A_LEAF if maker is None else AN_INNER_NODE
            word = _given(graph, cell, name, inputs[name], num_sources if spec.ragged else num_nodes, whose, picked)
        elif is_tree and maker is not None:
            word = child_word(cell, name, maker)
        elif name in cell.carry:
            word = FIXED, graph._zero(spec), 0
        elif spec.ragged:
            word = f"missing, and not the name of an output, of which it would get the sources'; expected {spec}"
        else:
            word = f"missing; expected {spec}"
        if isinstance(word, str):
            raise RequestError(f"{graph._where(cell, name)}: {word}")
        words.append(word)
    return np.array(words, np.int32).reshape(-1, 3)


def _given(
    graph: Recorder, cell: Cell, name: str, source: Source, count: int, whose: str, picked: list[int]
) -> Word | str:
    """Return the word of an input that has a row for each of so many nodes, or sources if it is ragged, or one for all;
    or what is wrong with it. ``whose``: each row is.
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


def _listed(picked: list[int]) -> NDArray[np.int32]:
    return np.array(picked, np.int32) if picked else NO_VALUES  # of most graphs, in no time
