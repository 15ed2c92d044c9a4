"""The LSTM of the GPU benchmarks: the ready-made cell."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cellrt.cells.lstm import LSTMCell
from cellrt.definition.fused import IndexedRows, RunSizes, StepRows, reads_spans
from cellrt.definition.spec import RowSpec
from cellrt.kernels.gate_weights import PackedWeights, Precision


class FusedLSTM(LSTMCell):
    """The LSTM with inputs as wide as its state; fused on the dry device too, where the kernel's reference runs.

    Args:
        hidden: size of inputs and state.
        dtype: of weights, inputs and state.
        precision: how the kernel multiplies float32.
    """

    def __init__(self, hidden: int, dtype: torch.dtype = torch.float32, precision: Precision = "tf32") -> None:
        super().__init__(hidden, hidden)
        self.to(dtype)
        self.precision: Precision = precision

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return True."""
        return True

    @reads_spans
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step, rows of arenas to rows of arenas."""
        self._fused.run(self, inputs, outputs, self.precision)

    @reads_spans
    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """Return a run by the chain kernel, if it takes these weights."""
        return self._fused.run_chain(self, sizes, inputs, outputs, self.precision)

    def packed(self) -> PackedWeights:
        """Return the weights as the kernel reads them."""
        return self._fused.packed(self)
