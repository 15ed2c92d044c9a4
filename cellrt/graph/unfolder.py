"""The register-an-unfold-function door: a model is a name, cells and a function from request to graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from cellrt.definition.cell import CURRENT_GRAPH, Cell
from cellrt.errors import DefinitionError, RequestError, interrupt_in
from cellrt.graph.binding import Binding
from cellrt.graph.graph import Graph
from cellrt.graph.results import Recorded
from cellrt.graph.row_bits import describe_source


@dataclass(frozen=True, repr=False)
class Unfolder:
    """A model: ``function(graph, request)`` builds the cell graph of a request and returns its results by name.

    Attributes:
        name: the model's name in an engine.
        example: a request the function accepts; it is unfolded at registration, and tells the engine all cells and
            row shapes of the model.
        cells: further cells that other requests may use.
        key: what a request's graph depends on alone, if that is known; see ``unfold``.
        outline: what clients in other processes make the model of, instead of importing it with its weights: JSON, with
            ``maker``, the "module:function" that makes it, and ``value``, what that is given.
    """

    name: str
    function: Callable[[Graph, Any], object]
    example: Any
    cells: Sequence[Cell] = field(default=())
    key: Callable[[Any], Hashable] | None = None
    outline: Mapping[str, Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Unfolder({self.name!r})"

    def __call__(self, graph: Graph, request: Any) -> object:
        """Call the function itself, so that unfolders can be composed."""
        return self.function(graph, request)

    def record(self, binding: Binding, request: Any) -> Recorded:
        """Run the function on a request. Raise RequestError if the graph is wrong, whatever the function raised."""
        return self.record_in(Graph(binding), request)

    def record_in(self, graph: Graph, request: Any) -> Recorded:
        """Unfold a request into a graph that is empty so far, and return the recording; errors as in ``record``."""
        try:
            return copy_context().run(self._record_in, graph, request)
        except RequestError as error:
            raise type(error)(f"model {self.name!r}: {error}") from error
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemError) and (interrupt := interrupt_in(error)) is not None:
                raise interrupt from None
            raise RequestError(
                f"model {self.name!r}: the unfolder raised {type(error).__name__}: {error}; the request: "
                f"{describe_source(request)}"
            ) from error
        finally:
            graph.end()

    def _record_in(self, graph: Graph, request: Any) -> Recorded:
        """Record in a context of its own, so that no interrupt can leave the caller's context changed."""
        CURRENT_GRAPH.set(graph)
        return graph.record(self.function(graph, request))


def unfold(
    name: str, *, example: Any, cells: Sequence[Cell] = (), key: Callable[[Any], Hashable] | None = None
) -> Callable[[Callable[[Graph, Any], object]], Unfolder]:
    """Turn a function ``(graph, request) -> {name: outputs}`` into a model that engines can register.

    Args:
        name: the model's name.
        example: a request that the function accepts, used to check it and to find the model's cells.
        cells: further cells that the example does not reach.
        key: a function, such as ``len``, that returns all that a request's graph depends on, as something hashable. A
            request of a known key is not unfolded again: only its tensors are taken. This saves most of the cost of
            a small request. See below.

    The function calls cells on node handles, tensors, numbers, or lists of them for ragged inputs; ``graph`` has
    builders for whole chains, trees and loops: see ``Graph`` for what they cost, and how much a cell should do. It is
    called for each request, before any cell runs: outputs have no values yet, so an end that depends on one is a
    ``graph.loop(until=...)``.

    ``key`` promises two things. Two requests of equal keys make the function do the same, but for the numbers in
    tensors, arrays and lists. The function hands these to the graph as they are: ``request``, ``request["x"]``,
    ``request[0]``, but no part or sum of them, and no single number. The example is checked at registration. Later
    requests are checked now and then: the second of each key, and whenever there are twice as many. RequestError says
    that a key belongs to different graphs. What does not fit the known graph in shape or dtype is unfolded as ever, and
    so are requests of which the promise about tensors does not hold.
    """
    if not name or not isinstance(name, str):
        raise DefinitionError(f"unfold: expected a name, got {name!r}")
    if key is not None and not callable(key):
        raise DefinitionError(f"unfold: expected a function of a request as key, got {key!r}")

    def decorate(function: Callable[[Graph, Any], object]) -> Unfolder:
        return Unfolder(name, function, example, tuple(cells), key)

    return decorate
