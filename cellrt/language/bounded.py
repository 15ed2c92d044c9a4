"""Models that complete texts within their context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cellrt import Graph, RequestError, Unfolder
from cellrt.numbers import as_integer


def bounded(context: int, unfold: Callable[..., Unfolder], name: str, cells: Any, **options: Any) -> Unfolder:
    """Return the model that ``unfold`` makes, limited so that a prompt and its answer together fit the context."""
    most = options.setdefault("max_tokens", min(256, context - 1))
    inner = unfold(name, cells, **options)

    def bounded(graph: Graph, request: Any) -> object:
        asked = dict(request) if isinstance(request, Mapping) else {"prompt": request}
        read = len(asked["prompt"]) if hasattr(asked.get("prompt"), "__len__") else 0
        steps = as_integer(asked.get("max_tokens"))
        if read >= context or (steps is not None and steps <= most and read + steps > context):
            raise RequestError(
                f"expected at most {context} tokens of the prompt and its answer, got {read} and "
                f"max_tokens={asked.get('max_tokens')}"
            )
        if "max_tokens" not in asked:
            asked["max_tokens"] = min(most, context - read)
        return inner.function(graph, asked)

    return Unfolder(inner.name, bounded, inner.example, inner.cells)
