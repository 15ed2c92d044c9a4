"""Several LSTM steps in plain torch: what the kernels must give."""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.lstm_step import reference


def lstm_chain(
    weight_hh: Tensor,
    bias: Tensor,
    batch_sizes: Tensor,
    *,
    gates: ArenaRows,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
) -> None:
    """Compute the operation with weights in torch's layout, by the reference of one step, again and again."""
    start = 0
    for size in filter(None, batch_sizes.tolist()):
        end = start + size
        new_h, new_c = (_fresh(arena, size) for arena in (h, c))
        step_gates = ArenaRows(gates.values, gates.rows[start:end])
        h, c = ArenaRows(h.values, h.rows[:size]), ArenaRows(c.values, c.rows[:size])
        reference.lstm_step(weight_hh, bias, gates=step_gates, h=h, c=c, h_out=new_h, c_out=new_c)
        h, c = new_h, new_c
        ArenaRows(h_out.values, h_out.rows[start:end]).scatter(h.values)
        ArenaRows(c_out.values, c_out.rows[start:end]).scatter(c.values)
        start = end


def _fresh(arena: ArenaRows, num_rows: int) -> ArenaRows:
    """Return an arena of the same kind with ``num_rows`` rows, in order."""
    values = arena.values.new_empty(num_rows, arena.values.shape[1])
    return ArenaRows(values, arena.rows.new_tensor(range(num_rows)))
