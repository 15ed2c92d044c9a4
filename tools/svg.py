"""Small pictures written by hand: SVG elements as text, so that a picture is a readable file and the same each time."""

from __future__ import annotations

from html import escape

INK, PALE, PAPER = "#33363d", "#8a8f99", "#ffffff"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#a88400", "#9d755d")


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: float = 13,
    anchor: str = "start",
    colour: str = INK,
    weight: str = "normal",
) -> str:
    """Return one line of text; ``y`` is its base line."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{escape(content)}</text>'
    )


def box(x: float, y: float, width: float, height: float, *, fill: str, line: str = "none", radius: float = 6) -> str:
    """Return a rectangle with round corners; ``x`` and ``y`` are its upper left one."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
        f'stroke="{line}"/>'
    )


def arrow(path: str, *, colour: str = INK, width: float = 1.5, is_dashed: bool = False) -> str:
    """Return a line along an SVG path, with a head at its end."""
    dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
    head = "head-" + colour.lstrip("#")
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes} marker-end="url(#{head})"/>'
    )


def picture(width: float, height: float, title: str, elements: list[str], colours: tuple[str, ...] = (INK,)) -> str:
    """Return a whole SVG file on white paper; ``colours`` are those of its arrows."""
    heads = [
        f'<marker id="head-{colour.lstrip("#")}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" '
        f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
        for colour in colours
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="system-ui, Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f"<defs>{''.join(heads)}</defs>",
            box(0, 0, width, height, fill=PAPER, radius=8),
            *elements,
            "</svg>\n",
        ]
    )
