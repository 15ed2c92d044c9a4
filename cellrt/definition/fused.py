"""The interface of cells that read and write arena rows themselves, for fused kernels on a GPU.

Which form of a cell a device uses is its own choice: see ``worker/device/placement.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch


class IndexedRows(NamedTuple):
    """Rows of a tensor by number: row k of an input or output is ``values[rows[k]]``.

    Attributes:
        values: ``[n, *shape]`` contiguous, an arena or a ring.
        rows: int64 ``[number of rows]`` contiguous on the same device. An output is not written where it is negative.
    """

    values: torch.Tensor
    rows: torch.Tensor


class SpannedRows(NamedTuple):
    """Rows that the device counts: row k is ``values[rows[span[0] + k]]``, for k below ``span[1]``.

    Attributes:
        values, rows: see ``IndexedRows``. What ``rows`` has beside them may name no row, and is not to be written.
        most: rows that there may be, which the host knows.
        span: int64 ``[2]`` contiguous on the same device: the first, and how many there are.
    """

    values: torch.Tensor
    rows: torch.Tensor
    most: int
    span: torch.Tensor


StepRows = IndexedRows | SpannedRows


class RunSizes(NamedTuple):
    """Rows of each step of a run, never growing, as in torch's PackedSequence.

    Attributes:
        numbers: on the host. For a form that reads spans, the most there may be.
        values: int64 ``[steps]`` contiguous on the device: how many there are, for a form that reads spans with zeros
            behind the last step. For others, ``numbers``.
    """

    numbers: tuple[int, ...]
    values: torch.Tensor


@runtime_checkable
class FusedModule(Protocol):
    """A cell module that reads and writes arena rows itself: the door for fused kernels.

    On a GPU the runtime calls ``run_rows`` instead of ``forward`` for the steps of cell calls, chains and loops. It
    must do what ``forward`` does to the rows that ``inputs`` name, and put each output into the rows that ``outputs``
    name. It runs on the current stream, does not wait for the device, and has no shape that depends on values. No row
    is both read and written in one call, and none is written twice. Inputs from several places still use ``forward``,
    and so do ragged ones, but in loops and single steps of a form that ``reads_ragged``. If it raises, the task is run
    again through ``forward``, which finds the rows to blame.

    Rows of a loop that have stopped read rows that they read before, and write none. A number outside what it indexes
    must do no harm: its row fails.

    It is not called where a hook or a subclass changed ``forward``, nor where the module also has a method
    ``can_run_rows(inputs, outputs) -> bool`` that refuses a cell's ``RowSpec`` of each input and output. That is asked
    once, when the weights are on the device.

    When a model is registered it is called with zeros, for each power of two of rows and for the most, so that kernels
    are compiled then. Any other number of rows must use the kernel of the next power of two.

    With ``run_chain_rows`` (see ``ChainModule``) it takes a run's steps in one call. One that ``reads_spans`` is given
    ``SpannedRows``: then one captured graph serves any number of rows and any run.
    """

    def run_rows(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """One step of as many rows as each of them names."""


@runtime_checkable
class ChainModule(FusedModule, Protocol):
    """A ``FusedModule`` that can take all steps of a run in one call: the door for kernels that keep weights on chip.

    The rules are those of ``run_rows``. It is called where it was faster than ``run_rows`` step by step, which is
    measured once for each size of run (``DeviceOptions.chains`` says so beforehand). So either may be called, and more
    than once, for the same task. What has the same name and rows among inputs and outputs is state: a cell that
    carries anything else from step to step does not use this form.
    """

    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """``len(sizes.numbers)`` steps; False, and nothing is done, if this run must go step by step.

        State inputs name a row for each of the first step's rows. Other inputs, and all outputs, name one for each
        position: position ``sum(numbers[:s]) + k`` is row k at step s. Positions of which nobody reads the state may
        share rows with others; what is left there does not matter.
        """


Form = TypeVar("Form", bound=Callable[..., object])


def reads_spans(form: Form) -> Form:
    """Mark a ``run_rows`` that takes ``SpannedRows``, and ``run_chain_rows`` of the same class with it.

    All inputs and outputs of a call have spans of equal count. ``run_chain_rows`` gets ``IndexedRows``, of which there
    may be more than there are positions (they name rows that may be read), and ``sizes.values`` that end with zeros.
    """
    setattr(form, SPANS, True)
    return form


def is_reading_spans(form: Callable[..., object]) -> bool:
    """Return whether a ``run_rows`` is marked by ``reads_spans``."""
    return getattr(form, SPANS, False)


def reads_outputs(form: Form) -> Form:
    """Mark a ``run_rows`` that reads rows of state that it has written: each row of other outputs has one.

    It is not called where a cell carries anything but what has the same name among inputs and outputs.
    """
    setattr(form, OUTPUTS, True)
    return form


def is_reading_outputs(form: Callable[..., object]) -> bool:
    """Return whether a ``run_rows`` is marked by ``reads_outputs``."""
    return getattr(form, OUTPUTS, False)


def reads_ragged(form: Form) -> Form:
    """Mark a ``run_rows``, which also ``reads_spans``, that takes ragged inputs in loops and single steps: each as
    ``RaggedRows``, at every step of a loop the same.

    There may be more nodes and more rows than there are: nodes behind the last have no rows, and nobody has the rows
    behind theirs. All spans begin at 0.
    """
    setattr(form, RAGGED, True)
    return form


def is_reading_ragged(form: Callable[..., object]) -> bool:
    """Return whether a ``run_rows`` is marked by ``reads_ragged``."""
    return getattr(form, RAGGED, False)


SPANS, OUTPUTS, RAGGED = "_reads_spans", "_reads_outputs", "_reads_ragged"
RunRows = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
RunChainRows = Callable[[RunSizes, Mapping[str, IndexedRows], Mapping[str, IndexedRows]], bool]
