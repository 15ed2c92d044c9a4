"""Every Python block of the page about models runs by itself."""

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BLOCKS = {
    f"line {PAGE.read_text().count(chr(10), 0, found.start(1)) + 1}": found
    for found in re.finditer(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}


@pytest.mark.parametrize("place", BLOCKS)
def test_a_block_runs(place, tmp_path):
    found = BLOCKS[place]
    script = tmp_path / "models.py"
    lines_before = found.string.count("\n", 0, found.start(1))
    script.write_text("\n" * lines_before + found[1])  # so that an error names the page's own line
    runpy.run_path(str(script), run_name="__main__")


def test_the_page_has_blocks():
    assert BLOCKS
