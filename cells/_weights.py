"""Packed and folded copies of weights, and the conditions for using the compiled CPU kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cellrt import DefinitionError, RowSpec
from cellrt.cells._host import project_rows
from cellrt.cells._narrow import WIDTH, project_bfloat16, project_float16
from cellrt.cells._recurrence import all_below
from cellrt.definition.compiled_form import USES_HAND_WRITTEN, CompiledForm
from cellrt.products.packed import PackedWeight, new_room, pack_gates, pack_linear, project

Value = TypeVar("Value")


_PLAIN_TYPES = (Tensor, nn.Parameter)
PROJECTS = {torch.bfloat16: project_bfloat16, torch.float16: project_float16}


def _is_inference(wants_gradients: bool | None = None) -> bool:
    """Return whether torch only computes values here: no gradients, tracing, export or dispatch modes.

    ``wants_gradients``: whether a tensor asks for them, if that was looked at.
    """
    if torch.is_grad_enabled() and wants_gradients is not False:
        return False
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def is_eager(*tensors: Tensor) -> bool:
    """Return whether all are plain tensors with values, used for inference (no gradient, tracing or export)."""
    if not _is_inference():
        return False
    return all(type(tensor) in _PLAIN_TYPES and not tensor.is_meta for tensor in tensors)


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """``module.name`` without the slow search of ``nn.Module``; parametrized ones are found by that search."""
    value = module._parameters.get(name)
    return getattr(module, name) if value is None else value


def is_fusable(*tensors: Tensor) -> bool:
    """Return whether the fused CPU kernels can take these inputs and states: for inference, plain float32 on a CPU.

    The weights are checked when they are packed.
    """
    if not USES_HAND_WRITTEN or not _is_inference() or torch.is_autocast_enabled("cpu"):
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
    return True


def is_fusable_half(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the fused CPU product can take these, and torch has no fast one: plain, of one dtype of two bytes.

    Without instructions for these torch multiplies several rows number by number.
    """
    if x.dtype not in PROJECTS or weight.dtype is not x.dtype or not x.is_cpu or not USES_HAND_WRITTEN:
        return False
    if type(x) not in _PLAIN_TYPES or type(weight) not in _PLAIN_TYPES or torch.is_autocast_enabled("cpu"):
        return False
    wants_gradients = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return _is_inference(wants_gradients) and not _is_fast_in_torch(x.dtype)


def is_packed(dtype: torch.dtype) -> bool:
    """Return whether the fused CPU product takes weights of this dtype, and torch has no fast one."""
    return dtype is torch.float32 or (dtype in PROJECTS and not _is_fast_in_torch(dtype))


@functools.cache
def _is_fast_in_torch(dtype: torch.dtype) -> bool:
    """Return whether this processor has instructions for a dtype of two bytes that torch's library uses."""
    of_library = torch.ops.mkldnn
    is_there = of_library._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else of_library._is_mkldnn_fp16_supported
    return bool(is_there())


def is_token(token: Tensor) -> bool:
    """Return whether the compiled kernels can take these tokens: plain int64 on a CPU."""
    return type(token) is Tensor and token.dtype is torch.int64 and token.is_cpu


def check_tokens(token: Tensor, table: nn.Embedding) -> Tensor:
    """``token`` in contiguous memory; ValueError unless it is one-dimensional, IndexError if one has no embedding."""
    check_shape("token", token, (token.shape[0],))
    token = token.contiguous()
    if not all_below(token.data_ptr(), token.shape[0], table.num_embeddings):
        nn.functional.embedding(token, table.weight)  # which refuses it
    return token


class Derived(Generic[Value]):
    """A value computed from parameters when first asked for, and again after one of them has changed.

    A change is noticed when a parameter is replaced, moved, or written in place (by an optimizer or
    ``load_state_dict``), but not when it is written through ``parameter.data`` or was made under
    ``torch.inference_mode``. Copies and pickles start empty; a cell's replicas, which share its weights, share this,
    too. Any thread may call ``of``; two that come first at the same time may both compute the value.
    """

    is_of_weights_alone = True

    def __init__(self, compute: Callable[..., Value]) -> None:
        self._compute = compute
        self._entry: tuple[list[Any], tuple[Tensor | None, ...], Value] | None = None

    def of(self, *parameters: Tensor | None) -> Value:
        """Return the value for these parameters (None where there is no bias)."""
        # What changes when the values of a parameter do: where they lie, and how often they were written.
        key = [
            None if tensor is None else (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for tensor in parameters
        ]
        entry = self._entry
        if entry is None or entry[0] != key:
            with torch.no_grad():
                value = self._compute(*parameters)
            # The aliases keep the memory of the parameters from being given to others, which would have their
            # key.
            aliases = tuple(None if tensor is None else tensor.detach() for tensor in parameters)
            entry = self._entry = (key, aliases, value)
        return entry[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._compute,)


def pack_with_bias(weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> tuple[PackedWeight, Tensor]:
    """Return a plain linear layer for ``project``; ``room`` is as for ``pack_linear``.

    Where there is no bias, an empty tensor: its address is 0, and no zeros are read, which are in no cache.
    """
    added = weight.new_empty(0) if bias is None else bias.detach().clone()
    check_float32_on_cpu("the weight", weight)
    check_float32_on_cpu("the bias", added)
    return pack_linear(weight, room), added


def pack_recurrent(gates: int) -> Callable[[Tensor, Tensor | None], tuple[PackedWeight, Tensor]]:
    """Return a function that packs the recurrent half of a cell with this many gates, and its bias."""
    return partial(_pack_recurrent, gates)


def _pack_recurrent(gates: int, weight: Tensor, bias: Tensor | None) -> tuple[PackedWeight, Tensor]:
    check_float32_on_cpu("the weight", weight)
    added = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach().clone()
    check_float32_on_cpu("the bias", added)
    return pack_gates(weight, gates), added


def fold_table(embedding: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gates that each row of an embedding gives: ``embedding @ weight.T + bias``."""
    return linear(embedding, weight, bias).contiguous()


def check_float32_on_cpu(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a weight that does not go with float32 inputs on a CPU."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu:
        raise TypeError(f"the inputs are float32 on cpu, but {name} is {tensor.dtype} on {tensor.device}")


def are_float32_on_cpu(*weights: Tensor | None) -> bool:
    """Return whether the compiled kernels can take these weights."""
    return all(weight is None or (weight.dtype is torch.float32 and weight.is_cpu) for weight in weights)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor) -> Tensor:
    """``x @ weight.T + bias`` by the fused kernels; ``x`` ``[rows, depth]`` float32 on a CPU."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.units)
    project(x.data_ptr(), x.shape[0], weight.depth, weight.address, bias.data_ptr(), weight.units, out.data_ptr())
    return out


def pack_half_with_bias(weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> tuple[PackedWeight, Tensor]:
    """Return a linear layer of numbers of two bytes for ``half_linear``; the bias, if any, is widened.

    ``room`` is as for ``pack_linear``.
    """
    columns, depth = weight.shape
    count = -(-columns // WIDTH)
    padded = weight.detach()
    if columns < count * WIDTH:
        padded = weight.new_zeros(count * WIDTH, depth)
        padded[:columns] = weight.detach()
    room = new_room(count * depth * WIDTH // 2) if room is None else room
    values = room.view(weight.dtype).view(count, depth, WIDTH)
    values.copy_(padded.view(count, WIDTH, depth).transpose(1, 2))
    return PackedWeight(values, columns, depth), torch.empty(0) if bias is None else bias.detach().float()


def half_linear(x: Tensor, weight: PackedWeight, bias: Tensor) -> Tensor:
    """``x @ weight.T + bias``, summed in float32 and then rounded; ``x`` ``[rows, depth]`` has the weight's dtype."""
    wide, out = x.float().contiguous(), torch.empty(len(x), weight.units)
    sizes = len(x), weight.depth, weight.address, 0, bias.data_ptr(), weight.units
    PROJECTS[x.dtype](wide.data_ptr(), *sizes, out.data_ptr())
    return out.to(x.dtype)


def compiled_linear(given: str, output: str, weight: PackedWeight, bias: Tensor) -> CompiledForm:
    """Return the compiled form of ``packed_linear``, with the names of its input and output."""
    words = np.array([weight.depth, weight.address, bias.data_ptr(), weight.units])
    return CompiledForm(
        project_rows,
        {given: RowSpec((weight.depth,))},
        {output: RowSpec((weight.units,))},
        words,
        (weight, bias),
        is_batch_invariant=True,
    )


def copy_embedding(table: nn.Embedding) -> nn.Parameter:
    """Return a copy of its weights; DefinitionError for an embedding that changes its rows as it reads them."""
    if table.max_norm is not None:
        raise DefinitionError(f"an embedding that rescales the rows it reads (max_norm) is not supported: {table}")
    return nn.Parameter(table.weight.detach().clone())


def check_one_dtype(name: str, *modules: nn.Module) -> None:
    """Raise DefinitionError, naming what is made of them, unless the weights of these modules have one dtype."""
    dtypes = {weight.dtype: type(module).__name__ for module in modules for weight in module.parameters()}
    if len(dtypes) > 1:
        described = ", ".join(f"{module} has {dtype}" for dtype, module in dtypes.items())
        raise DefinitionError(f"{name}: expected weights of one dtype, but {described}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape``."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
