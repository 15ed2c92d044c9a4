"""Reading Penn brackets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.errors import RequestError
from cellrt.unfolders.penn import parse_penn

WORDS = st.text(st.characters(exclude_characters="()", exclude_categories=["Z", "C"]), min_size=1, max_size=4)
TREES = st.recursive(
    st.tuples(WORDS, WORDS), lambda tree: st.tuples(WORDS, st.lists(tree, min_size=1, max_size=4)), max_leaves=20
)


def write(tree) -> str:
    label, inside = tree
    return f"({label} {inside})" if isinstance(inside, str) else f"({label} {' '.join(map(write, inside))})"


def nodes_of(tree, parent: int, found: list) -> list:
    """(parent, label, word) of each node, by recursion."""
    label, inside = tree
    place = len(found)
    found.append((parent, label, inside if isinstance(inside, str) else None))
    for child in [] if isinstance(inside, str) else inside:
        nodes_of(child, place, found)
    return found


@given(TREES)
def test_what_is_written_is_read(tree):
    parsed = parse_penn(write(tree))
    assert list(zip(*parsed, strict=True)) == nodes_of(tree, -1, [])


def test_numbers_tags_and_missing_labels():
    sentiment = parse_penn("(3 (2 It) (4 (2 's)\n (4 lovely)))")
    assert sentiment.parents == [-1, 0, 0, 2, 2]
    assert sentiment.labels == ["3", "2", "4", "2", "4"]
    assert sentiment.words == [None, "It", None, "'s", "lovely"]
    tagged = parse_penn("( (S (NP-SBJ (-LRB- -LRB-) (NN cat)) (VP (VBD sat))) )")
    assert tagged.labels == ["", "S", "NP-SBJ", "-LRB-", "NN", "VP", "VBD"]
    assert tagged.words == [None, None, None, "-LRB-", "cat", None, "sat"]


def test_unary_nodes_collapse_to_their_child():
    tree = parse_penn("( (S (NP (NN cat)) (VP (VP (VBD sat) (RB down)))) )", collapse_unary=True)
    assert tree.labels == ["S", "NP", "VP", "VBD", "RB"]
    assert tree.words == [None, "cat", None, "sat", "down"]
    assert tree.parents == [-1, 0, 0, 2, 2]


@given(TREES)
def test_collapsed_trees_have_no_unary_node_and_the_same_words(tree):
    text = write(tree)
    whole, collapsed = parse_penn(text), parse_penn(text, collapse_unary=True)
    counts = [collapsed.parents.count(node) for node in range(len(collapsed.parents))]
    assert 1 not in counts
    assert all((word is None) == (count > 1) for word, count in zip(collapsed.words, counts))
    assert [word for word in whole.words if word] == [word for word in collapsed.words if word]


def test_five_thousand_levels():
    depth = 5_000
    parsed = parse_penn("(0 (1 a) " * depth + "(1 b)" + ")" * depth)
    assert len(parsed.parents) == 2 * depth + 1 and parsed.parents[-1] == 2 * (depth - 1)
    assert len(parse_penn("(0 " * depth + "(1 b)" + ")" * depth, collapse_unary=True).parents) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "character 0: expected '(', found the end of the text"),
        ("3", "character 0: expected '(', found '3'"),
        ("(3", "character 2: expected ')', found the end of the text"),
        ("(3 (2 a)", "character 8: expected ')', found the end of the text"),
        ("(3)", "character 2: expected a word or '(', found ')'"),
        ("()", "character 1: expected a word or '(', found ')'"),
        ("(2 a) (2 b)", "character 6: expected the end of the text, found '('"),
        ("(2 a))", "character 5: expected the end of the text, found ')'"),
        ("(2 a b)", "character 5: expected ')', found 'b'"),
        ("(2 a (2 b))", "character 5: expected ')', found '('"),
        ("(2 (2 a) b)", "character 9: expected '(' or ')', found 'b'"),
    ],
)
def test_a_mistake_is_named_with_its_position(text, message):
    with pytest.raises(RequestError) as raised:
        parse_penn(text)
    assert str(raised.value) == message


def test_only_text_is_read():
    with pytest.raises(RequestError, match="expected a string of Penn brackets, got bytes"):
        parse_penn(b"(2 a)")
