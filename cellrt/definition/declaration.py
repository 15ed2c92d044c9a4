"""The declaration of a cell beside its module, and its checks, both for cells that are defined and that are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cellrt.definition.spec import RowSpec, as_spec
from cellrt.errors import DefinitionError
from cellrt.numbers import as_integer

DEFAULT_MAX_BATCH = 512
LARGEST_BATCH = 65_536
LARGEST_PRIORITY = (1 << 31) - 1
RESERVED_INPUTS = frozenset({"carry", "keep", "max_steps", "reverse", "until"})
"""Input names that the graph's builders use themselves."""
RESERVED_OUTPUTS = frozenset({"last"})
"""Output names that a graph's handles use themselves."""


class BatchSizes(NamedTuple):
    """The numbers of rows that a task of a cell may have.

    Attributes:
        largest: the most.
        smallest: the fewest of a further task while others of the same type are submitted.
        supported: the numbers that the cell takes, in order; a task is padded to the next. Empty: any.
        largest_rows: for a cell with spans, the most rows, while the other numbers count nodes; else ``largest``.
    """

    largest: int
    smallest: int
    supported: tuple[int, ...]
    largest_rows: int


@dataclass(frozen=True)
class Declaration:
    """The declaration of a cell beside its module: see ``cellrt.cell`` for each field. Every field has been checked."""

    name: str
    inputs: Mapping[str, RowSpec]
    outputs: Mapping[str, RowSpec]
    carry: Mapping[str, str]
    finite: tuple[str, ...]
    sizes: BatchSizes
    priority: int | None
    row_wise: bool = True

    def of_identity(self) -> list[object]:
        """Return the fields that make another cell type. The others only say how a cell is served."""
        inputs, outputs = ({name: str(spec) for name, spec in specs.items()} for specs in (self.inputs, self.outputs))
        sizes = [self.sizes.largest, self.sizes.supported]
        if self.sizes.largest_rows != self.sizes.largest:
            sizes.append(self.sizes.largest_rows)
        return [inputs, outputs, dict(self.carry), self.finite, *sizes]


def check_name(name: object) -> str:
    """Return the name of a cell. Raise DefinitionError, as all checks here do."""
    if not isinstance(name, str) or not name:
        raise DefinitionError(f"cell {name!r}: expected a name, got {kind_of(name)}")
    return name


def check_inputs(name: str, inputs: object) -> dict[str, RowSpec]:
    """Return the specs of a cell's inputs, of what their author wrote."""
    if not isinstance(inputs, Mapping):
        raise DefinitionError(f"cell {name!r}: expected inputs as a dict of shapes or specs, got {kind_of(inputs)}")
    if not inputs:
        raise DefinitionError(f"cell {name!r} has no inputs: its number of rows would be unknown")
    for key in inputs:
        is_taken = key in RESERVED_INPUTS
        if is_taken or not isinstance(key, str) or not key.isidentifier():
            why = "graph.chain and graph.loop have an argument of that name" if is_taken else "expected an identifier"
            raise DefinitionError(f"cell {name!r}: {key!r} cannot be the name of an input: {why}")
    try:
        return {key: as_spec(key, value) for key, value in inputs.items()}
    except DefinitionError as error:
        raise DefinitionError(f"cell {name!r}, {error}") from None


def check_output_name(name: str, output: object) -> None:
    """Raise DefinitionError if an output may not have this name."""
    is_name = isinstance(output, str) and output.isidentifier() and not output.startswith("_")
    if not is_name or output in RESERVED_OUTPUTS:
        why = "expected an identifier that does not begin with an underscore"
        if is_name:
            why = f"of what graph.chain and graph.loop return, .{output} is the last step"
        raise DefinitionError(f"cell {name!r}: {output!r} cannot be the name of an output: {why}")


def check_sizes(
    name: str,
    max_batch: int | None = None,
    min_batch: int = 1,
    batch_sizes: Iterable[int] | None = None,
    max_batch_rows: int | None = None,
    has_spans: bool = False,
    longest: int = 0,
) -> BatchSizes:
    """Return the batch sizes of a cell, where the most rows are by default the largest of those it supports, and no
    fewer than its longest node has.
    """
    try:
        sizes = tuple(batch_sizes or ())
    except TypeError:
        raise DefinitionError(f"cell {name!r}: expected batch_sizes as a list, got {kind_of(batch_sizes)}") from None
    given = [value for value in (max_batch, max_batch_rows) if value is not None]
    if sizes and has_spans:
        raise DefinitionError(f"cell {name!r}: batch_sizes are not for cells with spans or pages, whose nodes have any")
    if max_batch_rows is not None and not has_spans:
        raise DefinitionError(f"cell {name!r}: max_batch_rows is for cells with spans or pages; others have max_batch")
    for value in (*sizes, *given, min_batch):
        number = as_integer(value)
        if number is None or not 1 <= number <= LARGEST_BATCH:
            raise DefinitionError(f"cell {name!r}: expected batch sizes from 1 to {LARGEST_BATCH}, got {value!r}")
    sizes, min_batch = tuple(map(int, sizes)), int(min_batch)
    max_batch, max_batch_rows = (None if value is None else int(value) for value in (max_batch, max_batch_rows))
    sizes = tuple(sorted(set(sizes)))
    if sizes and max_batch not in (None, sizes[-1]):
        raise DefinitionError(
            f"cell {name!r}: max_batch={max_batch} is not the largest of batch_sizes={list(sizes)}; leave it out"
        )
    largest = sizes[-1] if sizes else DEFAULT_MAX_BATCH if max_batch is None else max_batch
    if min_batch > largest:
        raise DefinitionError(
            f"cell {name!r}: min_batch={min_batch} is more than the {largest} rows that a task has at most"
        )
    largest_rows = max(largest, DEFAULT_MAX_BATCH, min(longest, LARGEST_BATCH)) if has_spans else largest
    return BatchSizes(largest, min_batch, sizes, largest_rows if max_batch_rows is None else max_batch_rows)


def check_priority(name: str, priority: object) -> int | None:
    """Return a cell's priority, or None for the default."""
    if priority is None:
        return None
    number = as_integer(priority)
    if number is None:
        raise DefinitionError(f"cell {name!r}: expected an integer as priority, got {priority!r}")
    if not -LARGEST_PRIORITY <= number <= LARGEST_PRIORITY:
        raise DefinitionError(
            f"cell {name!r}: expected a priority from {-LARGEST_PRIORITY} to {LARGEST_PRIORITY}, got {priority}"
        )
    return number


def check_row_wise(name: str, row_wise: object) -> bool:
    """Return whether a cell is said to be row-wise."""
    if not isinstance(row_wise, bool):
        raise DefinitionError(f"cell {name!r}: expected row_wise=True or False, got {row_wise!r}")
    return row_wise


def check_carry(
    name: str, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec], given: object
) -> dict[str, str]:
    """Return the output that each input is carried from; by default the one of the same name and spec.

    A cell with spans carries nothing: one of its chains has many rows in a task. Its loops say what they carry.
    """
    if any(spec.has_nodes for spec in inputs.values()):
        if given:
            raise DefinitionError(f"cell {name!r}: one with spans or pages carries no input; see graph.loop(carry=...)")
        return {}
    if given is None:
        return {key: key for key, spec in inputs.items() if outputs.get(key) == spec}
    if not isinstance(given, Mapping):
        raise DefinitionError(f"cell {name!r}: expected carry as a dict from input to output, got {kind_of(given)}")
    for key, output in given.items():
        if key not in inputs or output not in list(outputs):
            raise DefinitionError(
                f"cell {name!r}: carry {key!r} from {output!r}: inputs are {list(inputs)}, outputs are {list(outputs)}"
            )
        if inputs[key] != outputs[output]:
            raise DefinitionError(
                f"cell {name!r}: carry {key!r} from {output!r}: expected {inputs[key]}, got {outputs[output]}"
            )
    return {key: given[key] for key in inputs if key in given}


def check_finite(name: str, outputs: Mapping[str, RowSpec], finite: object) -> tuple[str, ...]:
    """Return the outputs that must be finite: one name or several."""
    given = (finite,) if isinstance(finite, str) else finite
    if not isinstance(given, Iterable):
        raise DefinitionError(f"cell {name!r}: expected finite as a list of outputs, got {kind_of(finite)}")
    names = tuple(given)
    for output in names:
        if output not in list(outputs) or not outputs[output].dtype.is_floating_point:
            described = {key: str(spec) for key, spec in outputs.items()}
            raise DefinitionError(
                f"cell {name!r}: finite={output!r} is not a floating-point output; outputs are {described}"
            )
    return names


def kind_of(value: object) -> str:
    """Return a word for the kind of a value, for errors."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
