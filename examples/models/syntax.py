"""A child-sum Tree-LSTM that reads Python's syntax trees and names the verb of a function.

The data are the functions of Python's own library whose names begin with one of a dozen verbs, such as ``get_option``
or ``isSymlink``. In a syntax tree much occurs twice, and a child-sum node depends on nothing but its label and its
children. So equal parts are one node, and the tree becomes a smaller graph without cycles.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from cellrt import RaggedRows, Unfolder, cell, ragged, rows
from cellrt.cells import EmbeddingChildSumTreeLSTMCell
from cellrt.unfolders import dag

VERBS = ("get", "set", "is", "add", "read", "write", "close", "parse", "find", "load", "make", "run")
UNKNOWN = 0
"""The token of a label outside the vocabulary."""
LARGEST = 200
"""Most nodes of a function that is taken."""
BATCH = 32
"""Functions of a training step."""


class SharedTree(NamedTuple):
    """A syntax tree in which equal parts are one node. Nodes are numbered children first, so the root is the last.

    Attributes:
        labels: of each node: what it is, and the name in it, if any, such as ``Attribute append``.
        children: of each node, as often as they occur.
        num_nodes_as_tree: how many nodes there are if nothing is shared.
    """

    labels: list[str]
    children: list[tuple[int, ...]]
    num_nodes_as_tree: int


class Function(NamedTuple):
    """A function: its ``name`` and where it is from, the position of its verb in ``VERBS``, and its syntax."""

    name: str
    module: str
    verb: int
    tree: SharedTree


def share(function: ast.AST) -> SharedTree:
    """Return the syntax of a function without its own name; children have no order."""
    places: dict[tuple[str, tuple[int, ...]], int] = {}
    count = 0

    def place(node: ast.AST) -> int:
        nonlocal count
        count += 1
        below = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context))
        key = (_label(node), tuple(sorted(place(child) for child in below)))
        return places.setdefault(key, len(places))

    place(function)
    return SharedTree([label for label, _ in places], [children for _, children in places], count)


def _label(node: ast.AST) -> str:
    kind = type(node).__name__
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
            return f"{kind} {name}"
        case ast.Constant(value=value):
            return f"{kind} {value}" if isinstance(value, bool | int | None) else f"{kind} {type(value).__name__}"
        case _:
            return kind


def library_files() -> list[Path]:
    """Return the files of Python's library in order, without tests and the codecs, which are all alike."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
    return [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]


def read_functions(paths: Iterable[Path]) -> Iterator[Function]:
    """Yield the functions in some files that begin with one of the verbs."""
    for path in paths:
        try:
            with warnings.catch_warnings(action="ignore"):
                module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # the library has files that are wrong on purpose
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = re.match("_?([A-Za-z][a-z]*)", node.name)
                if first and first[1].lower() in VERBS:
                    tree = share(node)
                    if len(tree.labels) <= LARGEST:
                        yield Function(node.name, path.stem, VERBS.index(first[1].lower()), tree)


class VerbModel(nn.Module):
    """The network: the cell ``node``, and ``output``, which gives the logits of the verbs ``[rows, 12]``.

    ``vocabulary`` has the token of each label; others have ``UNKNOWN``.
    """

    def __init__(self, labels: Sequence[str], size: int = 64) -> None:
        super().__init__()
        self.vocabulary = {label: token for token, label in enumerate(labels, start=1)}
        self.node = EmbeddingChildSumTreeLSTMCell(len(labels) + 1, size, size)
        self.output = nn.Linear(size, len(VERBS))

    def tokens(self, tree: SharedTree) -> list[int]:
        """Return the token of each node; of a label with an unknown name, that of the label alone."""
        known = self.vocabulary
        return [known.get(label) or known.get(label.split()[0], UNKNOWN) for label in tree.labels]

    def as_networkx(self, tree: SharedTree) -> nx.MultiDiGraph:
        """Return a request of the model ``"verbs"``: child to parent, and the output on top; states go by their
        names.
        """
        graph = nx.MultiDiGraph()
        graph.add_nodes_from((node, {"cell": "node", "token": token}) for node, token in enumerate(self.tokens(tree)))
        graph.add_edges_from((child, node) for node, children in enumerate(tree.children) for child in children)
        graph.add_node("verb", cell="output")
        graph.add_edge(len(tree.labels) - 1, "verb")
        return graph

    def forward(self, trees: Sequence[SharedTree]) -> Tensor:
        """Return the logits ``[trees, 12]``, all nodes of a height at once."""
        levels, roots = _in_levels([(self.tokens(tree), tree.children) for tree in trees])
        h, c = (torch.empty(0, self.node.hidden_size) for _ in range(2))
        for tokens, children in levels:
            token = torch.tensor(tokens)
            token = token.masked_fill(torch.rand(len(tokens)) < 0.1 * self.training, UNKNOWN)
            below = torch.tensor([child for some in children for child in some], dtype=torch.int64)
            offsets = torch.tensor([0, *map(len, children)]).cumsum(0)
            state = self.node(token, *(RaggedRows(values[below], offsets) for values in (h, c)))
            h, c = torch.cat([h, state.h]), torch.cat([c, state.c])
        logits: Tensor = self.output(dropout(h[roots], 0.3, self.training))
        return logits


class Level(NamedTuple):
    """Nodes of one height: the token of each, and the positions of its children among all nodes in order of height."""

    tokens: list[int]
    children: list[list[int]]


def _in_levels(trees: Sequence[tuple[list[int], list[tuple[int, ...]]]]) -> tuple[list[Level], list[int]]:
    """Return the nodes of trees (tokens and children) sorted by height, and the positions of the roots."""
    heights = []
    for _, children in trees:
        of_tree: list[int] = []
        for some in children:
            of_tree.append(1 + max((of_tree[child] for child in some), default=-1))
        heights.append(of_tree)
    in_order = sorted((height, k, node) for k, of_tree in enumerate(heights) for node, height in enumerate(of_tree))
    positions = {(k, node): position for position, (_, k, node) in enumerate(in_order)}
    levels = [Level([], []) for _ in range(in_order[-1][0] + 1)]
    for height, k, node in in_order:
        tokens, children = trees[k]
        levels[height].tokens.append(tokens[node])
        levels[height].children.append([positions[k, child] for child in children[node]])
    return levels, [positions[k, len(tokens) - 1] for k, (tokens, _) in enumerate(trees)]


def num_batches(functions: Sequence[Function]) -> int:
    """Return the batches of an epoch of ``train``."""
    return -(-len(functions) // BATCH)


def train(
    functions: Sequence[Function], epochs: int, seed: int = 0, each_batch: Callable[[], object] = lambda: None
) -> Iterator[VerbModel]:
    """Train in plain torch; yield the one model after each epoch. Call ``each_batch`` after each batch."""
    torch.manual_seed(seed)
    counts = Counter(label for function in functions for label in set(function.tree.labels))
    counts.update({label.split()[0]: 3 for label in counts})
    model = VerbModel(sorted(label for label, count in counts.items() if count >= 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(functions)).split(BATCH):
            some = [functions[number] for number in batch.tolist()]
            loss = cross_entropy(model([one.tree for one in some]), torch.tensor([one.verb for one in some]))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            each_batch()
        yield model.eval()


def make_verbs(model: VerbModel) -> Unfolder:
    """Return the model ``"verbs"``: a request is as ``VerbModel.as_networkx`` makes it, its result ``output`` ``[1,
    12]`` logits of the verbs.
    """
    state = ragged(model.node.hidden_size)
    node = cell(model.node, {"token": rows(dtype=torch.int64), "h": state, "c": state}, name="node")
    output = cell(model.output, {"h": (model.node.hidden_size,)}, name="output")
    cells = {"node": node, "output": output}
    return dag("verbs", cells=cells, outputs=["output"], example=model.as_networkx(share(ast.parse("f(x)"))))
