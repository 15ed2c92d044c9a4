"""Stand-ins for pages and spans while a cell's step is traced. Attention becomes an operator of the program.

The program takes the pages as they lie in an arena. Only the operators of ``attention_operator.py`` touch them. A
module that reads or writes them in another way is not compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cellrt.definition import attention_operator as operators
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec


def implement(**functions: Callable[..., Tensor]) -> None:
    """Have functions compute the operators of these names, such as ``attend_pages``, where programs run in Python."""
    for name, function in functions.items():
        operators.implement(getattr(torch.ops.cellrt, name).default, function)


KERNELS: dict[str, Any] = {}
"""The functions (``TaskFunction``) that compiled code calls by its variables' names, from the object that has them."""


class PagesAreReadError(Exception):
    """The module looks at pages itself."""


class TracedPages(PagedRows):
    """A state that grows, while a program is traced. One operator on it comes after the other, as they were called.

    ``layer`` is None where there are no layers; ``bias``: see ``Mask`` of ``cellrt.kernels``.
    """

    after: Tensor

    def __init__(self, *_: object) -> None:
        self.after = self.tables
        """The result of the last operator on the pages."""
        self.is_appended = False
        """True if rows were appended that no operator has read since."""

    @property
    def pages(self) -> Tensor:
        """Raises PagesAreReadError."""
        raise PagesAreReadError("it reads or writes pages otherwise than by attention of cellrt.cells")

    def append_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int | None, window: int, scale: float | None
    ) -> Tensor:
        """Append rows and attend, as ``cached_attention`` does."""
        rows = _packed(query), _packed(key), _packed(value)
        mask = self._mask(query, True, window, None, scale)
        return self._made(operators.APPEND_AND_ATTEND(*rows, *self._words(layer), *mask))

    def attend(
        self, query: Tensor, layer: int | None, causal: bool, window: int, bias: Tensor | None, scale: float | None
    ) -> Tensor:
        """Return the attention of each query to the rows that are there."""
        mask = self._mask(query, causal, window, bias, scale)
        return self._made(operators.ATTEND_PAGES(_packed(query), *self._words(layer), *mask))

    def append_rows(self, key: Tensor, value: Tensor, layer: int | None) -> None:
        """Append rows, as ``append_key_values`` does."""
        self._made(operators.APPEND_PAGES(_packed(key), _packed(value), *self._words(layer)))
        self.is_appended = True

    def _words(self, layer: int | None) -> tuple[Any, ...]:
        tables = self.tables, self.lengths, self.offsets, self.positions
        return (self[0], *tables, self.after, -1 if layer is None else layer)

    def _mask(
        self, query: Tensor, causal: bool, window: int, bias: Tensor | None, scale: float | None
    ) -> tuple[Any, ...]:
        return _mask(query, self.offsets, causal, window, bias, scale)

    def _made(self, value: Tensor) -> Tensor:
        self.after, self.is_appended = value, False
        return value


class TracedSpans(Spans):
    """Spans while a program is traced; the node of each row is given."""

    of_rows: Tensor

    @property
    def nodes(self) -> Tensor:
        """The node of each row, as ``Spans.nodes`` is."""
        return self.of_rows


def attend_span(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    positions: Tensor,
    causal: bool,
    window: int,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Return the attention of each row to the rows of its own node, while a program is traced."""
    rows = _packed(query), _packed(key), _packed(value)
    made: Tensor = operators.ATTEND_SPAN(*rows, offsets, positions, *_mask(query, offsets, causal, window, bias, scale))
    return made


def _mask(
    query: Tensor, no_bias: Tensor, causal: bool, window: int, bias: Tensor | None, scale: float | None
) -> tuple[Any, ...]:
    """Return the last arguments of attention."""
    factor = query.shape[2] ** -0.5 if scale is None else scale
    return (no_bias if bias is None else _packed(bias), int(causal), window, float(factor))


def is_traced(value: Tensor) -> bool:
    """Return whether a value has no numbers because a cell's step is traced with it."""
    return _TRACING.is_on and isinstance(value, FakeTensor)


class _Tracing(threading.local):
    is_on = False


_TRACING = _Tracing()


@contextmanager
def tracing() -> Iterator[None]:
    """Make attention of this thread on values without numbers an operator, inside the context."""
    _TRACING.is_on = True
    try:
        yield
    finally:
        _TRACING.is_on = False


def _packed(rows: Tensor) -> Tensor:
    """Return contiguous rows; to ask whether they are would make the program special for a single one."""
    return rows.clone(memory_format=torch.contiguous_format)


def flatten(inputs: Iterable[CellInput]) -> list[Tensor]:
    """Return the inputs of a step as tensors: of each its own, then what those with nodes share."""
    flat: list[Tensor] = []
    first: PagedRows | Spans | None = None
    for value in inputs:
        if isinstance(value, PagedRows):
            flat += value[0], value.tables, value.lengths, value.positions
            first = value if first is None or isinstance(first, Spans) else first
        elif isinstance(value, Spans):
            flat.append(value.positions)
            first = first or value
        else:
            flat += value if isinstance(value, RaggedRows) else [value]
    return flat if first is None else [*flat, first.offsets, first.nodes, first.is_read]


def unflatten(specs: Mapping[str, RowSpec], flat: Sequence[Tensor]) -> list[CellInput]:
    """Return the inputs as the module sees them, of what ``flatten`` made."""
    left, shared, inputs = iter(flat), flat[-3:], list[CellInput]()
    for spec in specs.values():
        if spec.page_size:
            own = [next(left) for _ in range(4)]
            offsets, nodes, is_read = shared
            inputs.append(TracedPages(*own[:3], offsets, nodes, own[3], is_read, spec.page_dim))
        elif spec.span:
            made = TracedSpans(shared[0], next(left), shared[2])
            made.of_rows = shared[1]
            inputs.append(made)
        else:
            inputs.append(RaggedRows(next(left), next(left)) if spec.ragged else next(left))
    return inputs


def with_what_was_appended(inputs: Iterable[CellInput], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, of which the first is made after all that was appended: else it would not be."""
    made = list(outputs)
    for value in inputs:
        if isinstance(value, TracedPages) and value.is_appended:
            made[0] = operators.MADE_AFTER(_packed(made[0]), value.after)
    return made


def is_own(operator: object) -> bool:
    """Return whether an operator is one of attention."""
    return isinstance(operator, torch._ops.OpOverload) and operator in operators.ALL
