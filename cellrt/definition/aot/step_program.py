"""A cell's step as a program to compile. Its arguments are the weights, the inputs, and memory for the outputs.

As the weights are arguments, cells that differ in them alone have the same program and the same library: thirty layers
or ten fine-tunes have one digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as symbolic_config
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from cellrt.definition.aot.indices import check_indices, instead_of, is_unchecked, may_divide_by_zero
from cellrt.definition.aot.own_lines import Line, RowsWatch, line_of_error, line_of_node, note_lines_of
from cellrt.definition.aot.packed_products import pack_products, tied_weights
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.bits import DTYPES
from cellrt.definition.computation import Computation
from cellrt.definition.exported import EXAMPLE_ROWS, Exportable, example_of
from cellrt.definition.modes import workers_modes
from cellrt.definition.snapshot import OF_EVERY_MODULE, FunctionSnapshot, weights_of
from cellrt.definition.traced_pages import PagesAreReadError, is_own, tracing

OWN_NAMESPACES = ("aten", "prims", "prim")
TO_REAL = ("_fft_c2r", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn", "istft")
WITHOUT_C_INTERFACE = frozenset((*TO_REAL, "fft_fftfreq", "fft_rfftfreq"))
"""Operators of torch that the compiler would refuse after many seconds, as they have no C interface.

Not all of them.
"""
PLAIN = (bool, int, float, str, type(None), tuple, list, dict, set)
ROWS_IN_TORCH = re.compile(r"L\['inputs'\]\[\d+\]\.size\(\)\[0\]")
"""The number of rows of an input in torch's messages."""
MAYBE_VIEWS = frozenset(("contiguous", "flatten", "reshape", "reshape_as", "ravel", "to", "type_as", "where"))
"""Operators that may return one of their arguments, though their schema does not say so."""


class StepProgram(NamedTuple):
    """A program to compile.

    Attributes:
        program: takes the weights, the inputs (of a ragged one values and offsets) and, as the last, memory for each
            output, which it writes; returns the first of these.
        weights: the cell's weights in the order in which it takes them: all once, then the tied ones again.
        num_outputs: the number of outputs.
        least_rows: 1, or 2 if torch makes the code special for a single row.
        has_equal_values: whether all ragged inputs must have the same number of values.
        tied: the numbers of weights that products and other operators take.
        packed: the weights that it takes packed, by number, and whether transposed (see ``packed_products.py``).
    """

    program: ExportedProgram
    weights: tuple[torch.Tensor, ...]
    num_outputs: int
    least_rows: int
    has_equal_values: bool
    tied: list[int]
    packed: dict[int, bool]

    def facts(self) -> dict[str, Any]:
        """Return the facts that a form needs besides the cell."""
        packed = sorted(self.packed.items())
        sizes = {"least_rows": self.least_rows, "has_equal_values": self.has_equal_values}
        return {**sizes, "tied": self.tied, "packed": packed}

    def digest(self) -> str:
        """Return a digest of all that the compiled code depends on: operations, shapes, strides, dtypes, ranges,
        constants.
        """
        digest = hashlib.sha256()
        for node in self.program.graph.nodes:
            digest.update(f"{node.format_node()} {_described(node.meta.get('val'))}\n".encode())
        digest.update(str(self.program.range_constraints).encode())
        for name, value in sorted(self.program.constants.items()):
            digest.update(name.encode() + (_bytes_of(value) if isinstance(value, torch.Tensor) else b"?"))
        return digest.hexdigest()


class _WritingStep(nn.Module):
    """A cell's step that writes its outputs to given memory. It does not own the weights.

    ``rows`` records torch's decisions on their number.
    """

    def __init__(self, cell: Computation, module: object, step: nn.Module) -> None:
        super().__init__()
        self._cell, self._module, self._step = cell, (module,), (step,)
        self.rows = RowsWatch()

    def forward(
        self, weights: list[torch.Tensor], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> torch.Tensor:
        """Run the step. Raise NotCompiledError if an output is not as declared."""
        try:
            with self.rows.watching(inputs):
                made = self._step[0](weights, inputs)
        except PagesAreReadError as error:
            raise NotCompiledError(Reason.PAGES, _at(line_of_error(error))) from error
        except Exception as error:
            raise _refusal(self._module[0], error, self.rows) from error
        for (name, spec), value, memory in zip(self._cell.outputs.items(), made, outputs, strict=True):
            if value.dim() != memory.dim() or value.shape != memory.shape or value.dtype != spec.dtype:
                raise NotCompiledError(Reason.OUTPUTS, f"{name!r} is {value.dtype} {list(value.shape)}")
            memory.copy_(value)
        return outputs[0]


@workers_modes()
@torch.inference_mode(False)  # the caller may be in it: a program cannot write to memory that is made there
@torch.no_grad()
def export_step(cell: Computation) -> StepProgram:
    """Return a cell's step for any number of rows. Raise NotCompiledError.

    It runs the module's code, and changes torch for all threads meanwhile; so ``LibraryStore`` calls it in a fork.
    """
    weights = _checked_weights(cell)
    num_ragged = sum(spec.ragged for spec in cell.inputs.values())
    failure: NotCompiledError | None = None
    for has_equal_values in (False, True) if num_ragged > 1 else (False,):
        for least_rows in (1, 2):
            try:
                program = _export(cell, weights, (), least_rows, has_equal_values)
                tied = tied_weights(program, len(weights))
                if tied:
                    program = _export(cell, weights, tied, least_rows, has_equal_values)
            except NotCompiledError as refused:
                if refused.reason not in (Reason.NOT_EXPORTED, Reason.FIXED_ROWS, Reason.OUTPUTS):
                    raise
                failure = failure or refused
            else:
                _check_operators(program.graph.nodes)
                _check_writes(program, len(cell.outputs))
                check_indices(program)
                values, count = with_tied(tuple(weights.values()), tied), len(cell.outputs)
                packed = pack_products(program, len(values), tied)
                return StepProgram(program, values, count, least_rows, has_equal_values, tied, packed)
    raise failure or NotCompiledError(Reason.NOT_EXPORTED)


def with_tied(weights: tuple[torch.Tensor, ...], tied: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return the weights, followed by those that are tied."""
    return (*weights, *(weights[number] for number in tied))


def _checked_weights(cell: Computation) -> dict[str, torch.Tensor]:
    if cell.batch_sizes:
        raise NotCompiledError(Reason.BATCH_SIZES, str(list(cell.batch_sizes)))
    weights = weights_of(cell.module)
    for name, value in weights.items():
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        if not is_plain or not value.is_cpu or value.is_quantized:
            raise NotCompiledError(Reason.DEVICE, name)
        if value.dtype not in DTYPES:
            raise NotCompiledError(Reason.DTYPE, f"{name} is {value.dtype}")
    return {name: value.detach() for name, value in weights.items()}


def _export(
    cell: Computation, weights: dict[str, torch.Tensor], tied: Sequence[int], least_rows: int, has_equal_values: bool
) -> ExportedProgram:
    given = list(weights.values())
    given += [torch.empty_like(given[number]) for number in tied]  # a tensor that comes twice is one to the trace
    rows = Dim("rows", min=least_rows)
    inputs, sizes = example_of(cell, rows, has_equal_values)
    memory = [torch.zeros(EXAMPLE_ROWS, *spec.shape, dtype=spec.dtype) for spec in cell.outputs.values()]
    module, before = cell.module, plain_attributes(cell.module)
    note_lines_of(module)
    step = _WritingStep(cell, module, Exportable(cell, module, weights, cell.written))
    is_general = symbolic_config.patch(backed_size_oblivious=least_rows == 1 or cell.has_spans)  # type: ignore[attr-defined]
    try:
        with is_general, tracing():
            program = torch.export.export(
                step,
                (given, inputs, memory),
                dynamic_shapes=([None] * len(given), sizes, [{0: rows}] * len(memory)),
                strict=False,
            )
    except NotCompiledError:
        raise
    except Exception as error:
        raise _refusal(module, error, step.rows) from error
    if plain_attributes(module) != before:
        raise NotCompiledError(Reason.MEMORY)
    program.example_inputs = None  # they hold the weights
    return program


def plain_attributes(module: object) -> list[str]:
    """Return the plain attributes of a module and its parts: neither tensors nor code."""
    parts = module.modules() if isinstance(module, nn.Module) else []
    return [
        f"{key}={value!r}"
        for part in parts
        for key, value in sorted(vars(part).items())
        if isinstance(value, PLAIN) and key not in OF_EVERY_MODULE and not _is_derived(part, key)
    ]


def _is_derived(part: nn.Module, key: str) -> bool:
    """Return whether an attribute is one that a function's copy derives from its captured values at its first call."""
    return isinstance(part, FunctionSnapshot) and key in ("_made", "_globals")


def _refusal(module: object, error: Exception, watch: RowsWatch) -> NotCompiledError:
    """Return the refusal for an error of the export."""
    detail = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(module, nn.Module) and any(isinstance(part, nn.RNNBase) for part in module.modules()):
        return NotCompiledError(Reason.RECURRENT, detail)
    # Imported here, where an export has imported it: it takes a third of a second, and no other process needs it.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    causes: list[BaseException | None] = [error, error.__cause__, error.__context__]
    detail = _at(line_of_error(error), detail)
    if any(isinstance(cause, GuardOnDataDependentSymNode) for cause in causes):
        return NotCompiledError(Reason.BY_VALUES, detail)
    if "Constraints violated" in detail:
        return NotCompiledError(Reason.FIXED_ROWS, _constraint(error, watch))
    return NotCompiledError(Reason.NOT_EXPORTED, detail)


def _at(line: Line | None, what: str = "") -> str:
    """Return a detail with the line of the user's code."""
    return what if line is None else f"{what}{what and ', '}at {line}"


def _constraint(error: Exception, watch: RowsWatch) -> str:
    """Return the cause of a fixed number of rows: ``len``, or the first point of torch's
    message, without its advice.
    """
    line, is_one = watch.fixed or (None, False)
    if line is not None and is_one and "len(" in line.text:
        return _at(line, "as len(tensor) does, and x.shape[0] does not")
    points = [line.strip() for line in str(error).splitlines() if line.strip().startswith("- ")]
    said = points[0].removeprefix("- ").partition(". ")[0] if points else "it is not told where"
    said = ROWS_IN_TORCH.sub("rows", said).replace("rows = rows", "rows").replace(" and rows <= IntInfinity()", "")
    return _at(line, f"torch says: {said.removesuffix('.')}")


def _check_operators(nodes: Iterable[Node]) -> None:
    """Raise NotCompiledError for operators that would not run as in the module, or not without Python."""
    for node in nodes:
        refused = _reason_against(node)
        if refused is not None:
            instead = instead_of(node.target)
            detail = _at(line_of_node(node), str(node.target))
            raise NotCompiledError(refused, f"{detail}; {instead}" if instead else detail)


def _reason_against(node: Node) -> Reason | None:
    if node.op == "get_attr" or not isinstance(node.target, torch._ops.OpOverload):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            return None
        return Reason.OTHER_MODE if str(node.target).startswith("wrap_with") else Reason.BY_VALUES
    if is_own(node.target):
        return None
    if is_unchecked(node.target):
        return Reason.UNCHECKED_INDICES
    if may_divide_by_zero(node):
        return Reason.UNCHECKED_DIVISION
    if torch.Tag.nondeterministic_seeded in node.target.tags and not _is_in_evaluation(node):
        return Reason.RANDOM
    if node.target.namespace not in OWN_NAMESPACES:
        return Reason.CUSTOM_OPERATOR
    lacks_interface = node.target._schema.name.partition("::")[2] in WITHOUT_C_INTERFACE
    return Reason.NO_C_INTERFACE if lacks_interface else None


def _is_in_evaluation(node: Node) -> bool:
    """Return whether an operator that draws numbers in training (dropout, attention) is told not to."""
    declared = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(declared, node.args)) | node.kwargs
    defaults = {"dropout_p": 0.0} if "dropout_p" in declared else {}
    switches = [(defaults | given).get(name) for name in ("train", "training", "dropout_p") if name in declared]
    return bool(switches) and not any(switches)


def _check_writes(program: ExportedProgram, num_outputs: int) -> None:
    """Raise NotCompiledError if the program writes to any of its inputs but the memory of outputs."""
    kept = set(program.graph_signature.user_inputs[:-num_outputs]) | program.constants.keys()
    for node in program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        for declared, given in zip(node.target._schema.arguments, node.args):
            if declared.is_write and isinstance(given, Node) and _base_of(given).name in kept:
                raise NotCompiledError(Reason.MEMORY, f"{node.target} writes to {_base_of(given).name}")


def _base_of(node: Node) -> Node:
    """Return the node that a tensor may be a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(node.args[0], Node):
        schema = node.target._schema
        is_view = bool(schema.returns) and schema.returns[0].alias_info is not None
        if not is_view and schema.name.partition("::")[2] not in MAYBE_VIEWS:
            break
        node = node.args[0]
    return node


def _described(value: object) -> str:
    """Return dtype, sizes and strides of a node's value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {value.stride()}"
    return str(value) if not isinstance(value, list | tuple) else str([_described(part) for part in value])


def _bytes_of(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().flatten()
    return str((flat.dtype, value.shape)).encode() + (flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"")
