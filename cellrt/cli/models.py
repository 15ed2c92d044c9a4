"""Models and requests that commands are given by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cellrt.errors import DefinitionError, RequestError

if TYPE_CHECKING:
    from cellrt.graph.unfolder import Unfolder

MAX_NODES = 65_535


def load_model(text: str) -> Unfolder:
    """A model by import path, file or name. Raises DefinitionError."""
    from cellrt.process.named import source_of
    from cellrt.process.source import ModelSource

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
    from cellrt.core.processor import Processor
    from cellrt.engine.registry import Discovery, Registry
    from cellrt.serve.described import request_form
    from cellrt.serve.forms import checked
    from cellrt.serve.settings import Limits

    limits, binding = Limits(), Discovery(Registry(Processor(1), MAX_NODES))

    def takes(other: Any) -> bool:
        try:
            model.record(binding, other)
        except RequestError:
            return False
        return True

    form = request_form(model.example, takes, limits)
    read = [form.read(checked(line, limits), f"line {number}") for number, line in enumerate(read_lines(path), 1)]
    if not read:
        raise RequestError(f"{path} is empty")
    return [read[place % len(read)] for place in range(count)]
