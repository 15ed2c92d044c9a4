"""What a cell's module sees of pages and spans while its step is traced: attention becomes an operator of the program.

The program takes the pages as they lie in an arena. Only the operators of ``attention_operator.py`` touch them; what
reads or writes them otherwise stays eager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cellrt.definition import attention_operator as operators
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec

KERNELS: dict[str, Any] = {}
"""The functions (``TaskFunction``) that compiled code calls by its variables' names, from whoever has them."""


class PagesAreReadError(Exception):
    """The module looks at pages itself."""


class _Mask:
    """The last arguments of attention."""

    def __init__(self, query: Tensor, causal: bool, window: int, scale: float | None) -> None:
        self.words = int(causal), window, float(query.shape[2] ** -0.5 if scale is None else scale)


class TracedPages(PagedRows):
    """A state that grows, while a program is traced. One operator on it comes after the other, as they were called."""

    after: Tensor

    def __init__(self, *_: object) -> None:
        self.after = self.tables
        """What the last operator on it made."""
        self.is_appended = False
        """Whether something was appended that no operator has read since."""

    @property
    def pages(self) -> Tensor:
        """Raises PagesAreReadError."""
        raise PagesAreReadError("it reads or writes pages otherwise than by attention of cellrt.cells")

    def append_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int | None, window: int, scale: float | None
    ) -> Tensor:
        """As ``cached_attention``."""
        rows = _packed(query), _packed(key), _packed(value)
        words = _Mask(query, True, window, scale).words
        return self._made(operators.APPEND_AND_ATTEND(*rows, *self._words(layer), *words))

    def attend(self, query: Tensor, layer: int | None, scale: float | None) -> Tensor:
        """As ``cross_attention``."""
        words = _Mask(query, False, 0, scale).words
        return self._made(operators.ATTEND_PAGES(_packed(query), *self._words(layer), *words))

    def append_rows(self, key: Tensor, value: Tensor, layer: int | None) -> None:
        """As ``append_key_values``."""
        self._made(operators.APPEND_PAGES(_packed(key), _packed(value), *self._words(layer)))
        self.is_appended = True

    def _words(self, layer: int | None) -> tuple[Any, ...]:
        tables = self.tables, self.lengths, self.offsets, self.positions
        return (self[0], *tables, self.after, -1 if layer is None else layer)

    def _made(self, value: Tensor) -> Tensor:
        self.after, self.is_appended = value, False
        return value


class TracedSpans(Spans):
    """Spans while a program is traced; the node of each row is given."""

    of_rows: Tensor

    @property
    def nodes(self) -> Tensor:
        """See ``Spans``."""
        return self.of_rows

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float | None
    ) -> Tensor:
        """As ``span_attention``."""
        rows = _packed(query), _packed(key), _packed(value)
        words = _Mask(query, causal, window, scale).words
        return operators.ATTEND_SPAN(*rows, self.offsets, self.positions, *words)  # type: ignore[no-any-return]


def _packed(rows: Tensor) -> Tensor:
    """Contiguous rows; to ask whether they are would make the program special for a single one."""
    return rows.clone(memory_format=torch.contiguous_format)


def flatten(inputs: Iterable[CellInput]) -> list[Tensor]:
    """The inputs of a step as tensors: of each its own, then what those with nodes share."""
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
    """The inputs as the module sees them, of what ``flatten`` made."""
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
    """The outputs, of which the first is made after all that was appended: else it would not be."""
    made = list(outputs)
    for value in inputs:
        if isinstance(value, TracedPages) and value.is_appended:
            made[0] = operators.MADE_AFTER(_packed(made[0]), value.after)
    return made


def is_own(operator: object) -> bool:
    """Whether it is an operator of attention."""
    return isinstance(operator, torch._ops.OpOverload) and operator in operators.ALL
