"""Utility against load by policy and layout of a batch, from what ``python -m benchmarks encoder`` left.

python -m tools.policies    # writes docs/images/policies.png
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.encoder import draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "cpu-2-cores", ROOT / "docs" / "images" / "policies.png"


def main() -> None:
    """Draws it."""
    draw([json.loads(line) for line in (RESULTS / "encoder.jsonl").read_text().splitlines()], PICTURE, dpi=72)


if __name__ == "__main__":
    main()
