"""A cell: a batched computation with its weights inside.

A cell's type is its definition, its weights and the shapes of its rows (BatchMaker section 2.4.2): two models that
build the same cell from the same weights batch together, and a changed weight makes another type (see
``identity.py``). The weights are copied when the cell is made, so later training does not reach it (``freeze.py``).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cellrt.definition.host_kernel import HostKernel, find_kernel
from cellrt.definition.identity import identity_of
from cellrt.definition.snapshot import freeze
from cellrt.definition.spec import RaggedRows, RowSpec, as_spec, check_dtype, describe
from cellrt.errors import CellError, DefinitionError

if TYPE_CHECKING:
    from cellrt.graph.graph import Graph
    from cellrt.graph.symbols import Node

CURRENT_GRAPH: ContextVar[Graph] = ContextVar("cellrt_current_graph")
"""The graph that the unfolder running in this thread or task is building."""

CellInput = torch.Tensor | RaggedRows

DEFAULT_MAX_BATCH = 512
LARGEST_BATCH = 65_536
INSTEAD: Mapping[type, str] = MappingProxyType(
    {
        nn.LSTMCell: "torch's LSTMCell takes its state as one tuple: use cellrt.cells.LSTMCell.from_torch(...), which "
        "has inputs x, h and c",
        nn.RNNBase: "torch's module takes whole sequences, a cell one step: use cellrt.unfolders.chain(name, module) "
        "for an nn.LSTM or nn.GRU",
    }
)
"""What to use instead of modules of torch that are no cells."""
RESERVED_INPUTS = frozenset({"keep", "max_steps", "reverse", "until"})
"""Input names that the graph's builders use themselves."""


class Cell:
    """A cell, as made by ``cellrt.cell`` or ``cellrt.load_cell``. Calling it in an unfolder adds a node to the graph.

    Attributes:
        name: for errors, pictures and statistics.
        module: the frozen module or function.
        inputs, outputs: row specs by name, in the order the module takes and returns them.
        places: of the outputs in that order, by name.
        carry: which output an input is carried from, from step to step of a chain or loop.
        identity: hex digest; equal identity = same cell type.
        max_batch, min_batch, batch_sizes, priority, finite: as given to ``cellrt.cell``.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        name: str,
        inputs: Mapping[str, RowSpec],
        outputs: Mapping[str, RowSpec],
        by_name: bool,
        carry: Mapping[str, str],
        finite: Sequence[str],
        max_batch: int,
        min_batch: int,
        batch_sizes: Sequence[int],
        priority: int | None,
        identity: str,
    ) -> None:
        self.name, self.module, self.identity = name, module, identity
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self.places = {name: place for place, name in enumerate(self.outputs)}
        self.carry, self.finite = dict(carry), tuple(finite)
        self.max_batch, self.min_batch, self.batch_sizes = max_batch, min_batch, tuple(batch_sizes)
        self.priority = priority
        self.by_name = by_name
        self._steps = _steps_of(module)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {spec}" for name, spec in self.inputs.items())
        outputs = ", ".join(f"{name}: {spec}" for name, spec in self.outputs.items())
        return f"Cell({self.name!r}, ({inputs}) -> ({outputs}), {self.identity[:8]})"

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which find their own kernel: this one's words are addresses."""
        return {name: value for name, value in vars(self).items() if name != "host_kernel"}

    def __call__(self, /, **inputs: object) -> Node:
        """Adds a node to the graph that is being unfolded: see ``Graph.call``."""
        graph = CURRENT_GRAPH.get(None)
        if graph is None:
            raise DefinitionError(f"cell {self.name!r} was called outside an unfolder; use cell.run(...) for tensors")
        return graph.call(self, **inputs)

    @cached_property
    def host_kernel(self) -> HostKernel | None:
        """What runs the cell on a CPU without Python, if its module has such a form: see ``host_kernel.py``."""
        if self.batch_sizes or not self.by_name:
            return None
        return find_kernel(self.module, self.inputs, self.outputs, self.carry)

    @property
    def has_steps(self) -> bool:
        """Whether the cell has a steps-first form for runs."""
        return self._steps is not None

    def run(self, *inputs: CellInput) -> list[torch.Tensor]:
        """Runs one step: takes inputs ``[rows, *shape]`` and returns outputs ``[rows, *shape]``, both in order."""
        return self._in_order(_call(self.module, self.inputs, inputs, self.by_name))

    def run_steps(self, batch_sizes: list[int], *inputs: CellInput) -> list[torch.Tensor]:
        """Runs ``len(batch_sizes)`` successive steps; step s has the first ``batch_sizes[s]`` rows (never growing).

        Carried inputs are ``[batch_sizes[0], *shape]``, the others and all outputs are packed by step,
        ``[sum(batch_sizes), *shape]``. Uses the module's ``steps`` if it has one, else its plain form step by step.
        """
        if self._steps is not None:
            return self._in_order(self._steps(batch_sizes, **dict(zip(self.inputs, inputs, strict=True))))
        names, output_names = list(self.inputs), list(self.outputs)
        sources = [output_names.index(self.carry[name]) if name in self.carry else -1 for name in names]
        current = list(inputs)
        collected: list[list[torch.Tensor]] = [[] for _ in output_names]
        first = 0
        for step, size in enumerate(batch_sizes):
            for k, source in enumerate(sources):
                if source < 0:
                    current[k] = _take_rows(inputs[k], first, first + size)
                elif step > 0:
                    current[k] = collected[source][-1][:size]
            for outputs, value in zip(collected, self.run(*current), strict=True):
                outputs.append(value)
            first += size
        return [torch.cat(values) for values in collected]

    def example_inputs(self, rows: int, device: str = "cpu") -> list[CellInput]:
        """Zero inputs of ``rows`` rows; a ragged input has two rows a node."""
        return _zero_inputs(self.inputs.values(), rows, device)

    def check_outputs(self, outputs: Sequence[torch.Tensor], rows: int) -> None:
        """Raises CellError if the cell returned other shapes or dtypes than it declared."""
        for (name, spec), value in zip(self.outputs.items(), outputs, strict=True):
            if tuple(value.shape) != (rows, *spec.shape) or value.dtype != spec.dtype:
                raise CellError(
                    f"cell {self.name!r}, output {name!r}: expected {rows} rows of {spec}, got {describe(value)}"
                )

    def check_row_wise(self) -> list[str]:
        """Runs the cell on a few random rows together and one by one; returns the outputs that differ, with a warning.

        ``Engine.register`` does so for each new cell. See ``row_wise.py`` for what is tried and when they differ.
        """
        from cellrt.definition.row_wise import warn_unless_row_wise

        return warn_unless_row_wise(self, depth=2)

    def save(self, folder: str | Path) -> None:
        """Writes the cell as files, so that a process without its Python class can serve it: see ``cell_file.py``."""
        from cellrt.definition.file import save_cell

        save_cell(self, folder)

    def _in_order(self, result: object) -> list[torch.Tensor]:
        """The outputs in the declared order. Raises CellError if they are others than declared."""
        named = named_outputs(result)
        if named.keys() != self.outputs.keys():
            raise CellError(f"cell {self.name!r}: expected outputs {list(self.outputs)}, got {list(named)}")
        return [named[name] for name in self.outputs]


def cell(
    module: Callable[..., Any],
    inputs: Mapping[str, object],
    *,
    name: str | None = None,
    max_batch: int | None = None,
    min_batch: int = 1,
    batch_sizes: Sequence[int] | None = None,
    priority: int | None = None,
    carry: Mapping[str, str] | None = None,
    finite: Sequence[str] = (),
) -> Cell:
    """Makes a cell of a torch module or function.

    Args:
        module: takes tensors ``[rows, *shape]`` and returns one tensor (named "output"), a NamedTuple, a dict or a
            plain tuple (named "output0", ...) of tensors, row dimension first. Inputs are passed by name if its
            parameters have those names, else in order. It must be row-wise: a row's outputs depend on that row alone.
            If it has a method ``steps`` (see ``Cell.run_steps``), runs of several steps use it; with a method
            ``host_kernel`` a CPU runs it without Python (see ``host_kernel.py``). Its weights are copied, a function's
            too (from its closure, defaults and globals).
        inputs: shape (float32) or ``cellrt.rows`` / ``cellrt.ragged`` spec of each input, without the row dimension.
        name: default: the class or function's name.
        max_batch: most rows of a task; default the largest of ``batch_sizes``, or 512.
        min_batch: fewest rows of a further task while others of the same type are submitted.
        batch_sizes: the supported numbers of rows; a task is padded to the next. Default: any up to ``max_batch``.
        priority: higher goes first. Default: from the type graph of the example request, later cells first.
        carry: which output each state input is carried from in chains and loops. Default: the output of its name.
        finite: outputs that must never be NaN or infinite; a request that makes one so fails.

    Raises DefinitionError.
    """
    name = name or str(getattr(module, "__name__", type(module).__name__))
    if not callable(module) or isinstance(module, type):
        raise DefinitionError(f"cell {name!r}: expected a torch module or a function, got {_kind_of(module)}")
    specs = _check_inputs(name, inputs)
    sizes, max_batch = _check_sizes(name, max_batch, min_batch, batch_sizes)
    if priority is not None and not isinstance(priority, int):
        raise DefinitionError(f"cell {name!r}: expected an integer as priority, got {priority!r}")
    by_name = _takes_names(module, specs)
    frozen = freeze(name, module)
    outputs = _infer_outputs(name, frozen, specs, by_name, _trial_rows(sizes, max_batch))
    carried = _check_carry(name, specs, outputs, carry)
    finite = (finite,) if isinstance(finite, str) else tuple(finite)
    for output in finite:
        if output not in outputs or not outputs[output].dtype.is_floating_point:
            described = {key: str(spec) for key, spec in outputs.items()}
            raise DefinitionError(
                f"cell {name!r}: finite={output!r} is not a floating-point output; outputs are {described}"
            )
    description = [{key: str(spec) for key, spec in specs.items()}, carried, finite, max_batch, sizes]
    made = Cell(
        frozen,
        name=name,
        inputs=specs,
        outputs=outputs,
        by_name=by_name,
        carry=carried,
        finite=finite,
        max_batch=max_batch,
        min_batch=min_batch,
        batch_sizes=sizes,
        priority=priority,
        identity=identity_of(frozen, description),
    )
    if made.has_steps:
        _check_steps(made)
    return made


def named_outputs(result: object) -> dict[str, torch.Tensor]:
    """Outputs by name: a NamedTuple's fields, a dict's keys, "output" for one tensor, "output0".. for a plain tuple.

    Raises CellError if it is something else.
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


def _call(
    module: Callable[..., Any], names: Mapping[str, object], inputs: Sequence[CellInput], by_name: bool
) -> object:
    return module(**dict(zip(names, inputs, strict=True))) if by_name else module(*inputs)


def _zero_inputs(specs: Any, rows: int, device: str) -> list[CellInput]:
    inputs: list[CellInput] = []
    for spec in specs:
        count = 2 * rows if spec.ragged else rows
        values = torch.zeros((count, *spec.shape), dtype=spec.dtype, device=device)
        inputs.append(RaggedRows(values, torch.arange(0, count + 1, 2, device=device)) if spec.ragged else values)
    return inputs


def _take_rows(value: CellInput, first: int, end: int) -> CellInput:
    if isinstance(value, RaggedRows):
        offsets = value.offsets[first : end + 1]
        return RaggedRows(value.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
    return value[first:end]


def _steps_of(module: Callable[..., Any]) -> Callable[..., Any] | None:
    steps = getattr(module, "steps", None)
    return steps if callable(steps) and not isinstance(steps, nn.Module) else None


def _takes_names(module: Callable[..., Any], names: Mapping[str, object]) -> bool:
    """Whether the callable has a parameter of each of these names that may be given by keyword."""
    function = module.forward if isinstance(module, nn.Module) else module
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return all(name in parameters and parameters[name].kind in kinds for name in names)


def _check_inputs(name: str, inputs: object) -> dict[str, RowSpec]:
    if not isinstance(inputs, Mapping):
        raise DefinitionError(f"cell {name!r}: expected inputs as a dict of shapes or specs, got {_kind_of(inputs)}")
    if not inputs:
        raise DefinitionError(f"cell {name!r} has no inputs: its number of rows would be unknown")
    for key in inputs:
        if not isinstance(key, str) or not key.isidentifier() or key in RESERVED_INPUTS:
            raise DefinitionError(f"cell {name!r}: {key!r} cannot be the name of an input")
    try:
        return {key: as_spec(key, value) for key, value in inputs.items()}
    except DefinitionError as error:
        raise DefinitionError(f"cell {name!r}, {error}") from None


def _check_sizes(
    name: str, max_batch: int | None, min_batch: int, batch_sizes: Sequence[int] | None
) -> tuple[tuple[int, ...], int]:
    """The supported sizes in order, and the most rows of a task: the largest of them if there are any."""
    sizes = tuple(sorted(set(batch_sizes or ())))
    if sizes and max_batch not in (None, sizes[-1]):
        raise DefinitionError(
            f"cell {name!r}: max_batch={max_batch} is not the largest of batch_sizes={list(sizes)}; leave it out"
        )
    largest = sizes[-1] if sizes else DEFAULT_MAX_BATCH if max_batch is None else max_batch
    for value in (*sizes, largest, min_batch):
        if not isinstance(value, int) or not 1 <= value <= LARGEST_BATCH:
            raise DefinitionError(f"cell {name!r}: expected batch sizes from 1 to {LARGEST_BATCH}, got {value!r}")
    if min_batch > largest:
        raise DefinitionError(
            f"cell {name!r}: min_batch={min_batch} is more than the {largest} rows that a task has at most"
        )
    return sizes, largest


def _trial_rows(sizes: Sequence[int], max_batch: int) -> list[int]:
    """Two numbers of rows that the cell takes, where there are two."""
    return sorted({sizes[0], sizes[-1]} if sizes else {min(2, max_batch), min(3, max_batch)})


def _infer_outputs(
    name: str, module: Callable[..., Any], specs: Mapping[str, RowSpec], by_name: bool, trial_rows: Sequence[int]
) -> dict[str, RowSpec]:
    """Runs the cell on meta tensors; where it cannot run there, on zeros."""
    found: dict[str, RowSpec] = {}
    for rows in trial_rows:
        try:
            meta = copy.deepcopy(module).to("meta") if isinstance(module, nn.Module) else module
            before = _versions(meta)
            with torch.inference_mode():
                named = named_outputs(_call(meta, specs, _zero_inputs(specs.values(), rows, "meta"), by_name))
            after = _versions(meta)
        except Exception:
            before = _versions(module)
            named = _run_on_zeros(name, module, specs, by_name, rows)
            after = _versions(module)
        if before != after:
            written = sorted(key for key in before if before[key] != after.get(key))
            raise DefinitionError(
                f"cell {name!r}: writes to its own {written}; a cell has no state of its own: use carry"
            )
        for output, value in named.items():
            if not isinstance(output, str) or not output.isidentifier() or output.startswith("_") or output == "last":
                raise DefinitionError(f"cell {name!r}: {output!r} cannot be the name of an output")
            if value.dim() == 0 or value.shape[0] != rows:
                raise DefinitionError(
                    f"cell {name!r}, output {output!r}: expected the row dimension first ({rows} rows in the trial "
                    f"run), got {describe(value)}"
                )
            check_dtype(f"cell {name!r}, output {output!r}", value.dtype)
            if value.layout is not torch.strided:
                raise DefinitionError(
                    f"cell {name!r}, output {output!r}: expected a dense tensor, got one of {value.layout}"
                )
        outputs = {output: RowSpec(tuple(value.shape[1:]), value.dtype) for output, value in named.items()}
        if found and outputs != found:
            raise DefinitionError(f"cell {name!r}: its outputs depend on the number of rows: {found} or {outputs}")
        found = outputs
    return found


def _versions(module: Callable[..., Any]) -> dict[str, tuple[int, int]]:
    """Which tensors a module has and how often each was written."""
    if not isinstance(module, nn.Module):
        return {}
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {key: (id(value), 0 if value.is_inference() else value._version) for key, value in tensors}


def _run_on_zeros(
    name: str, module: Callable[..., Any], specs: Mapping[str, RowSpec], by_name: bool, rows: int
) -> dict[str, torch.Tensor]:
    try:
        with torch.inference_mode():
            return named_outputs(_call(module, specs, _zero_inputs(specs.values(), rows, "cpu"), by_name))
    except Exception as error:
        described = ", ".join(f"{key}: {spec}" for key, spec in specs.items())
        hint = next((f"; {text}" for kind, text in INSTEAD.items() if isinstance(module, kind)), "")
        raise DefinitionError(f"cell {name!r} does not run on {rows} rows of ({described}): {error}{hint}") from error


def _check_carry(
    name: str, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec], given: Mapping[str, str] | None
) -> dict[str, str]:
    """By default an input is carried from the output of the same name and spec."""
    if given is None:
        return {key: key for key, spec in inputs.items() if outputs.get(key) == spec}
    for key, output in given.items():
        if key not in inputs or output not in outputs:
            raise DefinitionError(
                f"cell {name!r}: carry {key!r} from {output!r}: inputs are {list(inputs)}, outputs are {list(outputs)}"
            )
        if inputs[key] != outputs[output]:
            raise DefinitionError(
                f"cell {name!r}: carry {key!r} from {output!r}: expected {inputs[key]}, got {outputs[output]}"
            )
    return {key: given[key] for key in inputs if key in given}


def _check_steps(made: Cell) -> None:
    """Runs the steps-first form once on zeros, two rows and then one (one row twice for a cell of one row)."""
    batch_sizes = [min(2, made.max_batch), 1]
    inputs = [
        _zero_inputs([spec], batch_sizes[0] if key in made.carry else sum(batch_sizes), "cpu")[0]
        for key, spec in made.inputs.items()
    ]
    try:
        with torch.inference_mode():
            made.check_outputs(made.run_steps(batch_sizes, *inputs), sum(batch_sizes))
    except Exception as error:
        raise DefinitionError(f"cell {made.name!r}: its method steps does not run on zeros: {error}") from error


def _kind_of(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
