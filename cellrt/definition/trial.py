"""A cell's trial, where it is defined: what its outputs are, and which of its inputs it writes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from cellrt.definition.computation import Computation, call, named_outputs
from cellrt.definition.declaration import BatchSizes, check_output_name
from cellrt.definition.examples import random_inputs, zero_inputs
from cellrt.definition.input_watch import InputWatch
from cellrt.definition.modes import workers_modes
from cellrt.definition.snapshot import copy_of, weights_of
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import CellInput, RowSpec, check_dtype, describe
from cellrt.errors import DefinitionError

INSTEAD: Mapping[type, str] = MappingProxyType(
    {
        nn.LSTMCell: "torch's LSTMCell takes its state as one tuple: use cellrt.cells.LSTMCell.from_torch(...), which "
        "has inputs x, h and c",
        nn.RNNBase: "torch's module takes whole sequences, a cell one step: use cellrt.unfolders.chain(name, module) "
        "for an nn.LSTM or nn.GRU",
    }
)
"""Replacements to suggest for modules of torch that are no cells."""
ANEW = (
    ", or delete what each call makes anew (of torch's weight_norm, spectral_norm and prune by their remove functions) "
    "before the module becomes a cell"
)
SMALL_BYTES = 1 << 30
"""Weights of a module that is run on zeros. Adding meta tensors has torch import its compiler, which takes 0.75 s and
140 MB; so long takes a run of a module of this size, of whose memory that is a small part."""


class Trial:
    """Runs of copies of a module for two numbers of rows, if it takes two.

    The small one runs on zeros, the large one on meta tensors; where that cannot be, the other way. If it lies on the
    CPU, then on random rows.

    Attributes:
        outputs: their specs by name.
        written: the inputs that it writes to in place.

    Raises DefinitionError if it does not run, writes to its own tensors, or returns what is no cell's output.
    """

    @workers_modes()
    def __init__(
        self,
        name: str,
        module: Callable[..., Any],
        specs: Mapping[str, RowSpec],
        by_name: bool,
        sizes: BatchSizes,
    ) -> None:
        self.outputs: dict[str, RowSpec] = {}
        self.written: set[str] = set()
        self._name, self._specs, self._by_name = name, specs, by_name
        sizes_tried = _trial_rows(sizes)
        weights = weights_of(module).values()
        is_on_cpu = all(tensor.is_cpu for tensor in weights)
        is_small = is_on_cpu and sum(tensor.nbytes for tensor in weights) <= SMALL_BYTES
        with torch.inference_mode(False), torch.no_grad():
            for rows in sizes_tried:
                self._note(self._run_on_nothing(module, rows, is_small), rows)
        if is_on_cpu:
            self._run_on_random(copy_of(module), sizes_tried[0])

    def _run_on_nothing(self, module: Callable[..., Any], rows: int, is_small: bool) -> dict[str, torch.Tensor]:
        """Return the outputs for zeros or for meta tensors."""
        first, second = (self._run_on_zeros, self._run_on_meta) if is_small else (self._run_on_meta, self._run_on_zeros)
        try:
            return first(module, rows)
        except (DefinitionError, KeyboardInterrupt):
            raise
        except BaseException as error:  # on meta tensors: the code looks at values, or knows none of them
            failed = error
        try:
            return second(module, rows)
        except (DefinitionError, KeyboardInterrupt):
            raise
        except BaseException as error:
            failed = failed if is_small else error
            described = ", ".join(f"{key}: {spec}" for key, spec in self._specs.items())
            hint = next((f"; {text}" for kind, text in INSTEAD.items() if isinstance(module, kind)), self._batch_hint())
            raise DefinitionError(
                f"cell {self._name!r} does not run on {rows} rows of ({described}): {describe_error(failed)}{hint}"
            ) from failed

    def _batch_hint(self) -> str:
        """Return a hint for rows whose shape begins like a batch of one."""
        for key, spec in self._specs.items():
            if len(spec.shape) > 1 and spec.shape[0] == 1:
                instead = f"({spec.shape[1]},)" if len(spec.shape) == 2 else f"{spec.shape[1:]}"
                return f"; a shape is that of one row, without the batch's dimension: is {instead} meant for {key!r}?"
        return ""

    def _run_on_zeros(self, module: Callable[..., Any], rows: int) -> dict[str, torch.Tensor]:
        return self._run(copy_of(module), zero_inputs(self._specs.values(), rows))

    def _run_on_meta(self, module: Callable[..., Any], rows: int) -> dict[str, torch.Tensor]:
        on_meta = copy_of(module).to("meta") if isinstance(module, nn.Module) else module
        return self._run(on_meta, zero_inputs(self._specs.values(), rows, "meta"))

    def _run_on_random(self, module: Callable[..., Any], rows: int) -> None:
        """Look for writes that depend on values, and for rows that should be appended.

        With gradients on, where ready-made cells take their plain form.
        """
        generator = torch.Generator().manual_seed(1)  # other rows than those of the row-wise check
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            inputs = random_inputs(self._specs.values(), rows, generator)
            grown = {
                key: (value, value.pages.clone())
                for (key, spec), value in zip(self._specs.items(), inputs)
                if isinstance(value, PagedRows) and spec.appends and spec.dtype.is_floating_point
            }
            try:
                self._run(module, inputs)
                for key, (value, before) in grown.items():
                    if torch.equal(before, value.pages):
                        raise DefinitionError(
                            f"cell {self._name!r}, input {key!r}: appends no row (see PagedRows.append); what a cell "
                            "only reads is cellrt.pages"
                        )
            except (DefinitionError, KeyboardInterrupt):
                raise
            except BaseException:  # random rows may be no inputs of this cell
                pass

    def _run(self, module: Callable[..., Any], inputs: Sequence[CellInput]) -> dict[str, torch.Tensor]:
        watch, before = InputWatch(dict(zip(self._specs, inputs, strict=True))), _versions(module)
        unwritten = {
            key: value.pages.clone()
            for (key, spec), value in zip(self._specs.items(), inputs)
            if isinstance(value, PagedRows) and not spec.appends
        }
        named = named_outputs(call(module, self._specs, inputs, self._by_name))
        for key, value in zip(self._specs, inputs):
            before_pages = unwritten.get(key)
            if before_pages is None or not isinstance(value, PagedRows) or value.pages.is_meta:
                continue
            if not torch.equal(before_pages, value.pages):
                raise DefinitionError(
                    f"cell {self._name!r}, input {key!r}: writes to pages that it only reads (see cellrt.grows)"
                )
        after = _versions(module)
        if before != after:
            written = sorted(key for key in before | after if before.get(key) != after.get(key))
            instead = ""
            if not before.keys() & set(written):
                instead = ", or call the module before, if it makes this once"
            elif all(key in after and before[key][0] != after[key][0] for key in before.keys() & set(written)):
                instead = ANEW
            raise DefinitionError(
                f"cell {self._name!r}: writes to its own {written}; a cell has no state of its own: use carry{instead}"
            )
        self.written |= watch.written()
        return named

    def _note(self, named: Mapping[str, torch.Tensor], rows: int) -> None:
        for output, value in named.items():
            _check_output(self._name, output, value, rows)
        outputs = {output: RowSpec(tuple(value.shape[1:]), value.dtype) for output, value in named.items()}
        if self.outputs and outputs != self.outputs:
            raise DefinitionError(
                f"cell {self._name!r}: its outputs depend on the number of rows: {self.outputs} or {outputs}"
            )
        self.outputs = outputs


@workers_modes()
def try_steps(computation: Computation) -> None:
    """Run the steps-first form once on zeros, two rows and then one (one row twice for a cell of one row).

    Adds the inputs that it writes to. Raise DefinitionError if it does not run.
    """
    batch_sizes = [min(2, computation.max_batch), 1]
    try:
        with torch.inference_mode(False), torch.no_grad():
            inputs = [
                zero_inputs([spec], batch_sizes[0] if key in computation.carry else sum(batch_sizes))[0]
                for key, spec in computation.inputs.items()
            ]
            outputs = computation.run_watched(inputs, batch_sizes)
            computation.check_outputs(outputs, sum(batch_sizes))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise DefinitionError(
            f"cell {computation.name!r}: its method steps does not run on zeros: {describe_error(error)}"
        ) from error


def _trial_rows(sizes: BatchSizes) -> list[int]:
    """Return two numbers of rows that the cell takes, where there are two."""
    if sizes.supported:
        return sorted({sizes.supported[0], sizes.supported[-1]})
    return sorted({min(2, sizes.largest), min(3, sizes.largest)})


def _versions(module: Callable[..., Any]) -> dict[str, tuple[int, int]]:
    """Return the identity and version of each tensor of a module, to see which ones are written to."""
    tensors = weights_of(module)
    return {key: (id(value), 0 if value.is_inference() else value._version) for key, value in tensors.items()}


def _check_output(name: str, output: object, value: torch.Tensor, rows: int) -> None:
    check_output_name(name, output)
    if value.dim() == 0 or value.shape[0] != rows:
        raise DefinitionError(
            f"cell {name!r}, output {output!r}: expected the row dimension first ({rows} rows in the trial run), "
            f"got {describe(value)}"
        )
    if value.shape[1:].numel() == 0:  # an arena has no rows of no bytes
        raise DefinitionError(
            f"cell {name!r}, output {output!r}: expected extents of at least 1, got {describe(value)}; leave it out"
        )
    check_dtype(f"cell {name!r}, output {output!r}", value.dtype)
    if value.layout is not torch.strided:
        raise DefinitionError(f"cell {name!r}, output {output!r}: expected a dense tensor, got one of {value.layout}")


def describe_error(error: BaseException) -> str:
    """Return the type and text of an error, whose text may itself raise."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except BaseException as raised:
        return f"{kind}, whose text raises {type(raised).__name__}"
