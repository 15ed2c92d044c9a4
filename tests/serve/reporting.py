"""A model that reports what the engine of its process was made with, since nothing else of a server tells."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from pathlib import Path

from cellrt.engine.engine import Engine
from cellrt.graph.unfolder import Unfolder
from tests.steps import chain

FILE = "CELLRT_TEST_REPORT"
"""The variable that names the file where the report goes."""


def report() -> Unfolder:
    """A model, whatever engine it is for."""
    (engine,) = [each for each in gc.get_objects() if isinstance(each, Engine)]
    told = {
        "policy": engine._processor.policy.name,
        "arena_bytes": engine._registrar._sizes._given.rows,
        "page_bytes": engine._registrar._sizes._given.pages,
        "freeze": engine._freeze,
        "scheduler": dataclasses.asdict(engine._processor.settings),
        "sessions": dataclasses.asdict(engine._manager.sessions.limits),
    }
    Path(os.environ[FILE]).write_text(json.dumps(told))
    return chain
