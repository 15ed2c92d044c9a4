"""Growing states while a graph is written: the states there are, and the cells that may append to them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from cellrt.core.templates.program import OP_PAGES, PAGED
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError, RequestTooLargeError
from cellrt.graph.results import StateLayout
from cellrt.graph.row_bits import describe_source
from cellrt.graph.states import SessionStates
from cellrt.graph.symbols import GrowingState


class GrowingStates:
    """The growing states of one graph, numbered in order of their making."""

    def __init__(self, program: array[int], states: SessionStates) -> None:
        self._program, self._states, self._count = program, states, 0

    def new(
        self, graph: object, kind_of: Callable[[RowSpec], int], cell: Cell, name: str | None, keep: bool
    ) -> GrowingState:
        """Return a new one for an input of the cell; ``keep``: the session's.

        Raise RequestError if it is no such input.
        """
        grown = [name for name, spec in cell.inputs.items() if spec.appends]
        if name is None and len(grown) == 1:
            name = grown[0]
        if not grown:
            raise RequestError(f"graph.pages of cell {cell.name!r}: none of its inputs grows (see cellrt.grows)")
        if name not in grown:
            raise RequestError(f"graph.pages of cell {cell.name!r}: expected one of the inputs {grown}, got {name!r}")
        spec = cell.inputs[name]
        kind = kind_of(spec)
        if keep:
            identity = cell.identity[:16]
            self._states.take_pages(StateLayout(f"{cell.name}.{name}", kind, identity, spec.page_size, spec.page_dim))
        self._program.extend((OP_PAGES, kind, spec.page_size, int(keep)))
        self._count += 1
        return GrowingState(graph, self._count - 1, spec)

    def words(self, graph: object, where: str, spec: RowSpec, source: object, is_loop: bool) -> Sequence[int]:
        """Return words for an input that is a growing state. Raise RequestError, naming ``where``."""
        if not isinstance(source, GrowingState):
            raise RequestError(f"{where}: expected {spec} (see graph.pages), got {describe_source(source)}")
        if source.graph is not graph:
            raise RequestError(f"{where}: the growing state belongs to another graph")
        if source.spec.stored != spec.stored:
            raise RequestError(f"{where}: expected {spec}, got {source.spec}")
        if spec.appends:
            if not source._is_open:
                raise RequestError(f"{where}: a loop has appended to it, and how much is not known before it ends")
            source._is_open = not is_loop
        return PAGED, source._number


def carried_by(cell: Cell, carry: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the output that each input of a loop is carried from.

    The cell declares it; for a cell with spans ``carry`` may give it.

    Raise RequestError if it cannot be.
    """
    if not cell.has_spans:
        if carry is not None:
            raise RequestError(f"loop of cell {cell.name!r}: carry is for cells with pages or spans; see cell(carry=)")
        return cell.carry
    if carry is None:
        return {name: name for name, spec in cell.inputs.items() if cell.outputs.get(name) == spec}
    for name, output in carry.items():
        spec = cell.inputs.get(name)
        if spec is None or spec.has_nodes or cell.outputs.get(output) != spec:
            raise RequestError(
                f"loop of cell {cell.name!r}: carry {name!r} from {output!r}: expected an input and an output of the "
                f"same rows; inputs are { ({k: str(v) for k, v in cell.inputs.items()}) }, "
                f"outputs { ({k: str(v) for k, v in cell.outputs.items()}) }"
            )
    return carry


def check_span(cell: Cell, count: int) -> None:
    """Raise RequestTooLargeError for this many rows that the cell needs all at once, and cannot have; RequestError for
    more than its module takes, which says so by an attribute ``longest_span``.
    """
    longest = getattr(cell.module, "longest_span", None)
    if longest is not None and count > longest:
        raise RequestError(
            f"cell {cell.name!r}: a sequence of {count} rows; its module has positions for {longest}, so no longer one "
            "can be read"
        )
    if count > cell.max_batch_rows:
        raise RequestTooLargeError(
            f"cell {cell.name!r}: {count} rows; it needs all of them in one task, which has at most "
            f"{cell.max_batch_rows}; that takes cell(max_batch_rows={count}) or more, or an attribute longest_span of "
            "its module, which says how many rows the longest sequence has"
        )
