"""What is generated for the documentation is what the code says now."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import batching, figures, latency, request_life, rooms, site_hooks, states

MADE = {
    rooms.PAGE: rooms.page,
    rooms.PICTURE: rooms.picture,
    request_life.PICTURE: request_life.picture,
    batching.PICTURE: batching.picture,
    figures.PAGE: figures.page,
    **states.MADE,
}


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_a_generated_file_is_current(path: Path) -> None:
    assert path.read_text() == MADE[path](), "run: make pictures"


def test_the_map_has_every_room_and_file_once() -> None:
    text = rooms.page()
    for folder, _ in rooms.packages():
        assert text.count(f"\n## `{folder.relative_to(rooms.ROOT).as_posix()}/`\n") == 1
        for path in folder.glob("*.py"):
            assert path.name == "__init__.py" or f"| `{path.name}` | " in text
    found = {path.parent for path in (rooms.ROOT / "cellrt").rglob("*.py") if path.resolve() == path}
    assert found <= {folder for folder, _ in rooms.packages()}, "each package is in a room of the linter's contract"


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("One. Two.", "One."),
        ("A line\nthat goes on.\n\nMore.", "A line that goes on."),
        ("No, i.e. yes.", "No, i.e. yes."),
    ],
)
def test_a_file_is_described_by_its_first_sentence(docstring: str, expected: str) -> None:
    assert rooms.first_sentence(docstring) == expected


def test_nobody_waits_longer_cell_by_cell_and_all_words_are_computed() -> None:
    alone, together = batching.cell_by_cell(batching.SENTENCES), batching.padded(batching.SENTENCES)
    for sentence, ours, theirs in zip(batching.SENTENCES, alone, together, strict=True):
        assert len(ours.steps) == len(theirs.steps) == sentence.words
        assert ours.answered <= theirs.answered
        assert min(ours.steps) >= sentence.arrival
    for served in (alone, together):
        rows = [step for answer in served for step in (*answer.steps, *answer.padding)]
        assert max(map(rows.count, rows)) <= batching.MAX_BATCH


def test_a_load_is_a_part_of_the_best_peers_throughput() -> None:
    def row(metric: str, value: float) -> dict[str, object]:
        return {"case": "a", "metric": metric, "value": value}

    panel = latency.Panel("file", "a", "title")
    rows = [
        row("cellrt: closed loop of 64", 900.0),
        row("peer: closed loop of 64", 100.0),
        row("peer: closed loop of 512", 200.0),
        row("cellrt: p90 at 50% of the best peer's peak", 3.0),
        row("cellrt: p90 at 10% of the best peer's peak", 2.0),
        row("cellrt: p99 at 10% of the best peer's peak", 9.0),
        {**row("cellrt: p90 at 50% of the best peer's peak", 7.0), "case": "b"},
    ]
    assert latency.curves(panel, rows) == {"cellrt": [(20.0, 2.0), (100.0, 3.0)]}


def swept(server: str, peak: float, p90s: dict[int, float]) -> list[dict[str, object]]:
    """Return the rows of a server with this peak, and p90 by the load in percent of it."""
    common = {"server": server, "panel": "one"}
    rows = [{**common, "metric": "closed loop", "unit": "requests/s", "value": peak}]
    for percent, value in p90s.items():
        rows.append({**common, "metric": f"{server}: p90 at {percent}% of its peak", "quantile": "p90", "value": value})
    return rows


def test_servers_of_a_figure_are_compared_at_the_same_rate() -> None:
    panel = figures.Sweep(swept("cellrt", 200.0, {20: 2.0, 80: 8.0}) + swept("padded", 100.0, {20: 10.0, 80: 40.0}))
    assert panel.p90("cellrt", 100.0) == 5.0
    assert panel.p90("padded", 50.0) == 25.0
    assert panel.p90("padded", 81.0) == float("inf")
    peak, p90 = figures.ahead(panel)
    assert (peak.found, peak.holds) == ("2 times the best peer's peak", True)
    assert (p90.found, p90.holds) == ("0.1 of the peers' least p90 at half of that", True)


def test_what_is_not_as_in_the_paper_is_marked() -> None:
    assert figures.told([figures.Claim("faster", True)]) == "agrees. Faster."
    told = figures.told([figures.Claim("faster", True), figures.Claim("later", False)])
    assert told == "differs. Faster. Later (**not as in the paper**)."


def test_every_decision_is_in_their_list_once() -> None:
    folder = rooms.ROOT / "docs" / "decisions"
    listed = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+)\) \|$", (folder / "index.md").read_text(), re.MULTILINE)
    pages = {page.name: page.read_text().splitlines()[0] for page in folder.glob("0*.md")}
    assert {name: f"# {title}" for _, title, name in listed} == pages
    assert [int(name[:4]) for _, _, name in listed] == [int(number) for number, _, _ in listed]
    assert len(listed) == len(pages)


def page_of(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


def test_the_changelog_is_a_page_whose_links_are_made_to_fit() -> None:
    links = re.findall(r"\](?:\(|: )([^)#\s]+)", site_hooks.on_page_markdown("", page_of("changelog.md")))
    assert links
    assert [link for link in links if ":" not in link and not (rooms.ROOT / "docs" / link).exists()] == []
    assert site_hooks.on_page_markdown("as it is", page_of("index.md")) == "as it is"


@pytest.mark.parametrize(
    "fetched",
    [
        '<script src="https://a.example/b.js"></script>',
        "<img alt=a src=http://a.example/b.png>",
        '<link rel="stylesheet" href="https://a.example/b.css">',
    ],
)
def test_a_page_that_fetches_from_the_network_is_refused(fetched: str) -> None:
    with pytest.raises(ValueError, match=r"index\.md fetches https?://a\.example/b\."):
        site_hooks.on_post_page(f"<p>{fetched}</p>", page_of("index.md"))
    fine = '<a href="https://a.example">a</a><script src="a.js"></script>'
    assert site_hooks.on_post_page(fine, page_of("index.md")) == fine
