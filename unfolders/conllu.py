"""CoNLL-U, the form of the Universal Dependencies treebanks (version 2): a word a line, ten columns between tabs."""

from __future__ import annotations

import re
from typing import NamedTuple

from cellrt import RequestError

_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_ID, _FORM, _HEAD, _DEPREL = (_COLUMNS.index(name) for name in ("ID", "FORM", "HEAD", "DEPREL"))
_NUMBER = re.compile(r"[0-9]{1,9}")
_NOT_A_WORD = re.compile(r"[0-9]+[-.][0-9]+")
"""The ID of a range of words ("3-4") or of an empty node ("5.1"): no node of the tree."""


class Sentence(NamedTuple):
    """A sentence; its words are numbered from 1.

    Attributes:
        forms: the words as they are written.
        heads: the number of the word that each depends on, 0 for the root.
        relations: the name of each dependency.
    """

    forms: list[str]
    heads: list[int]
    relations: list[str]


def parse_conllu(text: object) -> Sentence:
    """Read one sentence. Comments, ranges of words and empty nodes are read over.

    Raise RequestError with the line (from 1) and column, what was expected there and what was found. That the heads
    form a tree is checked only as far as there is one root, and every head a word.
    """
    if not isinstance(text, str):
        raise RequestError(f"expected a string of CoNLL-U, got {type(text).__name__}")
    sentence = Sentence([], [], [])
    lines: list[int] = []
    is_over = False
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip():
            is_over = bool(lines)
            continue
        if line.startswith("#"):
            continue
        if is_over:
            raise RequestError(f"line {number}: expected the end after one sentence, found {line!r:.60}")
        fields = line.split("\t")
        if len(fields) != len(_COLUMNS):
            raise RequestError(f"line {number}: expected {len(_COLUMNS)} columns between tabs, found {len(fields)}")
        if _NOT_A_WORD.fullmatch(fields[_ID]):
            continue
        if fields[_ID] != str(len(lines) + 1):
            raise _wrong(number, _ID, str(len(lines) + 1), fields[_ID])
        if not fields[_FORM]:
            raise _wrong(number, _FORM, "a word", fields[_FORM])
        if not _NUMBER.fullmatch(fields[_HEAD]):
            raise _wrong(number, _HEAD, "the number of a word, or 0", fields[_HEAD])
        sentence.forms.append(fields[_FORM])
        sentence.heads.append(int(fields[_HEAD]))
        sentence.relations.append(fields[_DEPREL])
        lines.append(number)
    _check_heads(sentence.heads, lines)
    return sentence


def _check_heads(heads: list[int], lines: list[int]) -> None:
    if not heads:
        raise RequestError("expected a sentence with at least one word, found none")
    for head, line in zip(heads, lines, strict=True):
        if head > len(heads):
            raise _wrong(line, _HEAD, f"a number from 0 to {len(heads)}", str(head))
    roots = [line for head, line in zip(heads, lines, strict=True) if head == 0]
    if not roots:
        raise RequestError(f"line {lines[-1]}: expected a word with HEAD 0 by the end of the sentence, found none")
    if len(roots) > 1:
        raise _wrong(roots[1], _HEAD, f"one root, which is on line {roots[0]}", "0")


def _wrong(line: int, column: int, expected: str, found: str) -> RequestError:
    return RequestError(f"line {line}, column {_COLUMNS[column]}: expected {expected}, found {found!r:.60}")
