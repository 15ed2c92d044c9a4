"""The documentation's words and sentences: few words, none of a private dialect, and short sentences.

``docs/glossary.md`` has the words, and those to avoid.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellrt
from tests.docs.test_pages import FENCED, PAGES, name
from tests.test_house import VAGUE_ROOMS, sources

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_WORDS = 40  # of the glossary
LONGEST_SENTENCE = 30  # words
LONGEST_LINE = 120
GENERATED = {"docs/rooms.md", "docs/states.md"}
WRITTEN = [page for page in PAGES if name(page) not in GENERATED]


def tables() -> list[list[list[str]]]:
    """Return the cells of the glossary's two tables, without their heads."""
    found: list[list[list[str]]] = []
    for part in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE):
        found.append([[cell.strip() for cell in row.strip("|").split("|")] for row in part.splitlines()[2:]])
    return found


def avoided() -> re.Pattern[str]:
    words = [word for row in tables()[1] for word in row[0].split(", ")]
    return re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)


def public_names() -> Iterator[str]:
    """Yield the names that users write: of what ``cellrt`` offers, its members and their parameters."""
    for public in cellrt.__all__:
        yield public
        value = getattr(cellrt, public)
        members = {public: value}
        if inspect.isclass(value):
            members |= {member: found for member, found in vars(value).items() if not member.startswith("_")}
        yield from members
        for member in members.values():
            if inspect.isfunction(member):
                yield from inspect.signature(member).parameters


def prose(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without its code: those of paragraphs, of items of lists, and of tables' cells."""
    blocks: list[str] = [""]
    for line in FENCED.sub("", text).splitlines():
        if line.startswith("|"):
            blocks += [*line.split("|"), ""]
        elif not line.strip() or line.startswith("#"):
            blocks.append("")
        elif re.match(r" ? ?([-*+]|\d+\.)\s", line):
            blocks.append(line)
        elif blocks[-1] or not line.startswith("    "):  # else it is code
            blocks[-1] += f" {line.strip()}"
    for block in blocks:
        yield from (
            sentence.strip() for sentence in re.split(r"(?<=[.!?])[\"')*]*\s+(?=[^a-z])", block.strip()) if sentence
        )


def plain(sentence: str) -> str:
    """Return the sentence with a word in place of code, and without the addresses of links."""
    return re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", sentence))


def num_words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in plain(sentence).split())


def test_the_glossary_is_short_and_in_order() -> None:
    words = [row[0] for row in tables()[0]]
    assert len(words) <= MOST_WORDS
    assert words == sorted(words)


def test_public_names_have_no_word_to_avoid() -> None:
    parts = {public: re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", public) for public in public_names()}
    assert {public for public, words in parts.items() if avoided().search(words)} == set()


def test_module_docstrings_have_no_word_to_avoid() -> None:
    found = {}
    for source in sources():
        if not source.path.startswith((*VAGUE_ROOMS, "benchmarks/")):
            text = ast.get_docstring(ast.parse((ROOT / source.path).read_text())) or ""
            if words := avoided().findall(re.sub(r"``.*?``", "", text)):
                found[source.path] = words
    assert not found


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_a_page_has_short_sentences_and_lines_and_no_word_to_avoid(page: Path) -> None:
    text = page.read_text()
    assert [sentence for sentence in prose(text) if num_words(sentence) > LONGEST_SENTENCE] == []
    assert [line for line in FENCED.sub("", text).splitlines() if len(line) > LONGEST_LINE] == []
    if page.name != "glossary.md":
        assert [sentence for sentence in prose(text) if avoided().search(plain(sentence))] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two\nthree.\n\n- Four.\n- Five\n  six.\n", ["One.", "Two three.", "- Four.", "- Five six."]),
        ("```python\na = 1\n```\n# Head\n\n    shell\n\nText.\n", ["Text."]),
        ("| a | b. C |\n", ["a", "b.", "C"]),
    ],
)
def test_sentences_are_found(text: str, expected: list[str]) -> None:
    assert list(prose(text)) == expected
