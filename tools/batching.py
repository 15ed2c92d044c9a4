"""Eight sentences in padded batches and cell by cell, as in Figure 2.5 of the BatchMaker paper.

python -m tools.batching    # writes docs/images/batching.svg

Both serve at most four rows a step, and a step takes one unit of time whatever its rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tools import svg

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "batching.svg"
MAX_BATCH = 4


class Sentence(NamedTuple):
    """A sentence: its arrival, in steps, and its number of words."""

    arrival: int
    words: int


class Served(NamedTuple):
    """The steps in which a sentence's words are computed, those in which its row is padding, and that of its answer."""

    steps: tuple[int, ...]
    padding: tuple[int, ...]
    answered: int


SENTENCES = tuple(Sentence(*pair) for pair in ((0, 2), (0, 3), (0, 3), (0, 7), (1, 5), (2, 2), (3, 4), (5, 3)))


def padded(sentences: tuple[Sentence, ...]) -> list[Served]:
    """Batch all that wait when a batch ends; a batch lasts as long as its longest sentence."""
    served: dict[int, Served] = {}
    now = 0
    while len(served) < len(sentences):
        waiting = [k for k, sentence in enumerate(sentences) if k not in served and sentence.arrival <= now]
        batch = waiting[:MAX_BATCH]
        if not batch:
            now += 1
            continue
        end = now + max(sentences[k].words for k in batch)
        for k in batch:
            last = now + sentences[k].words
            served[k] = Served(tuple(range(now, last)), tuple(range(last, end)), end)
        now = end
    return [served[k] for k in range(len(sentences))]


def cell_by_cell(sentences: tuple[Sentence, ...]) -> list[Served]:
    """Let each step take the next word of up to four sentences, in order of arrival; who is done leaves at once."""
    steps: list[list[int]] = [[] for _ in sentences]
    now = 0
    while any(len(done) < sentence.words for done, sentence in zip(steps, sentences, strict=True)):
        ready = [k for k, s in enumerate(sentences) if s.arrival <= now and len(steps[k]) < s.words]
        for k in ready[:MAX_BATCH]:
            steps[k].append(now)
        now += 1
    return [Served(tuple(done), (), done[-1] + 1) for done in steps]


ROW, UNIT, LEFT, PANEL = 24, 40, 120, 60


def draw_panel(top: float, title: str, served: list[Served]) -> list[str]:
    """Return a row a sentence: light while it waits, a numbered box a word, hatched where its row is padding."""
    waits = [answer.answered - sentence.arrival for answer, sentence in zip(served, SENTENCES, strict=True)]
    mean = f"{sum(waits) / len(waits):.1f}"
    elements = [
        svg.text(16, top - 14, title, size=15, weight="bold"),
        svg.text(LEFT + 240, top - 14, f"mean latency {mean} steps, longest {max(waits)}", size=12, colour="#6b7079"),
    ]
    for k, (sentence, answer) in enumerate(zip(SENTENCES, served, strict=True)):
        y, colour = top + k * ROW, svg.COLOURS[k % len(svg.COLOURS)]
        elements.append(svg.text(16, y + 15, f"{sentence.words} words", size=11))
        x, end = LEFT + sentence.arrival * UNIT, LEFT + answer.answered * UNIT
        elements.append(svg.box(x, y + 6, end - x, ROW - 12, fill="#e3e5ea", radius=2))
        for word, step in enumerate(answer.steps, start=1):
            elements.append(svg.box(LEFT + step * UNIT + 1, y + 2, UNIT - 2, ROW - 4, fill=colour, radius=3))
            elements.append(
                svg.text(LEFT + (step + 0.5) * UNIT, y + 16, str(word), size=11, anchor="middle", colour="#ffffff")
            )
        for step in answer.padding:
            x = LEFT + step * UNIT + 1
            elements.append(svg.box(x, y + 2, UNIT - 2, ROW - 4, fill="#ffffff", line="#c3c7ce", radius=3))
            elements.append(svg.text(x + UNIT / 2 - 1, y + 16, "pad", size=9, anchor="middle", colour=svg.PALE))
        elements.append(f'<path d="M{end} {y + 1}V{y + ROW - 1}" stroke="{svg.INK}" stroke-width="2"/>')
    return elements


def picture() -> str:
    """Return the text of the file."""
    both = (("padded batches", padded(SENTENCES)), ("cell by cell", cell_by_cell(SENTENCES)))
    longest = max(answer.answered for _, served in both for answer in served)
    height = len(SENTENCES) * ROW + PANEL
    elements = []
    for k, (title, served) in enumerate(both):
        elements += draw_panel(PANEL - 14 + k * height, title, served)
    note = "light: waiting; a number: the word that this step computes; a dark line: answered. Up to 4 rows a step."
    elements.append(svg.text(16, 2 * height + 6, note, size=11, colour="#6b7079"))
    width = LEFT + longest * UNIT + 20
    return svg.picture(width, 2 * height + 20, "Padded batches and cell by cell", elements)


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()
