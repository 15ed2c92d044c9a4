"""Decoders that feed their own tokens back (BatchMaker section 2.7.4): embedding, recurrent layers, projection, choice.

``EmbeddingLSTMDecoder`` and ``EmbeddingGRUDecoder`` choose greedily; ``attention_decoder.py`` has those that also
attend to an encoder. ``SamplingDecoder`` makes any of them draw its tokens. The runtime ends a sequence at ``stop``,
not the cell.

Every decoder returns, if it is made with ``return_logits``, the ``logits`` ``[rows, num_tokens]`` of a step, and with
``return_logprobs`` the ``logprob`` ``[rows]`` of the token chosen, float32 (float64 for float64). Both are the model's
own: a temperature, ``top_k`` and ``top_p`` do not act on them. On a CPU a decoder with either runs in plain torch,
because the compiled kernels there do not keep logits; without them nothing is computed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cellrt import DefinitionError, RaggedRows, RowSpec, rows
from cellrt.cells._decoding import Decoder, check_parts
from cellrt.cells._fused import can_draw, can_fuse, of_layer, project_rows, sample_rows
from cellrt.cells._gated import check_batch_sizes, unroll
from cellrt.cells._host import STOP, TOKEN, gru_decoder, lstm_decoder
from cellrt.cells._made_apart import making_apart
from cellrt.cells._recurrence import gru_decode, lstm_decode
from cellrt.cells._weights import are_float32_on_cpu, check_float32_on_cpu, check_shape, check_tokens, copy_embedding
from cellrt.cells.gru import EmbeddingGRUCell, GRUCell
from cellrt.cells.lstm import EmbeddingLSTMCell, LSTMCell
from cellrt.cells.output import Sample
from cellrt.definition.compiled_form import CompiledForm, TaskFunction, is_changed
from cellrt.definition.fused import reads_outputs, reads_ragged, reads_spans

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows


class _EmbeddingDecoder(Decoder):
    """The base of the decoders without attention.

    Attributes:
        first_cell: the kind of the lowest layer.
        decode: a whole run, by addresses: ``_recurrence.py``.
        task_function: a whole task: ``_host.py``.
    """

    first_cell: ClassVar[type[EmbeddingLSTMCell] | type[EmbeddingGRUCell]]
    decode: ClassVar[Callable[..., None]]
    task_function: ClassVar[TaskFunction]

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
        return_logits: bool = False,
        return_logprobs: bool = False,
    ) -> None:
        super().__init__(hidden_size, end_token, return_logits, return_logprobs)
        self.first = self.first_cell(num_tokens, embedding_size, hidden_size, bias, fold=fold)
        self.add_top(num_tokens, num_layers, bias)
        self._has_kernel = self.returns_choice_alone and fold and num_layers == 1

    @classmethod
    @making_apart
    def from_torch(
        cls,
        table: nn.Embedding,
        module: Any,
        projection: nn.Linear,
        end_token: int,
        *,
        fold: bool = True,
        return_logits: bool = False,
        return_logprobs: bool = False,
    ) -> Self:
        """Return a decoder with copies of the weights of torch modules, of any one floating dtype.

        Args:
            table: the embedding of the tokens.
            module: an LSTM (for a GRU decoder a GRU) of any number of layers, or a torch cell. Its dropout is off.
            projection: from the top layer's state to as many tokens as ``table`` has.
            end_token, fold, return_logits, return_logprobs: as of the class.

        Raise DefinitionError for other modules, and for those that do not fit each other.
        """
        num_layers = check_parts(cls, table, module, projection)
        if module.input_size != table.embedding_dim:
            raise DefinitionError(
                f"{cls.__name__}: the module reads rows of {module.input_size}, the embedding has {table}"
            )
        sizes = table.num_embeddings, table.embedding_dim, module.hidden_size
        options = {"return_logits": return_logits, "return_logprobs": return_logprobs}
        made = cls(*sizes, end_token, module.bias, num_layers=num_layers, fold=fold, **options)
        made.first.embedding.weight = copy_embedding(table)
        made._take_weights(made.first, module, projection)
        return made

    def _advance(self, token: Tensor, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        return self._layers(self.first, token, inputs)

    def _one_step(self, token: Tensor, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one step, in one compiled call if that can be."""
        if token.shape[0] and self._is_fused(token, states):
            return self._run(np.array([token.shape[0]]), token, states)
        return self._step(token, states)

    def _all_steps(self, batch_sizes: Sequence[int], token: Tensor, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of all steps from the states of ``batch_sizes[0]`` rows, packed."""
        sizes = check_batch_sizes(batch_sizes)
        check_shape("token", token, (int(sizes[0]),))
        if self._is_fused(token, states):
            return self._run(sizes, token, states)
        names = ["token", *self.states, "stop"]
        names += ["logits"] * self.return_logits + ["logprob"] * self.return_logprobs

        def step(*given: Tensor) -> tuple[Tensor, ...]:
            after = self(*given)
            return tuple(after[name] for name in names)

        return dict(zip(names, unroll(batch_sizes, step, None, (token, *states.values())), strict=True))

    def _is_fused(self, token: Tensor, states: Mapping[str, Tensor]) -> bool:
        return self._has_kernel and self.first.is_fusable_with(token, *states.values())

    def _run(self, sizes: NDArray[np.int64], token: Tensor, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run all steps in one compiled call."""
        first, units = self.first, self.hidden_size
        first.check_states(int(sizes[0]), tuple(states.values()))
        token, table = check_tokens(token, first.embedding), first.folded()
        check_float32_on_cpu("the table of gates", table)
        given = [state.contiguous() for state in states.values()]
        (weight, bias), (out_weight, out_bias) = first.packed_hh(), self.projection.packed()
        rows = int(sizes.sum()) if sizes.size > 1 else token.shape[0]
        token_out, made = token.new_empty(rows), [state.new_empty(rows, units) for state in given]
        type(self).decode(
            sizes,
            table.data_ptr(),
            token.data_ptr(),
            weight.address,
            bias.data_ptr(),
            out_weight.address,
            out_bias.data_ptr(),
            out_weight.units,
            *[state.data_ptr() for state in given],
            token_out.data_ptr(),
            *[state.data_ptr() for state in made],
            units,
        )
        return {"token": token_out, "stop": token_out == self.end_token, **dict(zip(states, made, strict=True))}

    def takes_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, as ``Decoder.takes_rows`` says: only with ``fold``."""
        states = dict.fromkeys(self.states, rows(*self._state_shape))
        given, made = {"token": TOKEN, **states}, {"token": TOKEN, "stop": STOP, **states}
        has_asked, others = self.are_asked_for(outputs)
        return self.first.fold and has_asked and can_fuse(self, inputs, others, given, made)

    def advance_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> StepRows:
        """Advance the rows by a step, with a kernel a layer."""
        given, made = ({name: of_layer(each[name], 0) for name in self.states} for each in (inputs, outputs))
        self.first._fused.run(self.first, self.first.with_gates({"token": inputs["token"], **given}), made)
        return self._advance_others(inputs, outputs)

    def _compiled(self) -> CompiledForm | None:
        if not (self._has_kernel and are_float32_on_cpu(*self.parameters())):
            return None
        first, function = self.first, self.task_function
        table, (weight, bias), (out_weight, out_bias) = first.folded(), first.packed_hh(), self.projection.packed()
        words = [table.data_ptr(), out_weight.units, weight.address, bias.data_ptr()]
        words += [out_weight.address, out_bias.data_ptr(), self.end_token, self.hidden_size]
        state = dict.fromkeys(self.states, rows(self.hidden_size))
        keeps = table, weight, bias, out_weight, out_bias
        return CompiledForm(
            function,
            {"token": TOKEN, **state},
            {"token": TOKEN, "stop": STOP, **state},
            np.array(words),
            keeps,
            is_batch_invariant=True,
        )


class EmbeddingLSTMDecoder(_EmbeddingDecoder):
    """A greedy LSTM decoder: ``token`` int64 ``[rows]``, ``h`` and ``c`` -> ``token``, ``stop`` bool ``[rows]``, ``h``,
    ``c``.

    ``token`` is state like ``h`` and ``c``: the token before, at first the one that starts a sequence. The states are
    ``[rows, hidden_size]`` for one layer, ``[rows, num_layers, hidden_size]`` for several. ``stop`` says that the token
    chosen is ``end_token``. Of equal logits the lowest token wins on the fused path. For ``fold`` see
    ``EmbeddingLSTMCell``.
    """

    recurrent_cell, first_cell, states = LSTMCell, EmbeddingLSTMCell, LSTMCell.states
    decode, task_function = staticmethod(lstm_decode), lstm_decoder

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Run one step. Raise ValueError for a wrong shape, IndexError for a token outside the embedding."""
        return self._one_step(token, {"h": h, "c": c})

    def steps(self, batch_sizes: Sequence[int], *, token: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """``len(batch_sizes)`` steps from the states of ``batch_sizes[0]`` rows; all of them, packed."""
        return self._all_steps(batch_sizes, token, {"h": h, "c": c})

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of ``steps``: for float32, one layer, a folded table, and neither logits nor
        logprobs.
        """
        return self._compiled()

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        return self.takes_rows(inputs, outputs)

    @reads_spans
    @reads_outputs
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernels (``cellrt/definition/fused.py``)."""
        self.choose_rows(self.advance_rows(inputs, outputs), outputs)


class EmbeddingGRUDecoder(_EmbeddingDecoder):
    """A decoder like ``EmbeddingLSTMDecoder``, with a GRU: ``token`` int64 ``[rows]``, ``h`` -> ``token``, ``stop``,
    ``h``.
    """

    recurrent_cell, first_cell, states = GRUCell, EmbeddingGRUCell, GRUCell.states
    decode, task_function = staticmethod(gru_decode), gru_decoder

    def forward(self, token: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Run one step. Raise ValueError for a wrong shape, IndexError for a token outside the embedding."""
        return self._one_step(token, {"h": h})

    def steps(self, batch_sizes: Sequence[int], *, token: Tensor, h: Tensor) -> dict[str, Tensor]:
        """``len(batch_sizes)`` steps from the states of ``batch_sizes[0]`` rows; all of them, packed."""
        return self._all_steps(batch_sizes, token, {"h": h})

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of ``steps``: for float32, one layer, a folded table, and neither logits nor
        logprobs.
        """
        return self._compiled()

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        return self.takes_rows(inputs, outputs)

    @reads_spans
    @reads_outputs
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernels (``cellrt/definition/fused.py``)."""
        self.choose_rows(self.advance_rows(inputs, outputs), outputs)


class SamplingDecoder(nn.Module):
    """Any decoder of this package, drawing its tokens: its inputs, and ``seed`` and ``step`` int64 ``[rows]``.

    Returns ``token``, ``stop``, ``step`` (the next), the states, and what ``decoder`` was made to return of its logits.
    In a loop ``seed`` is the request's, and ``step`` is carried, at first zero: see ``Sample``.

    Raises DefinitionError if the two end sequences at different tokens.
    """

    def __init__(self, decoder: Decoder, sample: Sample) -> None:
        super().__init__()
        if not isinstance(decoder, Decoder):
            raise DefinitionError(f"SamplingDecoder: expected a decoder of cellrt.cells, got {type(decoder).__name__}")
        if sample.end_token != decoder.end_token:
            raise DefinitionError(f"the decoder ends at token {decoder.end_token}, its Sample at {sample.end_token}")
        self.decoder, self.sample = decoder, sample
        self.states = decoder.states

    def input_specs(self) -> dict[str, RowSpec]:
        """Return the inputs for ``cellrt.cell``: those of the decoder, ``seed`` and ``step``."""
        number = rows(dtype=torch.int64)
        return {**self.decoder.input_specs(), "seed": number, "step": number}

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows: where the decoder's does, for a vocabulary that is not too
        large.
        """
        given = {name: spec for name, spec in inputs.items() if name not in ("seed", "step")}
        made = {name: spec for name, spec in outputs.items() if name != "step"}
        own = inputs.get("seed"), inputs.get("step"), outputs.get("step")
        if own != (TOKEN, TOKEN, TOKEN) or any(is_changed(part, "run_rows") for part in (self.decoder, self.sample)):
            return False
        return can_draw(self.decoder.projection.weight) and self.decoder.takes_rows(given, made)

    @reads_spans
    @reads_outputs
    @reads_ragged
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernels (``cellrt/definition/fused.py``)."""
        top, sample = self.decoder.advance_rows(inputs, outputs), self.sample
        logits = project_rows(self.decoder.projection.weight, self.decoder.projection.bias, top)
        sample_rows(sample.end_token, sample.temperature, sample.top_k, sample.top_p, inputs, outputs, logits)
        self.decoder.score_rows(logits, outputs, None)

    def forward(
        self,
        token: Tensor,
        seed: Tensor,
        step: Tensor,
        h: Tensor,
        c: Tensor | None = None,
        memory: RaggedRows | None = None,
        keys: RaggedRows | None = None,
        attended: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run one step, with those of the inputs that the decoder has."""
        given = {"h": h, "c": c, "memory": memory, "keys": keys, "attended": attended}
        states = self.decoder.scores(token, **{name: value for name, value in given.items() if value is not None})
        logits = states.pop("logits")
        token, stop = self.sample(logits, seed, step)
        return {"token": token, "stop": stop, "step": step + 1, **states, **self.decoder.asked_for(logits, token)}
