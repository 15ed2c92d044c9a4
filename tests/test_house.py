"""The house's habits. Small files, small functions: what is longer is known by name, and the list may only get shorter.

And one dialect in docstrings: code stands between double backticks.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "cells", "cellrt", "examples", "kernels", "tests", "tools", "unfolders")
LONGEST_FILE = 600  # lines of logic: without blank lines, comments and docstrings
LONGEST_FUNCTION = 60  # lines, without signature and docstring

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def sources() -> Iterator[tuple[str, str]]:
    """Every Python file of the repository once: its path from the root, and its text."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:
                yield path.relative_to(ROOT).as_posix(), path.read_text()


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The functions of a file: name, and lines without signature and docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def num_logic_lines(source: str) -> int:
    """Lines of a file that are neither blank nor of a comment or docstring."""
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


@functools.cache
def too_long() -> dict[str, int]:
    """Files and functions above their limits, with their lines. The body of a kernel may be as long as it is."""
    found = {}
    for path, source in sources():
        if (num_lines := num_logic_lines(source)) > LONGEST_FILE:
            found[path] = num_lines
        for name, num_lines in functions(source):
            if num_lines > LONGEST_FUNCTION and not path.startswith("kernels/"):
                found[f"{path}: {name}"] = num_lines
    return found


def test_no_file_or_function_is_too_long_but_those_that_are_known() -> None:
    known = LONG_FILES | LONG_FUNCTIONS
    grown = {name: lines for name, lines in too_long().items() if lines > known.get(name, 0)}
    assert not grown, f"more than {LONGEST_FILE} lines of logic in a file or {LONGEST_FUNCTION} in a function: split it"


def test_what_is_no_longer_too_long_leaves_the_list() -> None:
    assert (LONG_FILES | LONG_FUNCTIONS).keys() <= too_long().keys()


@pytest.mark.parametrize(
    ("source", "expected"),
    [("def f():\n    pass\n", 1), ('def f(\n    a,\n):\n    """Doc.\n\n    More."""\n    a = 1\n    return a\n', 2)],
)
def test_a_function_counts_without_signature_and_docstring(source: str, expected: int) -> None:
    assert dict(functions(source)) == {"f": expected}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Every string of a file that stands alone, which is what docstrings are: first line, and text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def single_backticks(text: str) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"(?<!`)`(?!`)[^`]+`(?!`)", text)


def test_code_in_docstrings_is_between_double_backticks() -> None:
    found = {
        f"{path}:{line}": singles
        for path, source in sources()
        for line, text in docstrings(source)
        if (singles := single_backticks(text))
    }
    assert not found


def test_single_backticks_are_found_beside_double_ones() -> None:
    assert single_backticks("``a`` and `b`, ``c`d``") == ["`b`"]
