"""Hooks of mkdocs that run while it builds the site: see ``mkdocs.yml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?(https?:[^"'\s>]+)"""
    r"""|<link\b[^>]*\brel=["']?stylesheet\b[^>]*\bhref=["']?(https?:[^"'\s>]+)"""
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text; the page ``changelog.md`` is the changelog in the root, with its links made to fit."""
    return changelog() if page.file.src_uri == "changelog.md" else markdown


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return a page's HTML as it is; raise ValueError if it would fetch something from the network to be shown."""
    fetched = [first or second for first, second in LOADED.findall(output)]
    if fetched:
        raise ValueError(f"{page.file.src_uri} fetches {', '.join(fetched)}: a page must do without the network")
    return output


def changelog() -> str:
    """Return the changelog as a page of the site, where ``docs/`` is the root."""
    return re.sub(r"(\]\(|\]: )docs/", r"\1", (ROOT / "CHANGELOG.md").read_text())
