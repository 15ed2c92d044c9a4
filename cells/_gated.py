"""What the LSTM and GRU cells share: parameters in torch's layout, packed weights, and the choice of the fast
path."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cellrt.cells._host import project_rows
from cellrt.cells._panels import PackedWeight, pack_gates, pack_linear, project
from cellrt.cells._recurrence import all_below
from cellrt.definition.host_kernel import HostKernel
from cellrt.definition.spec import RowSpec
from cellrt.errors import DefinitionError

Value = TypeVar("Value")


_PLAIN_TYPES = (Tensor, nn.Parameter)


def _is_inference() -> bool:
    """Whether torch only computes values here: no gradients, tracing or export."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are plain tensors with values, used for inference (no gradient, tracing or export)."""
    if not _is_inference():
        return False
    return all(type(tensor) in _PLAIN_TYPES and not tensor.is_meta for tensor in tensors)


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """`module.name` without the slow search of `nn.Module`; parametrized ones are found by that search."""
    value = module._parameters.get(name)
    return getattr(module, name) if value is None else value


def is_fusable(*tensors: Tensor) -> bool:
    """Whether the fused CPU kernels can take these inputs and states: for inference, plain float32 on a CPU.

    The weights are checked when they are packed.
    """
    if not _is_inference() or torch.is_autocast_enabled("cpu"):
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
    return True


class Derived(Generic[Value]):
    """A value computed from parameters when first asked for, and again after one of them has changed.

    A change is noticed when a parameter is replaced, moved, or written in place (by an optimizer or
    `load_state_dict`), but not when it is written through `parameter.data` or was made under
    `torch.inference_mode`. Copies and pickles start empty. Any thread may call `of`; two that come first at
    the same time may both compute the value.
    """

    def __init__(self, compute: Callable[..., Value]) -> None:
        self._compute = compute
        self._entry: tuple[list[Any], tuple[Tensor | None, ...], Value] | None = None

    def of(self, *parameters: Tensor | None) -> Value:
        """The value for these parameters (None where there is no bias)."""
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


def pack_with_bias(weight: Tensor, bias: Tensor | None) -> tuple[PackedWeight, Tensor]:
    """A plain linear layer for `project`."""
    return pack_linear(weight), _bias_or_zeros(weight, bias)


def pack_lstm(weight: Tensor, bias: Tensor | None) -> tuple[PackedWeight, Tensor]:
    """The recurrent half of an LSTM for `lstm_run`."""
    return pack_gates(weight, 4), _bias_or_zeros(weight, bias)


def pack_gru(weight: Tensor, bias: Tensor | None) -> tuple[PackedWeight, Tensor]:
    """The recurrent half of a GRU for `gru_run`."""
    return pack_gates(weight, 3), _bias_or_zeros(weight, bias)


def fold_table(embedding: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The gates that each row of an embedding gives: `embedding @ weight.T + bias`."""
    return linear(embedding, weight, bias).contiguous()


def check_float32_on_cpu(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a weight that does not go with float32 inputs on a CPU."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu:
        raise TypeError(f"the inputs are float32 on cpu, but {name} is {tensor.dtype} on {tensor.device}")


def _bias_or_zeros(weight: Tensor, bias: Tensor | None) -> Tensor:
    check_float32_on_cpu("the weight", weight)
    if bias is not None:
        check_float32_on_cpu("the bias", bias)
    return weight.new_zeros(weight.shape[0]) if bias is None else bias.detach().clone()


def are_float32_on_cpu(*weights: Tensor | None) -> bool:
    """Whether the compiled kernels can take these weights."""
    return all(weight is None or (weight.dtype is torch.float32 and weight.is_cpu) for weight in weights)


class GatedModule(nn.Module):
    """A module with the parameters of torch's recurrent cells: `weight_ih`, `bias_ih` if it multiplies
    inputs, and `weight_hh`, `bias_hh` if it multiplies states; the gates one below the other."""

    gates: ClassVar[int]
    torch_cell: ClassVar[type[nn.Module]]
    torch_layers: ClassVar[type[nn.RNNBase]]
    weight_ih: nn.Parameter
    weight_hh: nn.Parameter
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(self, input_size: int | None, hidden_size: int, bias: bool, *, is_recurrent: bool) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        bound = 1 / math.sqrt(hidden_size)
        widths = {"ih": input_size, "hh": hidden_size if is_recurrent else None}
        for half, width in widths.items():
            if width is not None:
                rows = self.gates * hidden_size
                self.register_parameter(
                    f"weight_{half}", nn.Parameter(torch.empty(rows, width).uniform_(-bound, bound))
                )
                offset = nn.Parameter(torch.empty(rows).uniform_(-bound, bound)) if bias else None
                self.register_parameter(f"bias_{half}", offset)
        self._packed_ih = Derived(pack_with_bias)
        self._packed_hh = Derived(pack_lstm if self.gates == 4 else pack_gru)

    def packed_ih(self) -> tuple[PackedWeight, Tensor]:
        """The packed input half and its bias."""
        return self._packed_ih.of(own_parameter(self, "weight_ih"), own_parameter(self, "bias_ih"))

    def packed_hh(self) -> tuple[PackedWeight, Tensor]:
        """The packed recurrent half and its bias."""
        return self._packed_hh.of(own_parameter(self, "weight_hh"), own_parameter(self, "bias_hh"))

    def input_gates(self, x: Tensor) -> Tensor:
        """`x` `[rows, input_size]` times the input weight, plus its bias: `[rows, gates * hidden_size]`."""
        if not is_fusable(x):
            return linear(x, self.weight_ih, self.bias_ih)
        weight, bias = self.packed_ih()
        check_shape("x", x, (x.shape[0], weight.depth))
        return packed_linear(x, weight, bias)

    def input_kernel(self, output: str) -> HostKernel | None:
        """The compiled form of a module that is `input_gates` alone, with the name of its output."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self.packed_ih()
        return linear_kernel("x", output, weight, bias)

    def take_weights(self, module: nn.Module, suffix: str | None = None) -> None:
        """Copy those weights of a torch module that this one has.

        `suffix` is what torch puts behind their names, such as "_l1_reverse"; by default that of a cell, or of the
        first layer.
        """
        if suffix is None:
            suffix = "_l0" if isinstance(module, nn.RNNBase) else ""
        for name, parameter in list(self.named_parameters(recurse=False)):
            value = getattr(module, name + suffix).detach().clone()
            if value.shape != parameter.shape:
                raise DefinitionError(f"{name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
            setattr(self, name, nn.Parameter(value))

    def extra_repr(self) -> str:
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"


class EmbeddedModule(GatedModule):
    """A `GatedModule` whose inputs are tokens; `fold` says whether gates come from a table instead of a
    product."""

    embedding: nn.Embedding
    fold: bool

    def add_embedding(self, num_embeddings: int, embedding_size: int, fold: bool) -> None:
        """Called at the end of the constructor."""
        self.embedding = nn.Embedding(num_embeddings, embedding_size)
        self.fold = fold
        self._table = Derived(fold_table)

    def take_embedding(self, table: nn.Embedding) -> None:
        """Copy the weights of a torch embedding; see `copy_embedding`."""
        self.embedding.weight = copy_embedding(table)

    def is_fusable_with(self, token: Tensor, *states: Tensor) -> bool:
        """Whether the fused kernels can take these tokens and states."""
        if type(token) is not Tensor or token.dtype is not torch.int64 or not token.is_cpu:
            return False
        return is_fusable(*states)

    def check_tokens(self, token: Tensor) -> Tensor:
        """`token` in contiguous memory; ValueError unless it is one-dimensional, IndexError if one has no
        embedding."""
        check_shape("token", token, (token.shape[0],))
        token = token.contiguous()
        if not all_below(token.data_ptr(), token.shape[0], self.embedding.num_embeddings):
            raise IndexError(f"a token is outside the embedding, which has {self.embedding.num_embeddings} rows")
        return token

    def folded(self) -> Tensor:
        """The gates of every token `[num_embeddings, gates * hidden_size]`."""
        names = "weight_ih", "bias_ih"
        return self._table.of(own_parameter(self.embedding, "weight"), *(own_parameter(self, name) for name in names))

    def folded_on_cpu(self) -> Tensor:
        """The same for the fused kernels; TypeError for weights of another type or place."""
        table = self.folded()
        check_float32_on_cpu("the table of gates", table)
        return table

    def token_gates(self, token: Tensor) -> Tensor:
        """The input half of the gates in plain torch."""
        if self.fold and is_eager(token, self.embedding.weight):
            return embedding(token, self.folded())
        return linear(embedding(token, self.embedding.weight), self.weight_ih, self.bias_ih)


def copy_embedding(table: nn.Embedding) -> nn.Parameter:
    """A copy of its weights; DefinitionError for an embedding that changes its rows as it reads them."""
    if table.max_norm is not None:
        raise DefinitionError(f"an embedding that rescales the rows it reads (max_norm) is not supported: {table}")
    return nn.Parameter(table.weight.detach().clone())


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor) -> Tensor:
    """`x @ weight.T + bias` by the fused kernels; `x` `[rows, depth]` float32 on a CPU."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.units)
    project(x.data_ptr(), x.shape[0], weight.depth, weight.address, bias.data_ptr(), weight.units, out.data_ptr())
    return out


def linear_kernel(given: str, output: str, weight: PackedWeight, bias: Tensor) -> HostKernel:
    """The compiled form of `packed_linear`, with the names of its input and output."""
    words = np.array([weight.depth, weight.address, bias.data_ptr(), weight.units])
    return HostKernel(
        project_rows, {given: RowSpec((weight.depth,))}, {output: RowSpec((weight.units,))}, words, (weight, bias)
    )


def check_torch_module(module: nn.Module, cell: type[nn.Module], layers: type[nn.RNNBase]) -> Any:
    """Return `module` if its weights can be taken: a torch cell, or one layer in one direction without
    projection."""
    if check_layers(module, cell, layers) != (1, 1):
        raise DefinitionError(f"only a single layer in a single direction can be taken, not {module}")
    return module


def check_layers(module: nn.Module, cell: type[nn.Module], layers: type[nn.RNNBase]) -> tuple[int, int]:
    """The numbers of layers and of directions of a torch module; DefinitionError for one that cannot be taken."""
    if isinstance(module, layers):
        if module.proj_size != 0:
            raise DefinitionError(f"a projection of the state (proj_size) is not supported: {module}")
        return module.num_layers, 2 if module.bidirectional else 1
    if isinstance(module, cell):
        return 1, 1
    raise DefinitionError(f"expected {cell.__name__} or {layers.__name__}, not {type(module).__name__}")


def check_one_dtype(name: str, *modules: nn.Module) -> None:
    """Raises DefinitionError, naming what is made of them, unless the weights of these modules have one dtype."""
    dtypes = {weight.dtype: type(module).__name__ for module in modules for weight in module.parameters()}
    if len(dtypes) > 1:
        described = ", ".join(f"{module} has {dtype}" for dtype, module in dtypes.items())
        raise DefinitionError(f"{name}: expected weights of one dtype, but {described}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def check_batch_sizes(batch_sizes: Sequence[int]) -> NDArray[np.int64]:
    """The rows of each step as an array; ValueError unless there is a step and they are positive and never
    increase."""
    sizes = np.array(batch_sizes, np.int64)
    if sizes.size == 0 or sizes[-1] < 1 or (sizes.size > 1 and bool((sizes[1:] > sizes[:-1]).any())):
        raise ValueError(f"batch_sizes must be positive and must not increase: {list(batch_sizes)}")
    return sizes


def check_rows(sizes: NDArray[np.int64], rows: int) -> None:
    """Raise ValueError unless packed inputs of `rows` rows fit the rows of each step."""
    total = int(sizes.sum()) if sizes.size > 1 else int(sizes[0])
    if total != rows:
        raise ValueError(f"batch_sizes sum to {total}, but the step inputs have {rows} rows")


def unroll(
    batch_sizes: Sequence[int],
    step: Callable[..., tuple[Tensor, ...]],
    inputs: Tensor | None,
    states: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The steps-first form by calling `step(inputs?, *states)` once a step; returns what the steps return,
    packed.

    The first results of a step are the states of the next.
    """
    results: list[tuple[Tensor, ...]] = []
    start = 0
    for rows in batch_sizes:
        given = [] if inputs is None else [inputs[start : start + rows]]
        results.append(step(*given, *(state[:rows] for state in states)))
        states = results[-1][: len(states)]
        start += rows
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
