"""What mkdocs does with the navigation before it builds the site: see ``mkdocs.yml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Leaves out pages that are not there, and puts all pages of a folder in its place."""
    config.nav = existing(config.nav, Path(config.docs_dir))
    return config


def existing(entries: list[Any], docs: Path) -> list[Any]:
    """The entries of which there are pages; a section without pages is left out."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            sections = {title: existing(inner, docs) for title, inner in entry.items()}
            found += [{title: inner} for title, inner in sections.items() if inner]
        elif entry.endswith("/"):
            found += sorted((path.relative_to(docs).as_posix() for path in (docs / entry).glob("*.md")), key=page_order)
        elif (docs / entry).is_file():
            found.append(entry)
    return found


def page_order(path: str) -> tuple[bool, str]:
    """A folder's index first, then by name."""
    return not path.endswith("index.md"), path
