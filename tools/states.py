"""The page of states, drawn from the table of legal moves.

    python -m tools.states

writes ``docs/states.md``. A test fails while it is not what this would write.
"""

from __future__ import annotations

from pathlib import Path

from cellrt.core.moves import MACHINES, StateMachine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "states.md"

INTRODUCTION = """\
# States and moves

<!-- Made by `python -m tools.states` from cellrt/core/moves.py: change that. -->

Requests, subgraphs and sessions are in one state at a time, and go from one to another only as these tables say. All of
them are in `cellrt/core/moves.py`; every write of a state goes through it. A move that is not there is an error of the
engine's own: the compiled core counts it and the validator tells of it, the engine raises `InternalError` with the
story of the request.
"""


def describe(machine: StateMachine) -> str:
    """One section: a diagram, and what each state means."""
    lines = [f"## {machine.title}", "", "```mermaid", "stateDiagram-v2"]
    lines += [f"    {before.name} --> {after.name}: {cause}" for (before, after), cause in machine.moves.items()]
    lines += ["```", "", "| state | meaning |", "| --- | --- |"]
    lines += [f"| {state.name} | {meaning} |" for state, meaning in machine.states.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *map(describe, MACHINES)])


if __name__ == "__main__":
    PAGE.write_text(page())
