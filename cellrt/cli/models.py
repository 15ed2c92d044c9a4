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
    """Return a model by import path, file or name. Raise DefinitionError."""
    from cellrt.process.model_names import source_of
    from cellrt.process.source import ModelSource

    return ModelSource(source_of(text)).load()


def read_lines(path: Path) -> dict[str, Any]:
    """Return a file of JSON lines: what each says, by the file and its number. Raise DefinitionError."""
    read: dict[str, Any] = {}
    where = str(path)
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    read[where] = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise DefinitionError(f"{where}: {error.msg} at character {error.pos + 1}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DefinitionError(f"{path}: {error}") from None
    return read


def read_requests(model: Unfolder, path: Path | None, count: int) -> list[Any]:
    """Return this many requests: a JSON file's lines over and over, or the model's example. Raise RequestError."""
    if path is None:
        return [model.example] * count
    from cellrt.core.processor import Processor
    from cellrt.engine.discovery import Discovery
    from cellrt.engine.registry import Registry
    from cellrt.serve.described import request_form
    from cellrt.serve.forms import checked
    from cellrt.serve.server_settings import Limits
    from cellrt.serve.sized import SizedGraph

    limits, binding = Limits(), Discovery(Registry(Processor(1), MAX_NODES))
    graph = SizedGraph(binding)
    model.record_in(graph, model.example)

    def takes(other: Any) -> bool:
        try:
            model.record(binding, other)
        except RequestError:
            return False
        return True

    form = request_form(model.example, takes, limits, graph)
    read = [form.read(checked(line, limits), where) for where, line in read_lines(path).items()]
    if not read:
        raise RequestError(f"{path} is empty")
    return [read[place % len(read)] for place in range(count)]
