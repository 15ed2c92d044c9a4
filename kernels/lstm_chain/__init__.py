"""Several steps of many LSTM chains in one launch: rows are packed by step, those of chains that ended leave.

The equations are those of ``lstm_step``, with the input half computed before (``gates``), as one product for all steps.
Step s has the first ``batch_sizes[s]`` rows, and position ``sum(batch_sizes[:s]) + row`` is a row at that step, as in
``torch.nn.utils.rnn.PackedSequence`` and in a task's buffer.

There are two forms (see ``triton.py``): by rows, for small weights, and persistent (Diamos et al. 2016, "Persistent
RNNs"), with the weights kept on chip. Neither was measured yet; the runtime measures where it may choose.
"""

from __future__ import annotations

from torch import Tensor

from cellrt.kernels.arena_rows import INDEX_TYPES, ArenaRows, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gate_weights import PackedWeights, Precision, check_precision
from cellrt.kernels.lstm_chain import reference
from cellrt.kernels.lstm_chain.plan import ChainPlan, choose_plan, fitting_plan, rows_plan
from cellrt.kernels.lstm_chain.scratch import ChainScratch, make_scratch
from cellrt.kernels.lstm_step import SECTIONS
from cellrt.kernels.tiles import device_limits

__all__ = ["ChainPlan", "ChainScratch", "find_plan", "lstm_chain", "make_scratch"]


def find_plan(weights: PackedWeights, num_rows: int, precision: Precision = "ieee") -> ChainPlan | None:
    """Return how to run a chain of ``num_rows`` rows in one launch, or None where the weights do not fit."""
    return fitting_plan(weights, num_rows, precision, *device_limits(weights.weight_hh.device))


def lstm_chain(
    weights: PackedWeights,
    batch_sizes: Tensor,
    *,
    gates: ArenaRows,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    scratch: ChainScratch,
    precision: Precision = "ieee",
    plan: ChainPlan | None = None,
) -> None:
    """``len(batch_sizes)`` steps, each step's state written to ``h_out`` and ``c_out``.

    ``weights`` come from ``lstm_step.pack_weights``, without ``weight_ih``. ``batch_sizes`` is int32 or int64
    ``[steps]``, not increasing, on the device; its first is at most ``len(h.rows)`` and its sum at most
    ``len(h_out.rows)`` (neither is checked on a device). What is behind is left alone, and the first step of no rows
    ends the chain: so one captured launch serves all runs up to these sizes. ``h`` and ``c`` name the rows of the first
    state; ``gates`` (of ``4 * hidden`` numbers), ``h_out`` and ``c_out`` one for each position. Positions whose state
    nobody reads are negative, or share rows with others of the same chain, in which the last one stays. The rest is as
    in ``lstm_step``; between steps h and c are in the arena's type, so a chain gives what its steps would.

    **No row written may be a row read by the same call.** ``scratch`` serves one launch at a time. On CUDA the
    kernel is launched on the current stream and nothing waits. The persistent form needs the whole device: beside
    a kernel that does not end it waits until the watchdog gives the device up (see ``barrier.py``).

    ``plan`` takes the place of the rule of thumb. Raise ValueError for shapes, types or devices that do not fit.
    """
    _check(weights, batch_sizes, gates, h, c, h_out, c_out, scratch)
    check_precision(precision)
    if len(h.rows) == 0 or len(batch_sizes) == 0:
        return
    if not uses_triton(weights.weight_hh):
        weight_hh, _ = weights.plain_weights()
        reference.lstm_chain(
            weight_hh, weights.plain_bias(), batch_sizes, gates=gates, h=h, c=c, h_out=h_out, c_out=c_out
        )
        return
    from cellrt.kernels.lstm_chain import triton

    processors, shared_bytes = device_limits(weights.weight_hh.device)
    plan = plan or choose_plan(weights, len(h.rows), precision, processors, shared_bytes)
    triton.lstm_chain(
        weights,
        batch_sizes,
        gates=gates,
        h=h,
        c=c,
        h_out=h_out,
        c_out=c_out,
        scratch=scratch,
        precision=precision,
        plan=plan or rows_plan(weights, precision, shared_bytes),
    )


def _check(
    weights: PackedWeights,
    batch_sizes: Tensor,
    gates: ArenaRows,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    scratch: ChainScratch,
) -> None:
    if weights.sections != SECTIONS or weights.weight_ih is not None:
        raise ValueError("the weights must be those of an LSTM, packed without weight_ih")
    like, hidden = weights.weight_hh, weights.hidden_size
    if batch_sizes.ndim != 1 or batch_sizes.dtype not in INDEX_TYPES or batch_sizes.device != like.device:
        raise ValueError(f"batch_sizes must be int32 or int64 of one dimension on {like.device}")
    num_rows = len(h.rows)
    if num_rows > scratch.max_rows or scratch.c.shape[1] != like.shape[1] or scratch.c.dtype != like.dtype:
        raise ValueError(f"the scratch memory is not for {num_rows} rows of these weights")
    check_rows("h", h, h, hidden, like)
    check_rows("c", c, h, hidden, like)
    check_rows("gates", gates, h_out, 4 * hidden, like)
    check_rows("h_out", h_out, h_out, hidden, like)
    check_rows("c_out", c_out, h_out, hidden, like)
