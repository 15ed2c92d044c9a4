"""Trees: a leaf cell, an inner cell that reads its children, and perhaps an output cell on top.

Each function makes a model, ready for ``engine.register``, for one form of request:

- ``tree``: nested tuples of what the leaves read;
- ``parent_tree``: an array of parents, and rows for the nodes;
- ``penn_tree``: a constituency tree in Penn brackets (``penn.py``), with tokens at the leaves;
- ``conllu_tree``: a dependency tree in CoNLL-U (``conllu.py``), with a token at every node.

An inner cell reads its children by the names of its inputs, as in ``Graph.tree``: a ragged input ``h`` gets output
``h`` of all children; inputs ``h_left`` and ``h_right``, or ``h_0``, ``h_1``, ..., get that of one child each, and then
every inner node must have that many children. The output cell reads outputs of a node by their names.

Results are the outputs of the output cell, or without one those that the leaf and the inner cell have in common. They
are of the root alone, or with ``every_node`` of all nodes: ``[nodes, *shape]`` in the order that each function names.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt import Cell, DefinitionError, Graph, RequestError, RequestTooLargeError, RowSpec, Unfolder, unfold
from cellrt.unfolders._marshalled import marshalled_tree
from cellrt.unfolders._tree_cells import TreeCells
from cellrt.unfolders.conllu import parse_conllu
from cellrt.unfolders.penn import parse_penn


def tree(name: str, *, leaf: Cell, inner: Cell, output: Cell | None = None, every_node: bool = False) -> Unfolder:
    """Return a model whose requests are trees as nested tuples: ``((a, b), c)`` has two inner nodes and three leaves.

    What is not a tuple is a leaf: the row (a tensor, an array or a number) of the one input of the leaf cell. Nodes
    are in the order in which they begin, so the root is the first. Inner nodes have no input but their children.

    Raise DefinitionError if the cells do not fit together.
    """
    cells = TreeCells(name, leaf, inner, output, every_node)
    cells.check_inner_needs_nothing()
    (input_name, spec) = cells.only_leaf_input()

    def function(graph: Graph, request: Any) -> dict[str, object]:
        parents, rows = _flatten(request, graph.max_nodes)
        return cells.build(graph, parents, {input_name: _stack(rows, spec)}, {})

    example = (torch.zeros(spec.shape, dtype=spec.dtype, device="cpu"),) * cells.num_children
    return unfold(name, example=example)(function)


def parent_tree(
    name: str, *, leaf: Cell, inner: Cell | None = None, output: Cell | None = None, every_node: bool = False
) -> Unfolder:
    """Return a model whose requests are dicts with ``parents`` ``[nodes]``: the number of each node's parent, -1 for
    the root.

    With ``inner`` left out, the leaf cell serves every node, and the request's ``inputs`` are its inputs by name, with
    one row a node (an array, a tensor or a list). Otherwise ``leaf_inputs`` has one row a leaf and ``inner_inputs`` one
    row an inner node, in the order of ``parents``; each may be left out if its cell needs none.

    Raise DefinitionError if the cells do not fit together.
    """
    cells = TreeCells(name, leaf, inner or leaf, output, every_node)
    keys = {"parents", "inputs"} if inner is None else {"parents", "leaf_inputs", "inner_inputs"}

    def function(graph: Graph, request: Any) -> dict[str, object]:
        if not isinstance(request, Mapping) or "parents" not in request or request.keys() - keys:
            found = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
            raise RequestError(f"expected a dict with parents and {sorted(keys - {'parents'})}, got {found}")
        parents = _as_parents(request["parents"])
        if inner is None:
            return cells.build(graph, parents, *_split(parents, request.get("inputs", {})))
        return cells.build(graph, parents, request.get("leaf_inputs", {}), request.get("inner_inputs", {}))

    example: dict[str, object] = {"parents": [-1, *[0] * cells.num_children]}
    if inner is None:
        example["inputs"] = cells.zero_rows(leaf, cells.leaf_inputs(), cells.num_children + 1)
    else:
        example["leaf_inputs"] = cells.zero_rows(leaf, cells.leaf_inputs(), cells.num_children)
        example["inner_inputs"] = cells.zero_rows(inner, cells.inner_inputs(), 1)
    return unfold(name, example=example)(function)


def penn_tree(
    name: str,
    *,
    leaf: Cell,
    inner: Cell,
    vocabulary: Mapping[str, int],
    unknown: int,
    output: Cell | None = None,
    every_node: bool = False,
    collapse_unary: bool = False,
) -> Unfolder:
    """Return a model whose requests are strings of one tree in Penn brackets: ``(3 (2 lovely) (2 film))``.

    Labels (the Stanford treebank's numbers, the Penn treebank's tags) are read over. Nodes are in the order of their
    opening brackets; a bracket around a word is a leaf.

    Args:
        vocabulary, unknown: the token of each word, and of those that it does not have, for the one input (int64) of
            the leaf cell.
        collapse_unary: leave out brackets with a single bracket inside, as a binary inner cell needs.

    Raise DefinitionError if the cells do not fit together.
    """
    cells = TreeCells(name, leaf, inner, output, every_node)
    cells.check_inner_needs_nothing()
    input_name = cells.token_input()

    def function(graph: Graph, request: Any) -> dict[str, object]:
        parsed = parse_penn(request, collapse_unary=collapse_unary)
        words = [word for word in parsed.words if word is not None]
        parents = np.array(parsed.parents, np.int32)
        return cells.build(graph, parents, {input_name: _tokens(words, vocabulary, unknown)}, {})

    return unfold(name, example=f"(S {'(W a) ' * cells.num_children})")(function)


def conllu_tree(
    name: str,
    *,
    cell: Cell,
    vocabulary: Mapping[str, int],
    unknown: int,
    output: Cell | None = None,
    every_node: bool = False,
) -> Unfolder:
    """Return a model whose requests are strings of one sentence in CoNLL-U: a dependency tree with a word at every
    node.

    The cell serves all nodes, and reads the children of a node through ragged inputs, in the order of the sentence.
    Nodes are in that order too.

    Args:
        vocabulary, unknown: the token of each word (column FORM), and of those that it does not have, for the one
            input (int64) of the cell that is not ragged.

    Raise DefinitionError if the cells do not fit together.
    """
    cells = TreeCells(name, cell, cell, output, every_node)
    input_name = cells.token_input()
    if not any(spec.ragged for spec in cell.inputs.values()):
        raise DefinitionError(f"model {name!r}: cell {cell.name!r} has no ragged input for any number of children")

    def function(graph: Graph, request: Any) -> dict[str, object]:
        sentence = parse_conllu(request)
        parents = np.array(sentence.heads, np.int32) - 1
        tokens = _tokens(sentence.forms, vocabulary, unknown)
        return cells.build(graph, parents, *_split(parents, {input_name: tokens}))

    lines = [f"{k}\ta\t_\t_\t_\t_\t{k - 1}\t_\t_\t_\n" for k in (1, 2)]
    return unfold(name, example="".join(lines))(function)


def _flatten(request: Any, most: int) -> tuple[NDArray[np.int32], Sequence[object] | NDArray[np.int64]]:
    """Return the parents of nested tuples' nodes in the order in which these begin, and the leaves.

    Stops at more than ``most`` nodes: tuples that share their parts are few objects and yet huge trees.
    """
    try:  # Tuples of small integers, at the speed of compiled code.
        written = marshal.dumps(request, 4)
    except ValueError:
        written = b""
    found, tokens, size = marshalled_tree(np.frombuffer(written, np.uint8), most)
    if size > most:
        raise _too_large(most)
    if size:
        return found, tokens
    parents: list[int] = []
    rows: list[object] = []
    waiting: list[tuple[object, int]] = [(request, -1)]
    while waiting:
        item, parent = waiting.pop()
        node = len(parents)
        if node == most:
            raise _too_large(most)
        parents.append(parent)
        if not isinstance(item, tuple):
            rows.append(item)
        elif item:
            waiting += [(child, node) for child in reversed(item)]
        else:
            raise RequestError(f"node {node}: expected at least one child, found an empty tuple")
    return np.array(parents, np.int32), rows


def _too_large(most: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the tree has more than {most} nodes, the most that are allowed (see Engine(max_nodes=...))"
    )


_HINTS = {"str": ": map words to numbers first", "list": ": inner nodes are tuples"}


def _stack(rows: Sequence[object] | NDArray[np.int64], spec: RowSpec) -> torch.Tensor | NDArray[Any] | list[object]:
    """Return the rows of leaves one below the other; numbers as they are, which any dtype may hold."""
    shape = spec.shape
    if isinstance(rows, np.ndarray) and not shape:
        return rows if spec.dtype == torch.int64 else rows.tolist()
    if not shape and all(isinstance(row, bool | int | float) for row in rows):
        for k, row in enumerate(rows):
            if isinstance(row, float) and not spec.dtype.is_floating_point:
                raise RequestError(f"leaf {k}: expected {spec}, got {row!r}")
        return list(rows)
    tensors: list[torch.Tensor] = []
    for k, row in enumerate(rows):
        try:
            tensor = row if isinstance(row, torch.Tensor) else _tensor_of(row)
        except (TypeError, ValueError, RuntimeError):
            hint = _HINTS.get(type(row).__name__, "")
            raise RequestError(
                f"leaf {k}: expected a row of shape {list(shape)}, found {type(row).__name__}{hint}"
            ) from None
        if tensor.shape != shape or (tensors and tensor.dtype != tensors[0].dtype):
            found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise RequestError(f"leaf {k}: expected a row of shape {list(shape)} as the others, found {found}")
        tensors.append(tensor)
    return torch.stack(tensors)


def _tensor_of(row: Any) -> torch.Tensor:
    """Return an array or a list as a tensor, a list's numbers as float32; whatever torch's defaults are."""
    made = torch.as_tensor(row, device="cpu")
    return made.float() if made.is_floating_point() and not isinstance(row, np.ndarray | np.generic) else made


def _as_parents(values: Any) -> NDArray[np.int32]:
    """Return the parents as an array; ``Graph.tree`` checks its values."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0)
    has_bool = isinstance(values, list | tuple) and any(isinstance(value, bool | np.bool_) for value in values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or has_bool:
        raise RequestError(f"expected parents as integers [nodes], at least one, got {values!r:.80}")
    if array.max() >= array.size or array.min() < -1:
        raise RequestError(f"expected parents from -1 to {array.size - 1}, found {array.min()} to {array.max()}")
    return array.astype(np.int32)


def _split(parents: NDArray[np.int32], inputs: object) -> tuple[dict[str, object], dict[str, object]]:
    """Split inputs with one row a node into those of the leaves and those of the inner nodes."""
    if not isinstance(inputs, Mapping):
        raise RequestError(f"expected inputs as a dict, got {type(inputs).__name__}")
    is_inner: NDArray[np.bool_] = np.zeros(parents.size, bool)
    is_inner[parents[parents >= 0]] = True
    of_leaves: dict[str, object] = {}
    of_inner: dict[str, object] = {}
    for name, rows in inputs.items():
        array = rows if isinstance(rows, torch.Tensor) else np.asarray(rows)
        if array.ndim == 0 or len(array) != parents.size:
            raise RequestError(f"input {name!r}: expected {parents.size} rows, one a node, got {list(array.shape)}")
        of_leaves[name], of_inner[name] = array[~is_inner], array[is_inner]
    return of_leaves, of_inner


def _tokens(words: Sequence[str], vocabulary: Mapping[str, int], unknown: int) -> NDArray[np.int64]:
    return np.array([vocabulary.get(word, unknown) for word in words], np.int64)
