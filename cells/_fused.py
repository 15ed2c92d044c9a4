"""The ready-made cells on a GPU: ``run_rows`` (``cellrt/definition/fused.py``) by fused kernels, and ``run_chain_rows``
by the chain kernel.

A kernel has its own layout of the weights. It is made when a cell first runs on a device and kept beside the
parameters, which the plain form still needs: twice the memory. float32 is multiplied as torch does it there: in TF32 if
``torch.backends.cuda.matmul`` allows that, else in full. Functions import the kernels that they call: only a GPU needs
them, and their code is no part of a cell's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrize import is_parametrized

from cellrt import RowSpec, rows
from cellrt.cells._weights import Derived
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.choose import has_device, uses_triton
from cellrt.kernels.gate_weights import TYPES

if TYPE_CHECKING:
    from cellrt.definition.fused import RunSizes, StepRows
    from cellrt.kernels.gate_weights import PackedWeights, Precision

MAX_GATES_BYTES = 512 << 20
"""Most memory that a run's products of inputs may take."""
LEAST_CAPABILITY = (8, 0)
"""The first CUDA capability that multiplies bfloat16 and TF32."""


class FusedStep:
    """A step kernel with the weights of one module, packed when they are first needed.

    Args:
        step: the operation; its arguments have the names of the cell's inputs, and of its outputs with ``_out``.
        pack: makes its weights from the parameters.
        names: the names of these parameters. A module need not have all of them.
    """

    def __init__(self, step: Callable[..., None], pack: Callable[..., PackedWeights], *names: str) -> None:
        self._step, self._names = step, names
        self._packed = Derived(pack)

    def packed(self, module: nn.Module) -> PackedWeights:
        """Return the weights of ``module`` as the kernel reads them."""
        return self._packed.of(*(module._parameters.get(name) for name in self._names))

    def run(
        self,
        module: nn.Module,
        inputs: Mapping[str, StepRows | ArenaRows],
        outputs: Mapping[str, StepRows],
        precision: Precision | None = None,
    ) -> None:
        """One step, rows of arenas to rows of arenas; without a ``precision``, float32 is multiplied as torch does."""
        given = {name: ArenaRows(*value) for name, value in inputs.items()}
        made = {f"{name}_out": ArenaRows(*value) for name, value in outputs.items()}
        self._step(self.packed(module), **given, **made, precision=precision or chosen_precision())


class FusedLSTM(FusedStep):
    """The step of an LSTM, and several of its steps in one call."""

    def run_chain(
        self,
        module: nn.Module,
        sizes: RunSizes,
        inputs: Mapping[str, StepRows | ArenaRows],
        outputs: Mapping[str, StepRows],
        precision: Precision | None = None,
    ) -> bool:
        """Return a run as ``run_chain_rows`` takes it; its input is ``x``, which is multiplied for all steps at once,
        or ``gates``.

        False where the kernel does not take the weights, or the gates of all positions would take too much memory.
        """
        from cellrt.kernels.lstm_chain import find_plan, lstm_chain, make_scratch

        precision = precision or chosen_precision()
        weights = replace(self.packed(module), weight_ih=None, input_size=0)
        num_rows, row_bytes = sizes.numbers[0], 4 * weights.hidden_size * weights.weight_hh.element_size()
        plan = find_plan(weights, num_rows, precision)
        if plan is None or ("x" in inputs and len(inputs["x"].rows) * row_bytes > MAX_GATES_BYTES):
            return False
        given = inputs.get("gates")
        gates = _multiply(inputs["x"], module.get_parameter("weight_ih")) if given is None else ArenaRows(*given)
        lstm_chain(
            weights,
            sizes.values,
            gates=gates,
            h=ArenaRows(*inputs["h"]),
            c=ArenaRows(*inputs["c"]),
            h_out=ArenaRows(*outputs["h"]),
            c_out=ArenaRows(*outputs["c"]),
            scratch=make_scratch(weights, num_rows),
            precision=precision,
            plan=plan,
        )
        return True


def fused_lstm(is_recurrent: bool = False) -> FusedLSTM:
    """Return the step of an LSTM with the parameters of torch's; without ``weight_ih`` its input is ``gates``.

    With ``is_recurrent`` that is so even where the module has ``weight_ih``.
    """
    names = ("weight_hh", "bias_hh") if is_recurrent else ("weight_hh", "bias_hh", "weight_ih", "bias_ih")
    return FusedLSTM(_step_lstm, _pack_lstm, *names)


def _multiply(x: StepRows | ArenaRows, weight: Tensor) -> ArenaRows:
    """Return the products of rows of ``x`` with a weight, in order; the bias is not in them."""
    products = linear(x.values.index_select(0, x.rows), weight)
    return ArenaRows(products, torch.arange(len(products), device=products.device))


def _step_lstm(weights: PackedWeights, **arguments: Any) -> None:
    from cellrt.kernels.lstm_step import lstm_step

    lstm_step(weights, **arguments)


def _pack_lstm(*parameters: Tensor) -> PackedWeights:
    from cellrt.kernels.lstm_step import pack_weights

    return pack_weights(*parameters)


def fused_gru(is_recurrent: bool = False) -> FusedStep:
    """Return the step of a GRU with the parameters of torch's; as ``fused_lstm``."""
    names = ("weight_hh", "bias_hh") if is_recurrent else ("weight_hh", "bias_hh", "weight_ih", "bias_ih")
    return FusedStep(_step_gru, _pack_gru, *names)


def _step_gru(weights: PackedWeights, **arguments: Any) -> None:
    from cellrt.kernels.gru_step import gru_step

    gru_step(weights, **arguments)


def _pack_gru(*parameters: Tensor) -> PackedWeights:
    from cellrt.kernels.gru_step import pack_weights

    return pack_weights(*parameters)


def fed_step(states: tuple[str, ...], embedding_size: int) -> FusedStep:
    """Return the step of an LSTM or GRU, by its states, whose input begins with an embedding: that is given as
    ``gates``, and what is behind it, if anything is, as ``x``.
    """
    step, pack = (_step_lstm, _pack_lstm) if "c" in states else (_step_gru, _pack_gru)
    return FusedStep(step, partial(_pack_fed, pack, embedding_size), "weight_hh", "bias_hh", "weight_ih")


def _pack_fed(
    pack: Callable[..., PackedWeights], width: int, weight_hh: Tensor, bias_hh: Tensor | None, weight_ih: Tensor
) -> PackedWeights:
    return pack(weight_hh, bias_hh, weight_ih[:, width:] if weight_ih.shape[1] > width else None)


def fused_tree_lstm() -> FusedStep:
    """Return the step of a node with two children; its parameters are as ``tree_lstm.py`` says."""
    return FusedStep(_step_tree_lstm, _pack_tree_lstm, "weight_hh", "bias", "weight_ih")


def _step_tree_lstm(weights: PackedWeights, **arguments: Any) -> None:
    from cellrt.kernels.tree_lstm_step import tree_lstm_step

    tree_lstm_step(weights, **arguments)


def _pack_tree_lstm(weight_hh: Tensor, bias: Tensor, weight_ih: Tensor | None) -> PackedWeights:
    """Reorder gates i, o, u, f_left, f_right (over the input: i, o, u, f) to the kernel's i, f_left, f_right, o, u."""
    from cellrt.kernels.tree_lstm_step import pack_weights

    order, input_order = (0, 3, 4, 1, 2), (0, 3, 3, 1, 2)
    return pack_weights(
        torch.cat([weight_hh.chunk(5)[gate] for gate in order]),
        torch.cat([bias.chunk(5)[gate] for gate in order]),
        None if weight_ih is None else torch.cat([weight_ih.chunk(4)[gate] for gate in input_order]),
    )


def gates_of_tokens(table: Tensor, token: StepRows) -> ArenaRows:
    """Return the rows of a table of gates that tokens name: its last, which ``fold_with_end`` made, for those
    outside.
    """
    from cellrt.kernels.table_rows import table_rows

    return ArenaRows(table, table_rows(ArenaRows(*token), len(table) - 1), *token[2:])


def of_layer(given: StepRows, layer: int) -> StepRows:
    """Return one layer of rows ``[layers, size]``; rows ``[size]`` are those of the only one."""
    return given if given.values.dim() == 2 else given._replace(values=given.values[:, layer])


def to_read(made: StepRows) -> StepRows:
    """Return rows that were written, and where none was, one that may be read."""
    return made._replace(rows=made.rows.clamp(min=0))


def fold_with_end(embedding: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gates that each row of an embedding gives, and a row of NaN for tokens that have none.

    A kernel cannot raise an error for one row, nor read where there is nothing.
    """
    return torch.cat([linear(embedding, weight, bias), embedding.new_full((1, len(weight)), torch.nan)])


def choose_rows(
    weight: Tensor,
    bias: Tensor | None,
    end_token: int,
    inputs: Mapping[str, StepRows],
    outputs: Mapping[str, StepRows],
) -> None:
    """Projection and greedy choice: rows ``h`` of an arena to rows ``token`` and ``stop`` of arenas."""
    from cellrt.kernels.project_argmax import Projection, project_argmax

    stop_token = end_token if 0 <= end_token < len(weight) else None
    h, token, stop = (ArenaRows(*rows) for rows in (inputs["h"], outputs["token"], outputs["stop"]))
    project_argmax(h, Projection(weight, bias, stop_token, chosen_precision()), token, stop)


def sample_rows(
    end_token: int,
    temperature: float,
    top_k: int,
    top_p: float,
    inputs: Mapping[str, StepRows],
    outputs: Mapping[str, StepRows],
    logits: Tensor | None = None,
) -> None:
    """Sample tokens: read rows ``logits``, ``seed`` and ``step`` of arenas, and write rows ``token`` and ``stop``.

    Write ``step`` too if it is an output. ``logits``, if given apart, are in order and not in an arena.
    """
    from cellrt.kernels.sample import Sampling, sample

    given, made = ({name: ArenaRows(*rows) for name, rows in named.items()} for named in (inputs, outputs))
    sample(
        given["logits"] if logits is None else logits,
        given["seed"],
        given["step"],
        Sampling(end_token, temperature, top_k, top_p),
        made["token"],
        made["stop"],
        made.get("step"),
    )


def project_rows(weight: Tensor, bias: Tensor | None, h: StepRows) -> Tensor:
    """Return the logits of rows of an arena, in order: ``[rows that there may be, num_tokens]``."""
    from cellrt.kernels.project_logits import Projection, project_logits

    rows = ArenaRows(*h)
    logits = weight.new_empty(rows.most_rows, len(weight))
    project_logits(rows, Projection(weight, bias, None, chosen_precision()), logits)
    return logits


def score_rows(
    logits: Tensor, outputs: Mapping[str, StepRows], end_token: int | None, has_logits: bool, has_logprob: bool
) -> None:
    """Write rows ``logits`` and ``logprob`` of arenas, as far as a decoder has them; the given logits are in order.

    With an ``end_token`` make the greedy choice first, and write it to rows ``token`` and ``stop``.
    """
    from cellrt.kernels.score_tokens import score_tokens

    told = {"logits": has_logits, "logprob": has_logprob}
    made = {name: ArenaRows(*rows) for name, rows in outputs.items()}
    stop, end = (None, -1) if end_token is None else (made["stop"], end_token)
    copies, logprob = (made[name] if is_told else None for name, is_told in told.items())
    score_tokens(logits, made["token"], stop, end, copies, logprob)


def can_sample(inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
    """Return whether a GPU kernel samples from these rows, and a device is there.

    A cell without weights is on no device of its own.
    """
    from cellrt.kernels.sample import MOST_TOKENS

    logits, number = inputs.get("logits"), rows(dtype=torch.int64)
    if logits is None or logits.dtype not in TYPES or len(logits.shape) != 1 or logits.shape[0] > MOST_TOKENS:
        return False
    expected = {"logits": logits, "seed": number, "step": number}
    made = {"token": number, "stop": rows(dtype=torch.bool)}
    return has_device() and dict(inputs) == expected and dict(outputs) == made


def can_draw(weight: Tensor) -> bool:
    """Return whether the sampling kernels take as many tokens as a projection's weight has."""
    from cellrt.kernels.sample import MOST_TOKENS

    return len(weight) <= MOST_TOKENS


def can_fuse(
    module: nn.Module,
    inputs: Mapping[str, RowSpec],
    outputs: Mapping[str, RowSpec],
    expected_inputs: Mapping[str, RowSpec],
    expected_outputs: Mapping[str, RowSpec],
) -> bool:
    """Return whether a kernel takes the weights of ``module``, where they are, and a cell's inputs and outputs.

    What is expected is written for float32; it must have the type of the weights.
    """
    weights = list(module.parameters())
    dtype, device = weights[0].dtype, weights[0].device
    if dtype not in TYPES or not uses_triton(weights[0]) or any(map(is_parametrized, module.modules())):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    if any(weight.dtype != dtype or weight.device != device or not weight.is_contiguous() for weight in weights):
        return False
    return all(
        dict(specs) == {name: _in_type(spec, dtype) for name, spec in expected.items()}
        for specs, expected in ((inputs, expected_inputs), (outputs, expected_outputs))
    )


def vectors(**sizes: int) -> dict[str, RowSpec]:
    """Return rows of this many numbers, by name."""
    return {name: rows(size) for name, size in sizes.items()}


def chosen_precision() -> Precision:
    """Return the precision in which float32 is multiplied."""
    # allow_tf32 says the same, but raises where somebody has set this one.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _in_type(spec: RowSpec, dtype: torch.dtype) -> RowSpec:
    return spec._replace(dtype=dtype) if spec.dtype.is_floating_point else spec
