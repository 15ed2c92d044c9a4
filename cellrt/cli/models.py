"""Models and requests that commands are given by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.unfolder import Unfolder


def load_model(text: str) -> Unfolder:
    """A model by import path, file or name. Raises DefinitionError."""
    from cellrt.process.source import ModelSource
    from cellrt.process.named import source_of

    return ModelSource(source_of(text)).load()


def read_lines(path: Path) -> list[Any]:
    """A file of JSON lines. Raises DefinitionError."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DefinitionError(f"{path}: {error}") from None


def read_requests(model: Unfolder, path: Path | None, count: int) -> list[Any]:
    """So many requests: of a file of JSON lines, again and again, or the model's example. Raises RequestError."""
    if path is None:
        return [model.example] * count
    from cellrt.serve.forms import checked, form_of
    from cellrt.serve.settings import Limits

    limits = Limits()
    form = form_of(model.example, limits)
    read = [form.read(checked(line, limits), f"line {number}") for number, line in enumerate(read_lines(path), 1)]
    if not read:
        raise RequestError(f"{path} is empty")
    return [read[place % len(read)] for place in range(count)]
