"""Mamba 2 (Dao and Gu 2024): layers whose state is one matrix a head, however long the text is.

    gate, u, dt = project(norm(x))
    u           = silu(convolution of u with those of the last steps)         each channel by itself
    v, B, C     = u;   dt = softplus(dt + bias)
    S           = exp(-dt exp(a)) S + dt v B^T;   y = S C + d v               each head by itself
    x           = x + out(norm(y silu(gate)))

A step reads one token. What a row carries from step to step is ``conv``, the last inputs of each layer's convolution,
and ``ssm``, the matrices S of all layers and heads; the runtime keeps, moves and batches them as an LSTM's ``h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

import cellrt
from cellrt import Cell, PagedRows, Spans, cell, token
from cellrt.cells._sampling_head import sampling_head_form
from cellrt.cells.attention import Linear
from cellrt.cells.language_models import Memory, NextToken, is_one_of, limits_of
from cellrt.cells.row_layers import RMSNorm, likeliest
from cellrt.cells.sampling import SampledToken, Sampler, SamplingLimits, ends_of, sampling_inputs
from cellrt.definition.compiled_form import CompiledForm


@dataclass(frozen=True)
class Mamba2Sizes:
    """The sizes of a model.

    Attributes:
        vocabulary, hidden, layers, heads, head_dim, state: sizes; ``state`` is that of a head's matrix beside head_dim.
        groups: the number of groups of heads that share B and C.
        kernel: steps that a convolution sees.
        epsilon: the epsilon of the norms.
        bias, conv_bias: whether the linear layers, and the convolutions, have one.
        least_dt, most_dt: dt is kept between them.
        wide_residual: whether rows between layers are float32 whatever the weights are.
        is_tied: the head is the embedding.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    state: int
    groups: int = 1
    kernel: int = 4
    epsilon: float = 1e-5
    bias: bool = False
    conv_bias: bool = True
    least_dt: float = 0.0
    most_dt: float = float("inf")
    wide_residual: bool = True
    is_tied: bool = False

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The number of channels of a convolution."""
        return self.inner + 2 * self.groups * self.state


class State(NamedTuple):
    """The outputs of a step: rows ``x`` ``[rows, hidden]``, of the whole stack behind the last norm, and both
    states.
    """

    x: Tensor
    conv: Tensor
    ssm: Tensor


class Mamba2Layer(nn.Module):
    """One layer's step; its rows ``x`` are what is added to those that it reads."""

    def __init__(self, sizes: Mamba2Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm = RMSNorm(sizes.hidden, eps=sizes.epsilon)
        self.project = Linear(sizes.hidden, sizes.inner + sizes.channels + sizes.heads, bias=sizes.bias)
        self.conv = nn.Parameter(torch.randn(sizes.channels, 1, sizes.kernel))
        self.conv_bias = nn.Parameter(torch.zeros(sizes.channels)) if sizes.conv_bias else None
        self.dt_bias, self.log_a = nn.Parameter(torch.zeros(sizes.heads)), nn.Parameter(torch.zeros(sizes.heads))
        self.d = nn.Parameter(torch.ones(sizes.heads))
        self.gated_norm = RMSNorm(sizes.inner, eps=sizes.epsilon)
        self.out = Linear(sizes.inner, sizes.hidden, bias=sizes.bias)

    def forward(self, x: Tensor, conv: Tensor, ssm: Tensor) -> State:
        """``x`` ``[rows, hidden]``, ``conv`` ``[rows, channels, kernel - 1]``, ``ssm`` float32 ``[rows, heads,
        head_dim, state]``."""
        sizes = self.sizes
        parts = self.project(self.norm(x)).split([sizes.inner, sizes.channels, sizes.heads], 1)
        gate, channels, dt = parts
        seen = torch.cat([conv, channels[:, :, None]], 2)
        u = (seen * self.conv[:, 0]).sum(2)
        u = silu(u if self.conv_bias is None else u + self.conv_bias).float()
        shared = sizes.groups * sizes.state
        v, b, c = u.split([sizes.inner, shared, shared], 1)
        v = v.unflatten(1, (sizes.heads, sizes.head_dim))
        b, c = (part.unflatten(1, (sizes.groups, 1, sizes.state)) for part in (b, c))
        each = sizes.heads // sizes.groups
        b, c = (part.expand(-1, -1, each, -1).flatten(1, 2)[:, :, None] for part in (b, c))
        dt = softplus(dt.float() + self.dt_bias.float()).clamp(sizes.least_dt, sizes.most_dt)[:, :, None, None]
        decay = torch.exp(-dt * self.log_a.float().exp()[:, None, None])
        ssm = ssm * decay + dt * v[..., None] * b
        read = (ssm * c).sum(3) + v * self.d.float()[:, None]
        added = self.out(self._normed(read.flatten(1), gate.float()).to(gate.dtype))
        return State(added, seen[:, :, 1:], ssm)

    def _normed(self, read: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of each group by itself, of rows that are gated first."""
        groups, weight = self.sizes.groups, self.gated_norm.weight.float()
        rows = (read * silu(gate)).unflatten(1, (groups, -1))
        normed: Tensor = rows * torch.rsqrt(rows.square().mean(2, keepdim=True) + self.sizes.epsilon)
        return normed.flatten(1) * weight


class Mamba2(nn.Module):
    """The whole stack's step: tokens int64 ``[rows]`` and the states of all layers -> ``State``."""

    def __init__(self, sizes: Mamba2Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Mamba2Layer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, eps=sizes.epsilon)
        self.head = Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.is_tied:
            self.head.weight = self.embedding.weight


class Step(nn.Module):
    """All but the head, which a prompt's tokens need not go through."""

    def __init__(self, model: Mamba2) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = model.embedding, model.layers, model.norm
        self.is_wide = model.sizes.wide_residual

    def forward(self, token: Tensor, conv: Tensor, ssm: Tensor) -> State:
        """``conv`` and ``ssm`` have a dimension of layers behind the first."""
        x = self.embedding(token)
        dtype, convs, ssms = x.dtype, [], []
        x = x.float() if self.is_wide else x
        for number, layer in enumerate(self.layers):
            made = layer(x.to(dtype), conv[:, number], ssm[:, number])
            x = x + made.x
            convs.append(made.conv)
            ssms.append(made.ssm)
        return State(self.norm(x.to(dtype)), torch.stack(convs, 1), torch.stack(ssms, 1))


class Head(nn.Module):
    """Rows ``[rows, hidden]`` -> the likeliest next token of each."""

    def __init__(self, head: Linear, end_token: int | Sequence[int]) -> None:
        super().__init__()
        self.head, self.ends = head, ends_of(end_token)

    def forward(self, x: Tensor) -> NextToken:
        """``x`` as a ``Step`` gives it."""
        best, logprob = likeliest(self.head(x))
        return NextToken(best, logprob, is_one_of(best, self.ends))


class SamplingHead(nn.Module):
    """Rows ``[rows, hidden]`` -> the next token of each as its request asks for it."""

    def __init__(
        self, head: Linear, end_token: int | Sequence[int], limits: SamplingLimits, page_size: int | None = None
    ) -> None:
        super().__init__()
        self.head, self.vocabulary, self._page_size = head, head.out_features, page_size
        self.sampler = Sampler(self.vocabulary, end_token, limits)

    def forward(
        self,
        x: Tensor,
        token: Tensor,
        history: PagedRows,
        spans: Spans,
        settings: Tensor,
        seed: Tensor,
        stops: Tensor,
        biases: Tensor,
        mask: Tensor,
    ) -> SampledToken:
        """``x`` as a ``Step`` gives it, of the tokens; the rest: see ``Sampler``."""
        made: SampledToken = self.sampler(self.head(x), token, history, spans, settings, seed, stops, biases, mask)
        return made

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of the head, if it can have one."""
        if self._page_size is None:
            return None
        return sampling_head_form(None, self.head, self.sampler.ends, self.sampler.limits, self._page_size)


class RecurrentModel(NamedTuple):
    """A language model with a state of fixed size, for ``cellrt.unfolders.complete_recurrent``.

    Attributes:
        step: token and states -> x and the same states, which are carried.
        head: x -> as ``NextToken``. Of a model that samples it also reads the token, appends it to the growing state
            ``history``, and has as inputs what the request asks for; it makes a ``SampledToken``.
        memory: the cell of a model that samples which appends the prompt's tokens to ``history``.
    """

    step: Cell
    head: Cell
    memory: Cell | None = None


def recurrent_language_model(
    model: Mamba2,
    end_token: int | Sequence[int],
    *,
    name: str = "language model",
    page_size: int = 16,
    max_batch: int = 64,
    sampling: bool | SamplingLimits = False,
) -> RecurrentModel:
    """Return the cells of a model.

    Args:
        model: its weights are copied.
        end_token: the one that ends a text, or several.
        name: the name with which the cells' names begin.
        page_size: tokens of a page, of a model that samples.
        max_batch: most requests of a task.
        sampling: whether requests say how tokens are chosen, and the most that they may ask for.
    """
    sizes, dtype = model.sizes, model.embedding.weight.dtype
    conv = cellrt.rows(sizes.layers, sizes.channels, sizes.kernel - 1, dtype=dtype)
    ssm = cellrt.rows(sizes.layers, sizes.heads, sizes.head_dim, sizes.state)
    step = cell(Step(model), {"token": token, "conv": conv, "ssm": ssm}, name=f"{name}: step", max_batch=max_batch)
    x, limits = {"x": cellrt.rows(sizes.hidden, dtype=dtype)}, limits_of(sampling)
    if limits is None:
        return RecurrentModel(step, cell(Head(model.head, end_token), x, name=f"{name}: head", max_batch=max_batch))
    asked = {"token": token, **sampling_inputs(limits, page_size, sizes.vocabulary)}
    head = SamplingHead(model.head, end_token, limits, page_size)
    read = {key: asked[key] for key in ("token", "history")}
    return RecurrentModel(
        step,
        cell(head, {**x, **asked}, name=f"{name}: head", max_batch=max_batch),
        cell(Memory(page_size), read, name=f"{name}: memory", max_batch=max_batch, max_batch_rows=256),
    )
