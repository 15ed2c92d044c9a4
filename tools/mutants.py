"""Draws which mutants of a session of cosmic-ray are tried, as all take days: ``python -m tools.mutants FILE COUNT``.

Types and texts of errors are no part of what the core decides: mutants of these are not drawn.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db

SEED = 12


def lines_that_decide_nothing(module: Path) -> set[int]:
    """Return the lines of types, and those of errors that are raised, counted from 1."""
    return {
        line
        for node in ast.walk(ast.parse(module.read_text()))
        for part in _parts(node)
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    }


def _parts(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    if isinstance(node, ast.Raise):
        yield node
    elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns


def main(session: str, count: int) -> None:
    """Leave at most ``count`` mutants of a session that was just begun, the same ones at every call."""
    silent = {str(path): lines_that_decide_nothing(path) for path in sorted(Path("cellrt/core").rglob("*.py"))}
    with use_db(session, WorkDB.Mode.open) as db:
        items = [
            item
            for item in db.pending_work_items
            if all(spec.start_pos[0] not in silent[str(spec.module_path)] for spec in item.mutations)
        ]
        items.sort(key=lambda item: [(str(m.module_path), m.operator_name, m.occurrence) for m in item.mutations])
        drawn = random.Random(SEED).sample(items, min(count, len(items)))
        db.clear()
        db.add_work_items(drawn)
    print(f"{len(drawn)} of {len(items)} mutants are tried")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
