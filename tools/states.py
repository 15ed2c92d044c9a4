"""The page of states, and its pictures, drawn from the table of legal moves.

    python -m tools.states

writes ``docs/states.md`` and ``docs/images/states-*.svg``. A test fails while they are not what this would write.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cellrt.core.state.moves import MACHINES, StateMachine
from tools import svg

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "states.md"
PICTURES = ROOT / "docs" / "images"
LANE, MARGIN, TOP, PITCH, CHARACTER = 126, 24, 56, 38, 6.2

INTRODUCTION = """\
# States and moves

<!-- Made by `python -m tools.states` from cellrt/core/state/moves.py: change that. -->

Requests, subgraphs and sessions are in one state at a time, and go from one to another only as these tables say. All of
them are in `cellrt/core/state/moves.py`; every write of a state goes through it. A move that is not there is an error
of the engine's own: the compiled core counts it and the validator tells of it, the engine raises `InternalError` with
the story of the request.

In the pictures each state is a lane, and each arrow a legal move with what brings it about.
"""


def path_of(machine: StateMachine) -> Path:
    """Return where the picture of a machine lies."""
    return PICTURES / f"states-{machine.title.lower().replace(' ', '-')}.svg"


def picture(machine: StateMachine) -> str:
    """Return the picture of a machine: a lane for each state, and each move as an arrow from lane to lane."""
    lanes = {state: MARGIN + LANE * (number + 0.5) for number, state in enumerate(machine.states)}
    causes = [(min(lanes[before], lanes[after]), cause) for (before, after), cause in machine.moves.items()]
    width = max(MARGIN + LANE * len(lanes), *(left + CHARACTER * len(cause) for left, cause in causes)) + MARGIN
    height = TOP + PITCH * len(machine.moves) + 16
    elements = []
    for number, (state, x) in enumerate(lanes.items()):
        colour = svg.COLOURS[number]
        elements += [
            f'<path d="M{x:g} 40V{height - 12:g}" stroke="{colour}" stroke-width="1.5" opacity="0.6"/>',
            svg.box(x - LANE / 2 + 6, 14, LANE - 12, 26, fill=svg.PAPER, line=colour),
            svg.text(x, 31, state.name, size=12, anchor="middle", weight="bold", colour=colour),
        ]
    for row, ((before, after), cause) in enumerate(machine.moves.items()):
        y = TOP + PITCH * (row + 0.65)
        elements += [
            svg.arrow(f"M{lanes[before]:g} {y:g}H{lanes[after]:g}"),
            svg.text(min(lanes[before], lanes[after]) + 8, y - 7, cause, size=12),
        ]
    return svg.picture(width, height, f"{machine.title}: its states and moves", elements)


def describe(machine: StateMachine) -> str:
    """Return one section: a picture, and what each state means."""
    lines = [f"## {machine.title}", "", f"![{machine.title}](images/{path_of(machine).name})"]
    lines += ["", "| state | meaning |", "| --- | --- |"]
    lines += [f"| {state.name} | {meaning} |" for state, meaning in machine.states.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *map(describe, MACHINES)])


MADE = {PAGE: page} | {path_of(machine): partial(picture, machine) for machine in MACHINES}

if __name__ == "__main__":
    for path, make in MADE.items():
        path.write_text(make())
