"""Decoders that feed their own tokens back (BatchMaker section 2.7.4): embedding, LSTM, projection, choice.

`EmbeddingLSTMDecoder` chooses greedily; `EmbeddingGRUDecoder` in `gru.py` is the same with a GRU. `SamplingDecoder`
makes either of them draw its tokens. The runtime ends a sequence at `stop`, the cell does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cellrt.cells._gated import are_float32_on_cpu, check_batch_sizes, check_layers, check_shape, unroll
from cellrt.cells._host import STOP, TOKEN, lstm_decoder
from cellrt.cells._recurrence import lstm_decode
from cellrt.cells.gru import EmbeddingGRUDecoder
from cellrt.cells.lstm import EmbeddingLSTMCell, LSTMCell, LSTMState
from cellrt.cells.output import ProjectionArgmax, Sample
from cellrt.definition.host_kernel import HostKernel
from cellrt.definition.spec import rows
from cellrt.errors import DefinitionError


class LSTMDecoderState(NamedTuple):
    """After a step: the `token` chosen (int64 `[rows]`), whether it ends the sequence (`stop`, bool `[rows]`), and
    the state `h` and `c`, of the shape that went in."""

    token: Tensor
    stop: Tensor
    h: Tensor
    c: Tensor


class EmbeddingLSTMDecoder(nn.Module):
    """A greedy decoder: `token` int64 `[rows]`, `h` and `c` -> `LSTMDecoderState`.

    `token` is state like `h` and `c`: the token before, at first the one that starts a sequence. The states are
    `[rows, hidden_size]` for one layer, `[rows, num_layers, hidden_size]` for several. For `fold` see
    `EmbeddingLSTMCell`.
    """

    def __init__(
        self,
        num_tokens: int,
        embedding_size: int,
        hidden_size: int,
        end_token: int,
        bias: bool = True,
        *,
        num_layers: int = 1,
        fold: bool = True,
    ) -> None:
        super().__init__()
        self.first = EmbeddingLSTMCell(num_tokens, embedding_size, hidden_size, bias, fold=fold)
        self.others = nn.ModuleList(LSTMCell(hidden_size, hidden_size, bias) for _ in range(num_layers - 1))
        self.projection = ProjectionArgmax(hidden_size, num_tokens, end_token)
        self.end_token = end_token

    @classmethod
    def from_torch(
        cls,
        table: nn.Embedding,
        module: nn.LSTMCell | nn.LSTM,
        projection: nn.Linear,
        end_token: int,
        *,
        fold: bool = True,
    ) -> Self:
        """A decoder with the weights of torch modules; `projection` has as many outputs as `table` has rows.

        Raises DefinitionError for a module that is not an LSTM in one direction without projection.
        """
        num_layers, directions = check_layers(module, nn.LSTMCell, nn.LSTM)
        if directions > 1:
            raise DefinitionError(f"a decoder has a single direction, unlike {module}")
        if projection.weight.shape != (table.num_embeddings, module.hidden_size):
            raise DefinitionError(
                f"expected a projection from {module.hidden_size} to {table.num_embeddings}, got {projection}"
            )
        sizes = table.num_embeddings, table.embedding_dim, module.hidden_size
        made = cls(*sizes, end_token, module.bias, num_layers=num_layers, fold=fold)
        made.first.take_weights(module)
        made.first.take_embedding(table)
        for layer, cell in enumerate(made._others(), start=1):
            cell.take_weights(module, f"_l{layer}")
        made.projection.take_weights(projection)
        return made

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> LSTMDecoderState:
        """One step; raises ValueError for a wrong shape and IndexError for a token outside the embedding."""
        if token.shape[0] and self._is_fused(token, h, c):
            return self._run(np.array([token.shape[0]]), token, h, c)
        state = self.advance(token, h, c)
        choice = self.projection.choose(self.top(state.h))
        return LSTMDecoderState(choice.token, choice.stop, state.h, state.c)

    def steps(self, batch_sizes: Sequence[int], *, token: Tensor, h: Tensor, c: Tensor) -> LSTMDecoderState:
        """`len(batch_sizes)` steps from the states of `batch_sizes[0]` rows; all of them, packed."""
        sizes = check_batch_sizes(batch_sizes)
        check_shape("token", token, (int(sizes[0]),))
        if self._is_fused(token, h, c):
            return self._run(sizes, token, h, c)
        chosen, h, c = unroll(batch_sizes, self._step_of_states, None, (token, h, c))
        return LSTMDecoderState(chosen, chosen == self.end_token, h, c)

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `steps`, for float32, one layer and a folded table."""
        first = self.first
        if self.others or not first.fold or not are_float32_on_cpu(*self.parameters()):
            return None
        table, (weight, bias), (out_weight, out_bias) = first.folded(), first.packed_hh(), self.projection.packed()
        words = [table.data_ptr(), out_weight.units, weight.address, bias.data_ptr()]
        words += [out_weight.address, out_bias.data_ptr(), self.end_token, first.hidden_size]
        state = {"h": rows(first.hidden_size), "c": rows(first.hidden_size)}
        keeps = table, weight, bias, out_weight, out_bias
        return HostKernel(
            lstm_decoder, {"token": TOKEN, **state}, {"token": TOKEN, "stop": STOP, **state}, np.array(words), keeps
        )

    def advance(self, token: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """The states after the LSTM has read `token`."""
        if not self.others:
            return LSTMState(*self.first(token, h, c))
        states = [self.first(token, h[:, 0], c[:, 0])]
        for layer, cell in enumerate(self._others(), start=1):
            states.append(cell(states[-1].h, h[:, layer], c[:, layer]))
        return LSTMState(*(torch.stack(parts, dim=1) for parts in zip(*states, strict=True)))

    def top(self, h: Tensor) -> Tensor:
        """The state of the last layer, `[rows, hidden_size]`."""
        return h[:, -1] if self.others else h

    def logits(self, h: Tensor) -> Tensor:
        """The logits of the next token `[rows, num_tokens]`."""
        return self.projection.logits(self.top(h))

    def _others(self) -> list[LSTMCell]:
        return [cell for cell in self.others if isinstance(cell, LSTMCell)]

    def _step_of_states(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        after = self(token, h, c)
        return after.token, after.h, after.c

    def _is_fused(self, token: Tensor, h: Tensor, c: Tensor) -> bool:
        first = self.first
        return first.fold and not self.others and first.is_fusable_with(token, h, c)

    def _run(self, sizes: NDArray[np.int64], token: Tensor, h: Tensor, c: Tensor) -> LSTMDecoderState:
        """All steps in one compiled call."""
        first = self.first
        first.check_states(int(sizes[0]), h, c)
        token, table = first.check_tokens(token), first.folded_on_cpu()
        h, c = h.contiguous(), c.contiguous()
        (weight, bias), (out_weight, out_bias) = first.packed_hh(), self.projection.packed()
        rows = int(sizes.sum()) if sizes.size > 1 else token.shape[0]
        token_out = token.new_empty(rows)
        h_out, c_out = h.new_empty(rows, first.hidden_size), c.new_empty(rows, first.hidden_size)
        lstm_decode(
            sizes,
            table.data_ptr(),
            token.data_ptr(),
            weight.address,
            bias.data_ptr(),
            out_weight.address,
            out_bias.data_ptr(),
            out_weight.units,
            h.data_ptr(),
            c.data_ptr(),
            token_out.data_ptr(),
            h_out.data_ptr(),
            c_out.data_ptr(),
            first.hidden_size,
        )
        return LSTMDecoderState(token_out, token_out == self.end_token, h_out, c_out)


class SamplingDecoder(nn.Module):
    """A decoder that draws its tokens: `token`, `seed`, `step` int64 `[rows]`, and the states of `decoder`.

    Returns `token`, `stop`, `step` (the next) and the states, by name. In a loop `seed` is the request's, and `step`
    is carried, at first zero: see `Sample`.
    """

    def __init__(self, decoder: EmbeddingLSTMDecoder | EmbeddingGRUDecoder, sample: Sample) -> None:
        super().__init__()
        if sample.end_token != decoder.end_token:
            raise DefinitionError(f"the decoder ends at token {decoder.end_token}, its Sample at {sample.end_token}")
        self.decoder, self.sample = decoder, sample

    def forward(
        self, token: Tensor, seed: Tensor, step: Tensor, h: Tensor, c: Tensor | None = None
    ) -> dict[str, Tensor]:
        """One step; `c` only for an LSTM."""
        given = (h,) if c is None else (h, c)
        state = self.decoder.advance(token, *given)
        choice = self.sample(self.decoder.logits(state.h), seed, step)
        return {"token": choice.token, "stop": choice.stop, "step": step + 1, **state._asdict()}
