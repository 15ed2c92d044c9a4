"""What we show people is true: code runs, links lead somewhere, files and commands that are named exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import cellrt

ROOT = Path(__file__).resolve().parent.parent.parent
README, CHANGELOG = ROOT / "README.md", ROOT / "CHANGELOG.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = [page for page in PAGES if page.parent.name == "decisions"]
"""What was true when it was decided."""
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Breaking"}
FENCED = re.compile(r"^```(\w*) *\n(.*?)^``` *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
OURS = re.compile(r"`((?:benchmarks|cells|cellrt|docs|examples|kernels|tests|tools|unfolders)/[\w/.-]+)`")
MODULE = re.compile(r"python -m ((?:benchmarks|tools)[\w.]*)(?: ([a-z]\w*))?")
TARGET = re.compile(r"\bmake ([a-z][a-z-]+)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def script(text: str) -> str:
    """The Python of a page, each line where it is on the page, so that an error names the page's own line."""
    lines = [""] * (text.count("\n") + 1)
    for match in FENCED.finditer(text):
        if match[1] == "python":
            first = text.count("\n", 0, match.start(2))
            lines[first : first + match[2].count("\n")] = match[2].splitlines()
    return "\n".join(lines).rstrip()


@pytest.mark.parametrize("page", [page for page in PAGES if script(page.read_text())], ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CELLRT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / f"{page.stem}.py"
    path.write_text(script(page.read_text()))
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "recipes").glob("*.md")), ids=name)
def test_what_a_recipe_shows_is_in_its_program(page: Path) -> None:
    """Blocks of ``py`` are parts of the files of examples/ that the page names, and do not run by themselves."""
    text = page.read_text()
    programs = "".join((ROOT / path).read_text() for path in OURS.findall(text) if path.endswith(".py"))
    assert [block for kind, block in FENCED.findall(text) if kind == "py" and block not in programs] == []


def test_the_readme_shows_code_and_can_be_read_in_a_terminal() -> None:
    assert script(README.read_text())
    assert [line for line in README.read_text().splitlines() if len(line) > 120] == []


def test_the_changelog_has_known_sections_of_single_lines() -> None:
    versions = re.split(r"^## ", CHANGELOG.read_text(), flags=re.MULTILINE)[1:]
    assert [version.splitlines()[0] for version in versions][:1] == ["Unreleased"]
    for version in versions:
        assert set(re.findall(r"^### (.+)$", version, re.MULTILINE)) <= SECTIONS
        entries = [line for line in version.splitlines() if line.startswith("- ")]
        assert [entry for entry in entries if not entry.endswith(".") or len(entry) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_pictures_lead_to_files(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    missing = [link for link, _ in LINK.findall(text) if link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_anchors_are_headings(page: Path) -> None:
    for link, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        target = page.parent / link if link else page
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", FENCED.sub("", target.read_text()), re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY], ids=name)
def test_files_and_commands_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    assert [path for path in OURS.findall(text) if not (ROOT / path).exists()] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    code = " ".join(re.findall(r"`[^`\n]+`", text) + re.findall(r"^    make .*$", text, re.MULTILINE))
    assert [target for target in TARGET.findall(code) if target not in targets] == []
    for module, argument in MODULE.findall(text):
        folder = ROOT / module.replace(".", "/")
        assert folder.with_suffix(".py").is_file() or (folder / "__main__.py").is_file(), module
        assert not argument or module != "benchmarks" or (folder / f"{argument}.py").is_file(), argument


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    """A clone is installed as ``'.[extra]'``."""
    folders = ("benchmarks", "cells", "cellrt", "docs", "examples", "kernels", "unfolders")
    files = [path for folder in folders for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    assert [path for path in (README, *files) if "cellrt[" in path.read_text()] == []


def test_pictures_are_small() -> None:
    large = [path.name for path in (ROOT / "docs" / "images").iterdir() if path.stat().st_size > 200_000]
    assert not large


def test_the_reference_has_every_public_name() -> None:
    shown = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        shown |= set(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))
    missing = [
        public
        for public in cellrt.__all__
        if f"cellrt.{public}" not in shown and getattr(getattr(cellrt, public), "__module__", "") not in shown
    ]
    assert not missing
