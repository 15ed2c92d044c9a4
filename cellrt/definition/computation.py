"""A batched computation: a module from rows of named inputs to rows of named outputs, by the step and in runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from types import FunctionType
from typing import Any, Self

import torch
from torch import nn

from cellrt.definition.declaration import Declaration
from cellrt.definition.examples import zero_inputs
from cellrt.definition.input_watch import InputWatch
from cellrt.definition.snapshot import HOOKS, replica_of
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, conversion, copy_input, describe
from cellrt.errors import CellError


class Computation:
    """The computation of a cell: its module and its declaration.

    Attributes:
        module: a module or function of its own (a snapshot).
        by_name: whether its inputs are passed by name, or in order.
        declaration: what is said of it.
        name, inputs, outputs, carry, finite, max_batch, min_batch, batch_sizes, max_batch_rows, priority: the
            declaration's.
        has_spans: whether it is told which rows are of one node.
        is_whole: whether it needs all steps of a chain at once.
        output_index: the index of each output in their order, by name.
        may_step: the inputs that may have a value for each step of a chain.
        written: the inputs that the module writes to in place, as far as it was seen to. It is given copies of these.
    """

    def __init__(
        self, module: Callable[..., Any], by_name: bool, declaration: Declaration, written: Iterable[str] = ()
    ) -> None:
        self.module, self.by_name, self.declaration = module, by_name, declaration
        self.written = set(written)
        self.name, self.priority = declaration.name, declaration.priority
        self.inputs, self.outputs = dict(declaration.inputs), dict(declaration.outputs)
        self.output_index = {name: index for index, name in enumerate(self.outputs)}
        self.carry, self.finite = dict(declaration.carry), declaration.finite
        self.max_batch, self.min_batch, self.batch_sizes, self.max_batch_rows = declaration.sizes
        self.has_spans = any(spec.has_nodes for spec in self.inputs.values())
        self.is_whole = any(spec.span == "whole" for spec in self.inputs.values())
        self.may_step = {
            name: spec
            for name, spec in self.inputs.items()
            if name not in self.carry and not spec.ragged and not spec.has_nodes
        }
        self._steps, self._takes_order = steps_of(module), not by_name or takes_order(module, list(self.inputs))
        self._following = _following(self.inputs, self.output_index, self.carry)

    @property
    def has_steps(self) -> bool:
        """True if the module has a steps-first form for runs."""
        return self._steps is not None

    def replica(self) -> Self:
        """Return this computation for one thread: with a replica of the module that shares its weights
        (``replica_of``).
        """
        return self.with_module(replica_of(self.module))

    def with_module(self, module: Callable[..., Any]) -> Self:
        """Return this computation with another module in place of its own."""
        made = copy.copy(self)
        made.module, made._steps = module, steps_of(module)
        made._takes_order = not made.by_name or takes_order(module, list(made.inputs))
        return made

    def run_step(self, *inputs: CellInput) -> list[torch.Tensor]:
        """Run one step: takes inputs ``[rows, *shape]`` and return outputs ``[rows, *shape]``, both in order.

        It never looks at what it is given: the runtime's inputs are what they should be.
        """
        given = self._with_copies(inputs) if self.written else inputs
        if self._takes_order:
            return self._in_order(self.module(*given))
        return self._in_order(self.module(**dict(zip(self.inputs, given, strict=True))))

    def run_padded(self, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
        """Run one step as ``run_step`` does, padded with zero rows to the next supported batch size if there are such
        sizes.
        """
        if not self.batch_sizes:
            return self.run_step(*inputs)
        padded = self.padded(inputs)
        return cut(self.run_step(*padded), count_rows(padded[0]), count_rows(inputs[0]))

    def padded(self, inputs: Sequence[CellInput]) -> Sequence[CellInput]:
        """Return the inputs, with zero rows up to the next supported batch size if there are such sizes."""
        rows = count_rows(inputs[0])
        size = next((size for size in self.batch_sizes if size >= rows), rows)
        return inputs if size == rows else [_with_zeros(value, size - rows) for value in inputs]

    def run_watched(self, inputs: Sequence[CellInput], batch_sizes: list[int] | None = None) -> list[torch.Tensor]:
        """Run as ``run_step`` or ``run_steps`` does, on tensors made outside inference, and note which are written
        to.
        """
        watch = InputWatch(dict(zip(self.inputs, inputs, strict=True)))
        outputs = self.run_step(*inputs) if batch_sizes is None else self.run_steps(batch_sizes, *inputs)
        self.written |= watch.written()
        return outputs

    def run_steps(self, batch_sizes: list[int], *inputs: CellInput) -> list[torch.Tensor]:
        """Run ``len(batch_sizes)`` successive steps; step s has the first ``batch_sizes[s]`` rows (never growing).

        Carried inputs are ``[batch_sizes[0], *shape]``, the others and all outputs are packed by step,
        ``[sum(batch_sizes), *shape]``. Uses the module's ``steps`` if it has one, else its plain form step by step.
        """
        if self._steps is not None:
            given = self._with_copies(inputs) if self.written else inputs
            return self._in_order(self._steps(batch_sizes, **dict(zip(self.inputs, given, strict=True))))
        by_step = [_by_step(value, batch_sizes) for name, value in zip(self.inputs, inputs) if name not in self.carry]
        others: Sequence[tuple[CellInput, ...]] = list(zip(*by_step)) if by_step else [()] * len(batch_sizes)
        first = iter(others[0])
        current: Sequence[Any] = [
            value if name in self.carry else next(first) for name, value in zip(self.inputs, inputs)
        ]
        run, following, outputs = self.run_step, self._following, self.run_step(*current)
        collected = [outputs]
        for given, before, size in zip(others[1:], batch_sizes, batch_sizes[1:]):
            current = following((*given, *outputs))
            if size < before:  # else no slice, which costs as much as a small operation
                current = [value[:size] if name in self.carry else value for name, value in zip(self.inputs, current)]
            outputs = run(*current)
            collected.append(outputs)
        return [torch.cat(values) for values in zip(*collected)]

    def example_inputs(self, rows: int, device: str = "cpu") -> list[CellInput]:
        """Return zero inputs of ``rows`` rows; a ragged input has two rows a node."""
        return zero_inputs(self.inputs.values(), rows, device)

    def check_outputs(self, outputs: Sequence[torch.Tensor], rows: int) -> None:
        """Raise CellError if the module returned other shapes or dtypes than it declared."""
        for (name, spec), value in zip(self.outputs.items(), outputs, strict=True):
            if tuple(value.shape) != (rows, *spec.shape) or value.dtype != spec.dtype:
                raise CellError(f"cell {self.name!r}, output {name!r}: {_other_rows(rows, spec, value)}")

    def guarded(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return a function that takes what the module takes, given copies of the inputs that the module writes to."""
        written = [index for index, name in enumerate(self.inputs) if name in self.written]

        def call_with_copies(*args: CellInput, **kwargs: CellInput) -> object:
            given = list(args or kwargs.values())
            for index in written:
                given[index] = copy_input(given[index])
            return function(*given) if args else function(**dict(zip(kwargs, given)))

        return call_with_copies if written else function

    def _with_copies(self, inputs: Sequence[CellInput]) -> list[CellInput]:
        """Return the inputs, with copies of those that the module writes to."""
        return [copy_input(value) if name in self.written else value for name, value in zip(self.inputs, inputs)]

    def _in_order(self, result: object) -> list[torch.Tensor]:
        """Return the outputs in the declared order. Raise CellError if they are others than declared."""
        if type(result) is dict and len(result) == len(self.outputs):  # as of most cells
            values: list[torch.Tensor] = []
            for name in self.outputs:
                value = result.get(name)
                if type(value) is not torch.Tensor:
                    break
                values.append(value)
            else:
                return values
        named = named_outputs(result)
        if named.keys() != self.outputs.keys():
            raise CellError(f"cell {self.name!r}: expected outputs {list(self.outputs)}, got {list(named)}")
        return [named[name] for name in self.outputs]


def call(module: Callable[..., Any], names: Iterable[str], inputs: Sequence[CellInput], by_name: bool) -> object:
    """Call a module on inputs in order."""
    return module(**dict(zip(names, inputs, strict=True))) if by_name else module(*inputs)


def takes_order(module: Callable[..., Any], names: list[str]) -> bool:
    """Return whether inputs that go by name may go in order, which saves half a microsecond a step.

    It is so for a plain function of which these are the first parameters, and for a module with such a ``forward`` and
    no hooks.
    """
    function, first = module, 0
    if isinstance(module, nn.Module):
        if type(module).__call__ is not nn.Module.__call__ or any(vars(module)[hooks] for hooks in HOOKS):
            return False
        function, first = getattr(module.forward, "__func__", module), 1
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__") or hasattr(function, "__signature__"):
        return False
    return function.__code__.co_varnames[first : function.__code__.co_argcount][: len(names)] == tuple(names)


def _following(
    inputs: Iterable[str], output_index: Mapping[str, int], carry: Mapping[str, str]
) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """Return a function that picks the inputs of a step, in order.

    It takes the inputs that are not carried, followed by the outputs of the step before.
    """
    others = [name for name in inputs if name not in carry]
    picked = [len(others) + output_index[carry[name]] if name in carry else others.index(name) for name in inputs]
    return itemgetter(*picked) if len(picked) > 1 else itemgetter(slice(picked[0], picked[0] + 1))


def named_outputs(result: object) -> dict[str, torch.Tensor]:
    """Return outputs by name: a NamedTuple's fields, a dict's keys, "output" or "output0".. for a plain tuple.

    Raise CellError if the result is something else. A single tensor is "output".
    """
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        named = dict(result)
    elif isinstance(result, tuple | list):
        names = getattr(result, "_fields", None) or [f"output{k}" for k in range(len(result))]
        named = dict(zip(names, result, strict=True))
    else:
        raise CellError(f"a cell must return tensors, got {type(result).__name__}")
    if not named or not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise CellError(f"a cell must return tensors, got { ({k: type(v).__name__ for k, v in named.items()}) }")
    return named


def cut(outputs: list[torch.Tensor], padded: int, rows: int) -> list[torch.Tensor]:
    """Return the first ``rows`` of outputs of ``padded`` rows; a wrong output stays as it is."""
    return [output[:rows] if output.shape[:1] == (padded,) else output for output in outputs]


def count_rows(value: CellInput) -> int:
    """Return the number of rows (of a ragged input: of nodes)."""
    if isinstance(value, PagedRows | Spans):
        return value.positions.shape[0]
    return value.offsets.shape[0] - 1 if isinstance(value, RaggedRows) else value.shape[0]


def steps_of(module: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a module's method ``steps``, if it has one and that computes what the module does.

    It is not asked where a subclass changes a method of the class that has it, such as ``forward``, where an object has
    a ``forward`` of its own, or hooks.
    """
    found = getattr(module, "steps", None)
    if not callable(found) or isinstance(found, nn.Module):
        return None
    method: Callable[..., Any] = found
    if "steps" in vars(module) or not isinstance(module, nn.Module):
        return method
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    for kind in type(module).__mro__:
        if "steps" in vars(kind):
            return method
        if any(callable(value) and _is_changed_by(kind, name) for name, value in vars(kind).items()):
            return None
    return method


def _is_changed_by(kind: type, name: str) -> bool:
    """Return whether a class has its own of what the classes above it have, beside what makes and shows an object."""
    if name.startswith("__") and name != "__call__":
        return False
    return name != "extra_repr" and any(name in vars(base) for base in kind.__mro__[1:])


def _with_zeros(value: CellInput, count: int) -> CellInput:
    """Return an input with this many more rows of zeros; of a ragged input, nodes without rows."""
    if isinstance(value, RaggedRows):
        return RaggedRows(value.values, torch.cat([value.offsets, value.offsets[-1:].expand(count)]))
    if isinstance(value, PagedRows | Spans):
        raise TypeError("a cell with spans has no batch sizes")
    return torch.cat([value, value.new_zeros((count, *value.shape[1:]))])


def _by_step(value: CellInput, sizes: list[int]) -> Sequence[CellInput]:
    """Return the rows of each step of an input that is packed by step."""
    if isinstance(value, PagedRows | Spans):
        raise TypeError("a cell with spans has no runs")
    if not isinstance(value, RaggedRows):
        rows = sum(sizes)
        return torch.split_with_sizes(value if len(value) == rows else value[:rows], sizes)
    made: list[CellInput] = []
    for first, end in pairwise(accumulate(sizes, initial=0)):
        offsets = value.offsets[first : end + 1]
        made.append(RaggedRows(value.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]))
    return made


def _other_rows(rows: int, spec: RowSpec, value: torch.Tensor) -> str:
    """Say which rows were expected of a cell and which came, and what may be wrong."""
    expected = RowSpec((rows, *spec.shape), spec.dtype)
    told = f"expected {expected} ({rows} row{'' if rows == 1 else 's'} of {spec}), got {describe(value)}"
    if tuple(value.shape) == spec.shape:
        told += "; the rows' dimension is missing: squeeze() takes it out where there is one row, squeeze(-1) leaves it"
    return told + conversion(spec.dtype, value.dtype)
