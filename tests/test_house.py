"""The house's habits. Small files, small functions: what is longer is known by name, and the list may only get shorter.

And one form of docstrings: code stands between double backticks, and the first word says what is described or done.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "cells", "cellrt", "examples", "kernels", "tests", "tools", "unfolders")
LONGEST_FILE = 600  # lines of logic: without blank lines, comments and docstrings
LONGEST_FUNCTION = 60  # lines, without signature and docstring

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
VAGUE = re.compile(
    r"(As|Behind|By|For|Has|How|It|Of|See|So|Takes? in|That|They|Those|What|Whatever|When|Where|Whether|Which|While|Who"
    r"|Whoever|Whom|Whose|Why)\b"
)
VAGUE_ROOMS = ("tests/",)
"""The folders whose docstrings may begin so: those of tests are what holds."""


@dataclass(frozen=True)
class Source:
    """What is counted of a Python file.

    functions: name, and lines without signature and docstring.
    docstrings: first line and text of every string that stands alone, which is what docstrings are.
    num_logic_lines: lines that are neither blank nor of a comment or docstring.
    """

    path: str
    functions: list[tuple[str, int]]
    docstrings: list[tuple[int, str]]
    num_logic_lines: int


def read(path: str, text: str) -> Source:
    """Read a file; of its tree statements alone are looked at, which are a tenth of it."""
    functions, docstrings, told = [], [], set[int]()
    statements: list[ast.AST] = [ast.parse(text)]
    while statements:
        node = statements.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                body = node.body[1:] if ast.get_docstring(node) else node.body
                functions.append((node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0))
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                docstrings.append((node.lineno, docstring))
                told.update(range(node.lineno, (node.end_lineno or 0) + 1))
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            statements += inner if isinstance(inner, list) else ()
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    num_logic_lines = sum(bool(line) and line[0] != "#" and number not in told for number, line in lines)
    return Source(path, functions, docstrings, num_logic_lines)


@functools.cache
def sources() -> list[Source]:
    """Every Python file of the repository once, by its path from the root."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path.resolve() == path]
    return [read(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


@functools.cache
def too_long() -> dict[str, int]:
    """Files and functions above their limits, with their lines. The body of a kernel may be as long as it is."""
    found = {}
    for source in sources():
        if source.num_logic_lines > LONGEST_FILE:
            found[source.path] = source.num_logic_lines
        for name, num_lines in source.functions:
            if num_lines > LONGEST_FUNCTION and not source.path.startswith("kernels/"):
                found[f"{source.path}: {name}"] = num_lines
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
    assert read("f.py", source).functions == [("f", expected)]


def test_functions_and_docstrings_are_found_wherever_they_stand() -> None:
    source = "if a:\n    pass\nelse:\n    try:\n        b\n    except C:\n        def f():\n            'D.'\n"
    source += "match e:\n    case 1:\n        async def g():\n            pass\n"
    found = read("f.py", source)
    assert sorted(found.functions) == [("f", 0), ("g", 1)]
    assert found.docstrings == [(8, "D.")]
    assert found.num_logic_lines == 11


def test_a_file_of_the_package_has_a_name_of_its_own() -> None:
    names = Counter(Path(source.path).name for source in sources() if source.path.startswith("cellrt/"))
    assert not {name for name, count in names.items() if count > 1 and name[0] != "_"}


def single_backticks(text: str) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"(?<!`)`(?!`)[^`]+`(?!`)", text)


def test_code_in_docstrings_is_between_double_backticks() -> None:
    found = {
        f"{source.path}:{line}": singles
        for source in sources()
        for line, text in source.docstrings
        if (singles := single_backticks(text))
    }
    assert not found


def test_docstrings_begin_with_what_is_described_or_done() -> None:
    """``Return whether ...``, not ``Whether ...``; ``The rows ...``, not ``Those ...``."""
    found = [
        f"{source.path}:{line}: {text.split(maxsplit=6)[:6]}"
        for source in sources()
        if not source.path.startswith(VAGUE_ROOMS)
        for line, text in source.docstrings
        if VAGUE.match(text)
    ]
    assert not found


def test_single_backticks_are_found_beside_double_ones() -> None:
    assert single_backticks("``a`` and `b`, ``c`d``") == ["`b`"]
