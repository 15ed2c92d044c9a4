"""The parts that all pictures share: colours, text on one line, and file formats."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#a88400", "#9d755d")
INK = "#33363d"
PICTURES = (".svg", ".png")
DOTS_PER_INCH = 150
NEEDS_MATPLOTLIB = "drawing a picture needs matplotlib: pip install matplotlib"


def known_suffix(path: str | Path, suffixes: Collection[str]) -> str:
    """Return the suffix of ``path`` in lower case. Raise ValueError if it is none of ``suffixes``."""
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise ValueError(f"expected a file name that ends in {' or '.join(suffixes)}, not {suffix!r}: {path}")
    return suffix


def shorten(text: str, longest: int) -> str:
    """Return a text on one line, cut where it is longer than ``longest`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Plain text (a dollar sign is a dollar sign), centred and small unless the style says otherwise."""
    usual: dict[str, Any] = {"fontsize": 7.0, "color": INK, "ha": "center", "va": "center"}
    axes.text(x, y, text, parse_math=False, **(usual | style))
