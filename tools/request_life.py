"""The life of a request in eight steps: who takes each, and in which files.

python -m tools.request_life    # writes docs/images/request-life.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tools import svg

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "request-life.svg"
LANES = ("the client's thread", "the manager's turn", "a worker")


class Step(NamedTuple):
    """One step; ``files`` are paths from ``cellrt/``."""

    lane: int
    title: str
    says: str
    files: tuple[str, ...]


STEPS = (
    Step(0, "submit", "the model is looked up, a future made", ("engine/engine.py",)),
    Step(0, "unfold", "your function writes the cell graph", ("graph/unfolder.py", "graph/recorder.py")),
    Step(
        0,
        "compile",
        "cut into subgraphs, or found in a cache",
        ("core/templates/template.py", "core/templates/partition.py"),
    ),
    Step(1, "admit", "its rows are reserved, or it waits", ("core/requests/admission.py", "core/state/rows.py")),
    Step(
        1,
        "schedule",
        "a cell type is chosen, a task is formed",
        ("core/scheduling/schedule.py", "core/scheduling/batching.py"),
    ),
    Step(2, "run", "rows are read, the cell runs, rows are put", ("worker/cpu/worker.py", "worker/cpu/run_task.py")),
    Step(1, "complete", "what waited for these rows is released", ("core/completion/completion.py",)),
    Step(1, "reply", "after the last cell: results read, future set", ("engine/manager.py", "engine/future.py")),
)

WIDTH, LANE, TOP, PITCH, HEIGHT = 900, 290, 50, 78, 62


def corner(number: int) -> tuple[float, float]:
    """Return the upper left corner of a step's box."""
    return 16 + STEPS[number].lane * LANE, TOP + number * PITCH


def draw_step(number: int) -> list[str]:
    """Return a step's box: number and title, what happens, where."""
    step, (x, y) = STEPS[number], corner(number)
    colour = svg.COLOURS[(0, 2, 1)[step.lane]]
    return [
        svg.box(x, y, LANE - 20, HEIGHT, fill="#f7f8fa", line=colour),
        svg.text(x + 12, y + 20, f"{number + 1}  {step.title}", size=14, weight="bold", colour=colour),
        svg.text(x + 12, y + 37, step.says, size=10.5),
        svg.text(x + 12, y + 53, ", ".join(step.files), size=10, colour="#6b7079"),
    ]


def draw_arrow(number: int, after: int) -> str:
    """Return the arrow from one step to the next: down in a lane, or down and across."""
    (x0, y0), (x1, y1) = corner(number), corner(after)
    if x0 == x1 and after == number + 1:
        middle = x0 + (LANE - 20) / 2
        return svg.arrow(f"M{middle} {y0 + HEIGHT}V{y1 - 1}")
    if after == number + 1:
        side = LANE - 60 if x1 > x0 else 40
        return svg.arrow(f"M{x0 + side} {y0 + HEIGHT}V{y1 + HEIGHT / 2}H{x1 - 1 if x1 > x0 else x1 + LANE - 19}")
    left = x0 - 8
    return svg.arrow(f"M{x0} {y0 + HEIGHT / 2}H{left}V{y1 + HEIGHT / 2}H{x1 - 1}", is_dashed=True)


def picture() -> str:
    """Return the text of the file. Raise FileNotFoundError if a step names a file that is not there."""
    for step in STEPS:
        for file in step.files:
            if not (ROOT / "cellrt" / file).is_file():
                raise FileNotFoundError(f"step {step.title!r} of a request's life: there is no file cellrt/{file}")
    height = TOP + len(STEPS) * PITCH + 4
    elements = []
    for lane, name in enumerate(LANES):
        elements.append(svg.box(6 + lane * LANE, 8, LANE, height - 16, fill=("#fbfcfe", "#f9fbf8", "#fefbf7")[lane]))
        elements.append(svg.text(16 + lane * LANE, 32, name, size=13, colour="#6b7079"))
    for number in range(len(STEPS)):
        elements += draw_step(number)
    elements += [draw_arrow(number, number + 1) for number in range(len(STEPS) - 1)]
    x, y = corner(6)
    elements.append(draw_arrow(6, 4))
    elements.append(
        svg.text(x + LANE - 30, y - 6, "5 to 7: for each of its tasks", size=10, anchor="end", colour="#6b7079")
    )
    return svg.picture(WIDTH, height, "The life of a request in eight steps", elements)


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()
