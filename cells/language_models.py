"""A decoder-only Transformer as one cell, or as one a layer: prompts in pieces and single steps share its tasks.

    rows = model(tokens);  token = argmax(logits(rows));  stop = token == end_token

As one cell it costs the scheduler one task a step. As layers, requests join between two of them, and layers that models
have in common are one cell. ``python -m benchmarks lm`` compares the two.

Of the rows of a prompt nobody asks for the next token but of the last, so on a CPU logits are made for the rows that
are read. On a GPU they are made for all: to know how many those are, the host would wait for the device, and no task
could be captured.

Greedy models choose the likeliest token; those made with ``sampling`` choose as each request asks (``sampling.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cellrt import Cell, PagedRows, RowSpec, cell, grows, rows, token
from cellrt import Spans as Steps
from cellrt.cells._llama_parts import embedding_form, head_form, layer_form
from cellrt.cells._llama_step import LlamaStep
from cellrt.cells._sampling_head import memory_form, sampling_head_form
from cellrt.cells._sampling_step import SamplingStep
from cellrt.cells._weights import is_eager, is_token
from cellrt.cells.llama import Llama, LlamaLayers, LlamaSizes
from cellrt.cells.paged_attention import LayerPages, Pages, Spans, TracedLayers
from cellrt.cells.row_layers import likeliest
from cellrt.cells.sampling import (
    Asked,
    SampledToken,
    Sampler,
    SamplingLimits,
    ends_of,
    sample,
    sampling_inputs,
    sampling_outputs,
)
from cellrt.definition.compiled_form import CompiledForm, TracedPages, is_traced


class NextToken(NamedTuple):
    """The outputs of a language model's step, ``[rows]`` each.

    Attributes:
        token: int64, the likeliest next token.
        logprob: float32, its log-probability.
        stop: bool, whether it is the end token.
    """

    token: Tensor
    logprob: Tensor
    stop: Tensor


class GreedyLanguageModel(nn.Module):
    """Llama's family, with the keys and values of all its layers as one growing state.

    Args:
        model: copied when the cell is made.
        end_token: the one that ends a text, or several.
        page_size: rows of a page; without, the module has no compiled form.
    """

    def __init__(self, model: Llama, end_token: int | Sequence[int], page_size: int | None = None) -> None:
        super().__init__()
        self.model, self.ends, self._page_size = model, ends_of(end_token), page_size
        self._in_one_call = LlamaStep(end_token)

    def forward(self, token: Tensor, kv: PagedRows) -> NextToken:
        """``token`` int64 ``[rows]``; ``kv`` rows ``[layers, 2, kv_heads, head_dim]``, in pages of dimension 2."""
        if (made := self._in_one_call.run(self.model, token, kv)) is not None:
            return NextToken(*made)
        rows = self.model(token, Spans(kv.offsets, kv.positions), pages_of_layers(kv))
        # Of single steps all are read, but for a few; and on a GPU nobody waits to know which of a prompt's are.
        if not is_traced(token) and (len(kv.tables) == len(token) or not is_token(token) or not is_eager(token)):
            best, logprob = likeliest(self.model.logits(rows))
            return NextToken(best, logprob, is_one_of(best, self.ends))
        chosen = kv.is_read.nonzero()[:, 0]
        some, its_logprob = likeliest(self.model.logits(rows[chosen]))
        best, logprob = torch.zeros_like(token), rows.new_zeros(rows.shape[:1], dtype=torch.float32)
        best, logprob = best.index_put((chosen,), some), logprob.index_put((chosen,), its_logprob)
        return NextToken(best, logprob, is_one_of(best, self.ends))

    def compiled_form(self) -> CompiledForm | None:
        """Return the step without Python; None where only the modules can take it."""
        if self._page_size is None or type(self.model) is not Llama:
            return None
        made = {"token": TOKEN, "logprob": LOGPROB, "stop": STOP}
        return self._in_one_call.form(self.model, {"token": TOKEN, "kv": _kv_of(self.model, self._page_size)}, made)


class SamplingLanguageModel(nn.Module):
    """Llama's family with sampling: the keys and values of all layers and the tokens so far as two growing states.

    Args:
        model: copied when the cell is made.
        end_token: the one that ends a text, or several.
        limits: the most that a request may ask for.
        page_size: rows of a page; without, the module has no compiled form.
    """

    def __init__(
        self,
        model: Llama,
        end_token: int | Sequence[int],
        limits: SamplingLimits,
        page_size: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.ends, self.limits, self._page_size = model, ends_of(end_token), limits, page_size
        self.vocabulary = model.sizes.vocabulary
        self._in_one_call = SamplingStep(end_token)

    def forward(
        self,
        token: Tensor,
        kv: PagedRows,
        history: PagedRows,
        spans: Steps,
        settings: Tensor,
        seed: Tensor,
        stops: Tensor,
        biases: Tensor,
        mask: Tensor,
    ) -> SampledToken:
        """``token`` and ``kv``: see ``GreedyLanguageModel``, ``history`` int32 rows ``[]``; the rest as ``Asked``."""
        asked = Asked(settings, seed, stops, biases, mask)
        if (made := self._in_one_call.sample(self.model, token, kv, history, spans, asked, self.limits)) is not None:
            return made
        x = self.model(token, Spans(kv.offsets, kv.positions), pages_of_layers(kv))
        history.append(token.to(torch.int32))
        if token.is_cpu and is_eager(token):
            chosen = kv.is_read.nonzero()[:, 0]
            x = x[chosen]
        else:
            chosen = torch.arange(len(token), device=token.device)
        return sample(self.model.logits(x), chosen, asked, history, spans, self.ends, self.limits)

    def compiled_form(self) -> CompiledForm | None:
        """Return the step without Python; None where only the modules can take it."""
        if self._page_size is None or type(self.model) is not Llama:
            return None
        inputs = {"token": TOKEN, "kv": _kv_of(self.model, self._page_size)}
        inputs |= sampling_inputs(self.limits, self._page_size, self.vocabulary)
        return self._in_one_call.form(self.model, inputs, sampling_outputs(self.limits))


def is_one_of(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """Return which tokens are among the ends, bool of their shape."""
    found = tokens == ends[0]
    for end in ends[1:]:
        found = found | (tokens == end)
    return found


TOKEN, LOGPROB, STOP = rows(dtype=torch.int64), rows(dtype=torch.float32), rows(dtype=torch.bool)


def _kv_of(model: Llama, page_size: int) -> RowSpec:
    """Return the keys and values of all layers as one growing state."""
    sizes, heads = model.sizes, model.sizes.attention
    shape = sizes.layers, 2, heads.num_kv_heads, heads.size
    return grows(*shape, dtype=model.embedding.weight.dtype, page_size=page_size, page_dim=2)


def _kv_of_layer(sizes: LlamaSizes, page_size: int, dtype: torch.dtype = torch.float32) -> RowSpec:
    """Return the spec of the keys and values of one layer."""
    heads = sizes.attention
    return grows(2, heads.num_kv_heads, heads.size, dtype=dtype, page_size=page_size, page_dim=1)


def pages_of_layers(kv: PagedRows) -> LayerPages | TracedLayers:
    """Return the pages of each layer's keys and values, in place: what one layer has of a page lies together."""
    if isinstance(kv, TracedPages):
        return TracedLayers(kv)
    return LayerPages(kv.pages, kv.tables, kv.lengths)


def language_model(
    model: Llama,
    end_token: int | Sequence[int],
    *,
    name: str = "language model",
    page_size: int = 16,
    max_batch: int = 64,
    max_batch_rows: int = 256,
    sampling: bool | SamplingLimits = False,
) -> Cell:
    """Return a cell that reads tokens and says the next: inputs ``token`` and ``kv``, outputs as ``NextToken``.

    Args:
        model: its weights are copied.
        end_token: the one that ends a text, or several.
        name: the name of the cell.
        page_size: tokens of a page.
        max_batch: most requests of a task.
        max_batch_rows: most tokens of a task; longer prompts are read in pieces.
        sampling: whether requests say how tokens are chosen, and the most that they may ask for. Then the cell has the
            inputs of ``SamplingLanguageModel``, and outputs as ``SampledToken``.
    """
    inputs = {"token": token, "kv": _kv_of(model, page_size)}
    limits = limits_of(sampling)
    if limits is None:
        module: nn.Module = GreedyLanguageModel(model, end_token, page_size)
    else:
        module = SamplingLanguageModel(model, end_token, limits, page_size)
        inputs |= sampling_inputs(limits, page_size, model.sizes.vocabulary)
    return cell(module, inputs, name=name, max_batch=max_batch, max_batch_rows=max_batch_rows)


def limits_of(sampling: bool | SamplingLimits) -> SamplingLimits | None:
    """Return the limits of a model that samples; None for one that does not."""
    return sampling if isinstance(sampling, SamplingLimits) else SamplingLimits() if sampling else None


class LayeredModel(NamedTuple):
    """A language model of one cell a layer, for ``cellrt.unfolders.complete``.

    Attributes:
        embed: token -> x ``[hidden]``.
        layers: x and the layer's growing state ``kv`` -> x.
        head: x -> as ``NextToken``. Of a model that samples it also reads the token, appends it to the growing state
            ``history``, and has as inputs what the request asks for.
        memory: the cell of a model that samples which appends the prompt's tokens to ``history``.
    """

    embed: Cell
    layers: tuple[Cell, ...]
    head: Cell
    memory: Cell | None = None


class Hidden(NamedTuple):
    """Rows ``[rows, hidden]`` between two layers."""

    x: Tensor


class Embedding(nn.Module):
    """The embedding of a model, by itself."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.embedding = model.embedding

    def forward(self, token: Tensor) -> Hidden:
        """``token`` int64 ``[rows]``."""
        return Hidden(self.embedding(token))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of the embedding, if it can have one."""
        return embedding_form(self.embedding, {"token": TOKEN}, {"x": rows(self.embedding.embedding_dim)})


class Layer(nn.Module):
    """One layer of a model, by itself."""

    def __init__(self, sizes: LlamaSizes, layer: Any, page_size: int) -> None:
        super().__init__()
        self.layers = LlamaLayers(sizes, [layer])
        self._sizes, self._page_size = sizes, page_size

    def forward(self, x: Tensor, kv: PagedRows) -> Hidden:
        """``x`` ``[rows, hidden]``; ``kv`` rows ``[2, kv_heads, head_dim]``, in pages of dimension 1."""
        pages = Pages(kv.pages[:, 0], kv.pages[:, 1], kv.tables, kv.lengths)
        return Hidden(self.layers(x.clone(), Spans(kv.offsets, kv.positions), [pages]))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of the layer, if it can have one."""
        x, sizes = rows(self._sizes.hidden), self._sizes
        return layer_form(self.layers, sizes, {"x": x, "kv": _kv_of_layer(sizes, self._page_size)}, {"x": x})


class Head(nn.Module):
    """The last norm and the head of a model, by themselves."""

    def __init__(self, model: Llama, end_token: int | Sequence[int]) -> None:
        super().__init__()
        self.norm, self.head, self.ends = model.norm, model.head, ends_of(end_token)

    def forward(self, x: Tensor) -> NextToken:
        """``x`` ``[rows, hidden]``."""
        made = likeliest(self.head(self.norm(x)))
        return NextToken(*made, is_one_of(made[0], self.ends))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of the head, if it can have one."""
        made = {"token": TOKEN, "logprob": LOGPROB, "stop": STOP}
        return head_form(self.norm, self.head, self.ends, {"x": rows(self.head.in_features)}, made)


class SamplingHead(nn.Module):
    """The last norm and the head of a model that samples, by themselves."""

    def __init__(
        self, model: Llama, end_token: int | Sequence[int], limits: SamplingLimits, page_size: int | None = None
    ) -> None:
        super().__init__()
        self.norm, self.head, self.vocabulary = model.norm, model.head, model.sizes.vocabulary
        self._page_size = page_size
        self.sampler = Sampler(self.vocabulary, end_token, limits)

    def forward(
        self,
        x: Tensor,
        token: Tensor,
        history: PagedRows,
        spans: Steps,
        settings: Tensor,
        seed: Tensor,
        stops: Tensor,
        biases: Tensor,
        mask: Tensor,
    ) -> SampledToken:
        """``x`` ``[rows, hidden]`` of the tokens; the rest: see ``Sampler``."""
        logits = self.head(self.norm(x))
        made: SampledToken = self.sampler(logits, token, history, spans, settings, seed, stops, biases, mask)
        return made

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of the head, if it can have one."""
        if self._page_size is None:
            return None
        return sampling_head_form(self.norm, self.head, self.sampler.ends, self.sampler.limits, self._page_size)


class Memory(nn.Module):
    """Appends the tokens of a prompt to a text, in pages of ``page_size``."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self._page_size = page_size

    def forward(self, token: Tensor, history: PagedRows) -> Tensor:
        """``token`` int64 ``[rows]``; the same again."""
        history.append(token.to(torch.int32))
        return token.clone()

    def compiled_form(self) -> CompiledForm:
        """Return the compiled form."""
        return memory_form(self._page_size)


def layered_language_model(
    model: Llama,
    end_token: int,
    *,
    name: str = "language model",
    page_size: int = 16,
    max_batch: int = 64,
    max_batch_rows: int = 256,
    sampling: bool | SamplingLimits = False,
) -> LayeredModel:
    """Return the same model as ``language_model``, in float32 bit for bit, with a cell for each layer; the arguments
    are the same.
    """
    dtype = model.embedding.weight.dtype
    hidden, state = rows(model.sizes.hidden, dtype=dtype), _kv_of_layer(model.sizes, page_size, dtype)
    spanning = partial(cell, max_batch=max_batch, max_batch_rows=max_batch_rows)
    limits, memory = limits_of(sampling), None
    if limits is None:
        head = cell(Head(model, end_token), {"x": hidden}, name=f"{name}: head", max_batch=max_batch)
    else:
        asked = {"x": hidden, "token": token, **sampling_inputs(limits, page_size, model.sizes.vocabulary)}
        head = cell(SamplingHead(model, end_token, limits, page_size), asked, name=f"{name}: head", max_batch=max_batch)
        read = {"token": token, "history": asked["history"]}
        memory = spanning(Memory(page_size), read, name=f"{name}: memory")
    return LayeredModel(
        cell(Embedding(model), {"token": token}, name=f"{name}: embedding", max_batch=max_batch_rows),
        tuple(
            spanning(Layer(model.sizes, layer, page_size), {"x": hidden, "kv": state}, name=f"{name}: layer {number}")
            for number, layer in enumerate(model.layers)
        ),
        head,
        memory,
    )
