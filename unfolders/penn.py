"""Penn brackets: ``(3 (2 lovely) (2 film))``, the form of the Penn and the Stanford sentiment treebank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from cellrt import RequestError

_TOKEN = re.compile(r"[()]|[^() \t\r\n]+")


class PennTree(NamedTuple):
    """A tree; its nodes are brackets, in the order in which they open.

    Attributes:
        parents: the number of each node's parent, -1 for the root, which is node 0.
        labels: what stands behind each opening bracket (a class, a tag); empty if a bracket stands there.
        words: the word of each leaf; None for inner nodes.
    """

    parents: list[int]
    labels: list[str]
    words: list[str | None]


def parse_penn(text: object, *, collapse_unary: bool = False) -> PennTree:
    """Read one tree: ``( label word )`` is a leaf, ``( label tree tree ... )`` an inner node; labels may be missing.

    With ``collapse_unary``, an inner node with a single child is left out (the child takes its place, with the label of
    the outermost that has one). Words and labels stay as they are written (``-LRB-`` is not a bracket).

    Raise RequestError with the position (in characters, from 0), what was expected there and what was found.
    """
    if not isinstance(text, str):
        raise RequestError(f"expected a string of Penn brackets, got {type(text).__name__}")
    tree = PennTree([], [], [])
    num_children: list[int] = []
    open_nodes: list[int] = []
    is_label_next = False
    for match in _TOKEN.finditer(text):
        token = match.group()
        node = open_nodes[-1] if open_nodes else -1
        if node < 0 and (token != "(" or tree.parents):
            raise _wrong(match.start(), "the end of the text" if tree.parents else "'('", token)
        if token == "(":
            if node >= 0:
                if tree.words[node] is not None:
                    raise _wrong(match.start(), "')'", token)
                num_children[node] += 1
            open_nodes.append(len(tree.parents))
            tree.parents.append(node)
            tree.labels.append("")
            tree.words.append(None)
            num_children.append(0)
        elif token == ")":
            if tree.words[node] is None and not num_children[node]:
                raise _wrong(match.start(), "a word or '('", token)
            open_nodes.pop()
        elif is_label_next:
            tree.labels[node] = token
        elif tree.words[node] is None and not num_children[node]:
            tree.words[node] = token
        else:
            raise _wrong(match.start(), "'(' or ')'" if num_children[node] else "')'", token)
        is_label_next = token == "("
    if open_nodes or not tree.parents:
        raise _wrong(len(text), "')'" if open_nodes else "'('", "")
    return _without_unary(tree, num_children) if collapse_unary else tree


def _wrong(position: int, expected: str, found: str) -> RequestError:
    shown = repr(found) if len(found) <= 40 else f"{found[:40]!r}..."
    return RequestError(f"character {position}: expected {expected}, found {shown if found else 'the end of the text'}")


def _without_unary(tree: PennTree, num_children: Sequence[int]) -> PennTree:
    """Return the tree without inner nodes of a single child."""
    result = PennTree([], [], [])
    places: list[int] = []
    """The number of each node in the result; for one left out, that of its parent."""
    labels: list[str] = []
    """The label that the child of each left-out node gets; none for other nodes."""
    for parent, label, word, count in zip(tree.parents, tree.labels, tree.words, num_children, strict=True):
        above = places[parent] if parent >= 0 else -1
        label = (labels[parent] if parent >= 0 else "") or label
        if count == 1:
            places.append(above)
            labels.append(label)
            continue
        places.append(len(result.parents))
        labels.append("")
        result.parents.append(above)
        result.labels.append(label)
        result.words.append(word)
    return result
