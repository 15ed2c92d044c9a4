"""A cell: a batched computation with its weights inside, and its identity.

A cell's type is its definition, its weights and the shapes of its inputs (BatchMaker section 2.4.2): two models that
build the same cell from the same weights batch together, and a changed weight makes another type. The weights are copied
when the cell is made, so that later training steps do not reach it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cellrt.errors import CellError, DefinitionError
from cellrt.spec import RaggedRows, RowSpec, as_spec

if TYPE_CHECKING:
    from cellrt.graph import Graph, Node

CURRENT_GRAPH: ContextVar[Graph] = ContextVar("cellrt_current_graph")
"""The graph that the unfolder running in this thread or task is building."""

CellInput = torch.Tensor | RaggedRows


class Cell:
    """A cell, as made by ``cellrt.cell``. Calling it inside an unfolder adds a node to the graph.

    Attributes:
        name: for errors, pictures and statistics.
        inputs, outputs: row specs by name, in the order the module takes and returns them.
        carry: which output an input is carried from, from step to step of a chain or loop.
        identity: hex digest; equal identity = same cell type.
        max_batch, min_batch, batch_sizes, priority, finite: as given to ``cellrt.cell``.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        inputs: Mapping[str, RowSpec],
        *,
        name: str,
        max_batch: int,
        min_batch: int,
        batch_sizes: tuple[int, ...],
        priority: int | None,
        carry: Mapping[str, str] | None,
        finite: Sequence[str],
    ) -> None:
        self.name = name
        self.inputs = dict(inputs)
        self.max_batch, self.min_batch, self.batch_sizes = max_batch, min_batch, batch_sizes
        self.priority = priority
        self.module = _freeze(module)
        self._by_name = _takes_names(module, self.inputs)
        self._steps: Callable[..., Any] | None = getattr(self.module, "steps", None)
        self.outputs = self._infer_outputs()
        self.carry = self._check_carry(carry)
        self.finite = tuple(finite)
        for output in self.finite:
            if output not in self.outputs:
                raise DefinitionError(f"cell {name!r}: finite={output!r} is not an output; outputs are {list(self.outputs)}")
        self.identity = _identity(self.module, self)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {spec}" for name, spec in self.inputs.items())
        outputs = ", ".join(f"{name}: {spec}" for name, spec in self.outputs.items())
        return f"Cell({self.name!r}, ({inputs}) -> ({outputs}), {self.identity[:8]})"

    def __call__(self, **inputs: object) -> Node:
        """Adds a node to the graph that is being unfolded: see ``Graph.call``."""
        graph = CURRENT_GRAPH.get(None)
        if graph is None:
            raise DefinitionError(f"cell {self.name!r} was called outside an unfolder; use cell.run(...) for tensors")
        return graph.call(self, **inputs)

    @property
    def has_steps(self) -> bool:
        """Whether the cell has a steps-first form for runs."""
        return self._steps is not None

    def run(self, *inputs: CellInput) -> list[torch.Tensor]:
        """Runs one step on rows: inputs ``[rows, *shape]`` in order; returns the outputs ``[rows, *shape]`` in order."""
        result = self.module(**dict(zip(self.inputs, inputs, strict=True))) if self._by_name else self.module(*inputs)
        return list(_named_outputs(result).values())

    def run_steps(self, batch_sizes: list[int], *inputs: CellInput) -> list[torch.Tensor]:
        """Runs ``len(batch_sizes)`` successive steps; step s has the first ``batch_sizes[s]`` rows (never growing).

        Carried inputs are ``[batch_sizes[0], *shape]``, the others and all outputs are packed by step,
        ``[sum(batch_sizes), *shape]``. Uses the module's ``steps`` if it has one, else its plain form step by step.
        """
        if self._steps is not None:
            result = self._steps(batch_sizes, **dict(zip(self.inputs, inputs, strict=True)))
            return list(_named_outputs(result).values())
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
        """Zero inputs of ``rows`` rows; a ragged input has one row a node."""
        inputs: list[CellInput] = []
        for spec in self.inputs.values():
            values = torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device)
            inputs.append(RaggedRows(values, torch.arange(rows + 1, device=device)) if spec.ragged else values)
        return inputs

    def check_outputs(self, outputs: Sequence[torch.Tensor], rows: int) -> None:
        """Raises CellError if the cell returned other shapes or dtypes than it declared."""
        for (name, spec), value in zip(self.outputs.items(), outputs, strict=True):
            if tuple(value.shape) != (rows, *spec.shape) or value.dtype != spec.dtype:
                got = RowSpec(tuple(value.shape[1:]), value.dtype)
                raise CellError(
                    f"cell {self.name!r}, output {name!r}: expected {rows} rows of {spec}, got {len(value)} of {got}"
                )

    def save(self, folder: str) -> None:
        """Writes the cell as files, so that a process without its Python class can serve it: see ``cell_file.py``."""
        from cellrt.cell_file import save_cell

        save_cell(self, folder)

    def _infer_outputs(self) -> dict[str, RowSpec]:
        """Runs the cell once on meta tensors; where it cannot run there, on zeros."""
        rows = 3
        try:
            meta = copy.deepcopy(self.module).to("meta") if isinstance(self.module, nn.Module) else self.module
            with torch.inference_mode():
                named = _named_outputs(self._call(meta, self.example_inputs(rows, "meta")))
        except Exception:
            named = self._run_on_zeros(rows)
        for output, value in named.items():
            if value.dim() == 0 or value.shape[0] != rows:
                raise DefinitionError(
                    f"cell {self.name!r}, output {output!r}: expected the row dimension first ({rows} rows in the "
                    f"trial run), got shape {tuple(value.shape)}"
                )
        return {output: RowSpec(tuple(value.shape[1:]), value.dtype) for output, value in named.items()}

    def _run_on_zeros(self, rows: int) -> dict[str, torch.Tensor]:
        try:
            with torch.inference_mode():
                return _named_outputs(self._call(self.module, self.example_inputs(rows)))
        except DefinitionError:
            raise
        except Exception as error:
            specs = ", ".join(f"{name}: {spec}" for name, spec in self.inputs.items())
            raise DefinitionError(f"cell {self.name!r} does not run on {rows} rows of ({specs}): {error}") from error

    def _call(self, module: Callable[..., Any], inputs: Sequence[CellInput]) -> object:
        return module(**dict(zip(self.inputs, inputs, strict=True))) if self._by_name else module(*inputs)

    def _check_carry(self, given: Mapping[str, str] | None) -> dict[str, str]:
        """By default an input is carried from the output of the same name and spec."""
        if given is None:
            return {name: name for name, spec in self.inputs.items() if self.outputs.get(name) == spec}
        for name, output in given.items():
            if name not in self.inputs or output not in self.outputs:
                raise DefinitionError(
                    f"cell {self.name!r}: carry {name!r} from {output!r}: inputs are {list(self.inputs)}, "
                    f"outputs are {list(self.outputs)}"
                )
            if self.inputs[name] != self.outputs[output]:
                raise DefinitionError(
                    f"cell {self.name!r}: carry {name!r} from {output!r}: expected {self.inputs[name]}, "
                    f"got {self.outputs[output]}"
                )
        return dict(given)


def cell(
    module: Callable[..., Any],
    inputs: Mapping[str, object],
    *,
    name: str | None = None,
    max_batch: int = 512,
    min_batch: int = 1,
    batch_sizes: Sequence[int] | None = None,
    priority: int | None = None,
    carry: Mapping[str, str] | None = None,
    finite: Sequence[str] = (),
) -> Cell:
    """Makes a cell of a torch module or function.

    Args:
        module: takes tensors ``[rows, *shape]`` and returns one tensor, a NamedTuple or a dict of tensors, row
            dimension first. Inputs are passed by name if its parameters have those names, else in order. It must
            be row-wise: a row's outputs depend on that row alone. If it has a method ``steps`` (see
            ``Cell.run_steps``), runs of several steps use it. A module's weights are copied.
        inputs: shape (float32) or ``cellrt.rows`` / ``cellrt.ragged`` spec of each input, without the row dimension.
        name: default: the class or function's name.
        max_batch: most rows of a task.
        min_batch: fewest rows of a further task while others of the same type are submitted.
        batch_sizes: the supported numbers of rows; a task is padded to the next. Default: any up to ``max_batch``.
        priority: higher goes first. Default: from the type graph of the example request, later cells first.
        carry: which output each state input is carried from in chains and loops. Default: the output of its name.
        finite: outputs that must never be NaN or infinite; a request that makes one so fails.

    Raises DefinitionError.
    """
    name = name or getattr(module, "__name__", type(module).__name__)
    if not callable(module):
        raise DefinitionError(f"cell {name!r}: expected a torch module or a function, got {type(module).__name__}")
    if not inputs:
        raise DefinitionError(f"cell {name!r} has no inputs: its number of rows would be unknown")
    sizes = tuple(sorted(set(batch_sizes))) if batch_sizes else ()
    if sizes and (sizes[0] < 1 or sizes[-1] < max_batch):
        max_batch = sizes[-1]
    if not 1 <= min_batch <= max_batch <= 65_536:
        raise DefinitionError(f"cell {name!r}: expected 1 <= min_batch <= max_batch <= 65536, got {min_batch} and {max_batch}")
    specs = {key: as_spec(key, value) for key, value in inputs.items()}
    return Cell(
        module,
        specs,
        name=name,
        max_batch=max_batch,
        min_batch=min_batch,
        batch_sizes=sizes,
        priority=priority,
        carry=carry,
        finite=finite,
    )


def _freeze(module: Callable[..., Any]) -> Callable[..., Any]:
    """A private copy of a module in evaluation mode, its weights without gradients."""
    if not isinstance(module, nn.Module):
        return module
    frozen = copy.deepcopy(module).eval()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    return frozen


def _takes_names(module: Callable[..., Any], names: Mapping[str, object]) -> bool:
    """Whether the callable has a parameter of each of these names that may be given by keyword."""
    function = module.forward if isinstance(module, nn.Module) else module
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return all(name in parameters and parameters[name].kind in kinds for name in names)


def _named_outputs(result: object) -> dict[str, torch.Tensor]:
    """Outputs by name: a NamedTuple's fields, a dict's keys, "output" for one tensor, "output0".. for a plain tuple."""
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        named = dict(result)
    elif isinstance(result, tuple | list):
        names = getattr(result, "_fields", None) or [f"output{k}" for k in range(len(result))]
        named = dict(zip(names, result, strict=True))
    else:
        raise DefinitionError(f"a cell must return tensors, got {type(result).__name__}")
    if not named or not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise DefinitionError(f"a cell must return tensors, got {({k: type(v).__name__ for k, v in named.items()})}")
    return named


def _take_rows(value: CellInput, first: int, end: int) -> CellInput:
    if isinstance(value, RaggedRows):
        offsets = value.offsets[first : end + 1]
        return RaggedRows(value.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
    return value[first:end]


def _identity(module: Callable[..., Any], made: Cell) -> str:
    digest = hashlib.sha256()
    digest.update(repr([(name, str(spec)) for name, spec in made.inputs.items()]).encode())
    digest.update(repr((made.carry, made.finite, made.max_batch, made.batch_sizes)).encode())
    _digest_callable(module, digest)
    return digest.hexdigest()


def _digest_callable(module: Callable[..., Any], digest: Any) -> None:
    """Digests a definition with its weights; what cannot be compared by value counts as different."""
    if isinstance(module, nn.Module):
        for prefix, part in module.named_modules():
            digest.update(f"{prefix}:{type(part).__module__}.{type(part).__qualname__}".encode())
            digest.update(_source(type(part)))
            plain = {k: v for k, v in vars(part).items() if not k.startswith("_") and k != "training"}
            for key, value in sorted(plain.items()):
                digest.update(key.encode())
                _digest_value(value, digest)
        for key, tensor in module.state_dict().items():
            digest.update(key.encode())
            _digest_value(tensor, digest)
        return
    code = getattr(module, "__code__", None)
    if code is None:
        digest.update(f"{getattr(module, '__module__', '')}.{getattr(module, '__qualname__', id(module))}".encode())
        return
    digest.update(code.co_code + repr((code.co_consts, code.co_names, module.__module__)).encode())
    for closure in module.__closure__ or ():
        _digest_value(closure.cell_contents, digest)
    _digest_value(module.__defaults__, digest)


def _source(kind: type) -> bytes:
    try:
        return inspect.getsource(kind).encode()
    except (OSError, TypeError):
        return b""


def _digest_value(value: object, digest: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, nn.Module):
        _digest_callable(value, digest)
    else:
        try:
            digest.update(pickle.dumps(value))
        except Exception:
            digest.update(str(id(value)).encode())
