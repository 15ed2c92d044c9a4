"""The map of the rooms, made of what the modules say of themselves and of what they import.

    python -m tools.rooms

writes ``docs/rooms.md`` and ``docs/images/rooms.svg``. A test fails while these are not what this would write.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools import svg

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "rooms.md", ROOT / "docs" / "images" / "rooms.svg"
UPWARD = "#ff0000"
LONGEST = 84  # characters in a box
SHELVES = ("cells", "unfolders", "kernels")
"""Folders of the root that are installed as packages of cellrt."""

INTRODUCTION = """\
# Source files

<!-- Made by `python -m tools.rooms` from the modules' own docstrings: change those. -->

Each folder is one concern, and each file has one job. A folder imports only those below it in this picture. A contract
of the linter (`pyproject.toml`) checks this, and an import that still goes up is red and dashed. The ready-made parts
in `cells/`, `unfolders/` and `kernels/` build on these folders. [Architecture](architecture.md) follows a request
through them.

![The folders of cellrt from top to bottom, and their imports](images/rooms.svg)
"""


class Module(NamedTuple):
    """One file: its path from the root, its dotted name, and the first sentence of its docstring."""

    path: Path
    name: str
    says: str


def first_sentence(docstring: str) -> str:
    """Return the first sentence, on one line."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


def read_module(path: Path, package: str) -> Module:
    """Return a file's name and the first sentence of its docstring. Raise ValueError if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path} has no docstring")
    name = package if path.stem == "__init__" else f"{package}.{path.stem}"
    return Module(path.relative_to(ROOT), name, first_sentence(docstring))


def packages() -> Iterator[tuple[Path, str]]:
    """Yield the folders with code that is installed, in order: path and dotted name. The shelves come last."""
    tops = [(ROOT / "cellrt" / room, f"cellrt.{room}") for room in room_order()]
    tops += [(ROOT / shelf, f"cellrt.{shelf}") for shelf in SHELVES]
    yield ROOT / "cellrt", "cellrt"
    for top, name in tops:
        for folder in (top, *sorted(path for path in top.glob("**/") if path != top)):
            if (folder / "__init__.py").is_file():
                yield folder, ".".join([name, *folder.relative_to(top).parts])


def room_order() -> list[str]:
    """Return the rooms from top to bottom, as the linter's contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(list(contract["layers"]) for contract in contracts if contract["type"] == "layers")


def page() -> str:
    """Return the text of ``docs/rooms.md``."""
    parts = [INTRODUCTION]
    for folder, name in packages():
        own, *files = [read_module(path, name) for path in sorted(folder.glob("*.py"))]
        parts.append(f"## `{own.path.parent.as_posix()}/`\n\n{own.says}\n")
        if files:
            rows = [f"| `{module.path.name}` | {module.says.replace('|', '&#124;')} |" for module in files]
            parts.append("\n".join(["| file | what it is |", "| --- | --- |", *rows, ""]))
    return "\n".join(parts)


def imports() -> dict[tuple[str, str], int]:
    """(room, room that it imports) to the number of its files that do."""
    rooms, found = set(room_order()), dict[tuple[str, str], int]()
    for folder, name in packages():
        for path in folder.glob("*.py"):
            own = read_module(path, name).name.split(".")
            if len(own) > 1 and own[1] in rooms:
                for target in {target for target in imported_rooms(path) if target in rooms and target != own[1]}:
                    found[own[1], target] = found.get((own[1], target), 0) + 1
    return found


def imported_rooms(path: Path) -> Iterator[str]:
    """Yield the names that a file imports of cellrt, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            package, _, rest = name.partition(".")
            if package == "cellrt" and rest:
                yield rest.partition(".")[0]


def picture() -> str:
    """Return the text of ``docs/images/rooms.svg``: a box a room, an arc an import."""
    rooms, width, height, left, top = room_order(), 550, 54, 20, 20
    pitch = height + 12
    middle = {room: top + k * pitch + height / 2 for k, room in enumerate(rooms)}
    elements = []
    for k, room in enumerate(rooms):
        y, colour = top + k * pitch, svg.COLOURS[k % len(svg.COLOURS)]
        elements.append(svg.box(left, y, width, height, fill="#f4f5f7"))
        elements.append(svg.box(left, y, 6, height, fill=colour, radius=2))
        elements.append(svg.text(left + 18, y + 22, f"{room}{'' if is_file(room) else '/'}", size=15, weight="bold"))
        elements.append(svg.text(left + 18, y + 41, says(room), size=11, colour="#5a5f69"))
    for (upper, lower), count in sorted(imports().items()):
        distance = rooms.index(lower) - rooms.index(upper)
        start, end, reach = middle[upper] + 5, middle[lower] - 5, 30 + 22 * abs(distance)
        colour = svg.COLOURS[rooms.index(upper) % len(svg.COLOURS)] if distance > 0 else UPWARD
        right = left + width
        path = f"M{right} {start:g}C{right + reach} {start:g} {right + reach} {end:g} {right + 4} {end:g}"
        elements.append(svg.arrow(path, colour=colour, width=min(3.0, 0.7 + 0.2 * count), is_dashed=distance < 0))
    full_height = top + len(rooms) * pitch + 8
    title = "The folders of cellrt, and their imports"
    return svg.picture(790, full_height, title, elements, (*svg.COLOURS, UPWARD))


def is_file(room: str) -> bool:
    """Return whether a room is a single file."""
    return (ROOT / "cellrt" / f"{room}.py").is_file()


def says(room: str) -> str:
    """Return a room's first sentence, cut where the box ends."""
    home = ROOT / "cellrt" / (f"{room}.py" if is_file(room) else f"{room}/__init__.py")
    sentence = read_module(home, f"cellrt.{room}").says.replace("`", "")
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rsplit(" ", 1)[0].rstrip(",:") + " …"


def main() -> None:
    """Write both files."""
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()
