"""What we show people runs: each Python block of the README by itself, and each example."""

import ast
import importlib.util
import inspect
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FENCED = re.compile(r"^( *)```python *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    line: int  # of the block's first line, from 0
    source: str


def readme_blocks() -> list[Block]:
    return [
        Block(README.count("\n", 0, match.start(2)), textwrap.dedent(match[2])) for match in FENCED.finditer(README)
    ]


def examples() -> list[Path]:
    """The examples that have a main function."""
    return [path for path in sorted((ROOT / "examples").glob("*.py")) if has_main(path)]


def has_main(path: Path) -> bool:
    body = ast.parse(path.read_text(), str(path)).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body)


@pytest.mark.parametrize("block", readme_blocks(), ids=lambda block: f"line {block.line + 1}")
def test_readme_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "README.py"
    script.write_text("\n" * block.line + block.source)  # so that an error names the README's own line
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    is_quick = "quick" in inspect.signature(module.main).parameters
    assert module.main(**({"quick": True} if is_quick else {})) in (None, 0)


def test_readme_has_code() -> None:
    assert readme_blocks()


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_names_the_commands(command: str) -> None:
    assert command in README
