"""Every ready-made cell with its inputs, and rows to try it on, chosen so that no token or stop hangs on rounding.

A new cell needs a line in ``CASES``; ``test_every_cell.py`` fails until it has one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cellrt import cells
from cellrt.cells.transformer import MLP, GatedMLP
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, ragged, rows

SIZE, HIDDEN, TOKENS, END = 5, 11, 7, 2
"""``HIDDEN`` is one vector register and a part of one."""
WIDE = 136
"""More than the kernels multiply in one block."""
BEAMS, MAX_STEPS = 3, 6
POOL_ROWS, MOST_ROWS, MOST_STEPS = 64, 61, 5
"""``MOST_ROWS`` is more than the kernels take in one chunk."""

TOKEN, STATE, NUMBERS = rows(dtype=torch.int64), rows(HIDDEN), rows(SIZE)
LIMITS = {"token": TOKENS, "tokens": TOKENS, "length": MAX_STEPS, "step": 100, "seed": 1 << 62}
"""Integer inputs are below these."""
ALWAYS_FLOAT32 = frozenset({"score"})
"""Inputs that are float32 whatever the type of the weights."""


class Case(NamedTuple):
    """How to make a cell, and its inputs in float32; None: those that its ``input_specs`` says."""

    make: Callable[[], Callable[..., Any]]
    inputs: Mapping[str, RowSpec] | None


LSTM_STATES = {"h": STATE, "c": STATE}
CHILDREN = {"h": ragged(HIDDEN), "c": ragged(HIDDEN)}
BOTH = {"left": rows(2), "right": rows(3)}
MEMORY = {"h": STATE, "memory": ragged(SIZE)}
LOGITS = {"logits": rows(TOKENS)}
DRAWN = {"seed": TOKEN, "step": TOKEN}
VOCABULARY = TOKENS, SIZE, HIDDEN


def attention_beams() -> nn.Module:
    """A beam search whose scorer has an input of each kind: state, constant memory, constant keys."""
    scorer = cells.AttentionGRUDecoder(
        *VOCABULARY, END, attention=cells.AdditiveAttention(HIDDEN, SIZE, 4), memory_size=SIZE
    )
    return cells.BeamStep(scorer, scorer.input_specs(), beams=BEAMS, end_token=END, max_steps=MAX_STEPS, best=2)


def gru_beams() -> nn.Module:
    """A beam search over a plain decoder, with a length penalty."""
    inputs = {"token": TOKEN, "h": STATE}
    scorer = cells.EmbeddingGRUDecoder(*VOCABULARY, END)
    return cells.BeamStep(scorer, inputs, beams=BEAMS, end_token=END, max_steps=MAX_STEPS, length_penalty=0.7)


CASES = {
    "AdditiveAttention": Case(lambda: cells.AdditiveAttention(HIDDEN, SIZE, 4), MEMORY),
    "AdditiveAttention keys": Case(lambda: cells.AdditiveAttention(HIDDEN, SIZE, 4), {**MEMORY, "keys": ragged(4)}),
    "Argmax": Case(lambda: cells.Argmax(END), LOGITS),
    "AttentionGRUDecoder": Case(lambda: cells.AttentionGRUDecoder(*VOCABULARY, END, input_feeding=True), None),
    "AttentionGRUDecoder of two layers": Case(
        lambda: cells.AttentionGRUDecoder(
            *VOCABULARY, END, num_layers=2, input_feeding=True, return_logits=True, return_logprobs=True
        ),
        None,
    ),
    "AttentionKeys": Case(lambda: cells.AttentionKeys(cells.AdditiveAttention(HIDDEN, SIZE, 4)), {"h": NUMBERS}),
    "AttentionLSTMDecoder": Case(
        lambda: cells.AttentionLSTMDecoder(
            *VOCABULARY, END, attention=cells.AdditiveAttention(HIDDEN, SIZE, 4), memory_size=SIZE
        ),
        None,
    ),
    "BeamEnd": Case(
        lambda: cells.BeamEnd(2, END, 0.7),
        {
            "tokens": rows(BEAMS, MAX_STEPS, dtype=torch.int64),
            "score": rows(BEAMS),
            "length": rows(BEAMS, dtype=torch.int64),
        },
    ),
    "BeamStart": Case(lambda: cells.BeamStart(("h", "c"), BEAMS), LSTM_STATES),
    "BeamStep attention": Case(attention_beams, None),
    "BeamStep GRU": Case(gru_beams, None),
    "BinaryTreeLSTMCell": Case(
        lambda: cells.BinaryTreeLSTMCell(None, HIDDEN),
        {"h_left": STATE, "c_left": STATE, "h_right": STATE, "c_right": STATE},
    ),
    "BothInputs": Case(
        lambda: cells.BothInputs(cells.LSTMInput(SIZE, HIDDEN), cells.GRUInput(SIZE, HIDDEN)), {"x": NUMBERS}
    ),
    "Bridge": Case(
        lambda: cells.Bridge(
            {"h": [["h_l0", "h_l0_reverse"], ["h_l0"]], "c": ["c_l0"]},
            {"h": [nn.Linear(2 * SIZE, HIDDEN), nn.Linear(SIZE, HIDDEN)]},
            nn.Tanh(),
        ),
        {"h_l0": NUMBERS, "h_l0_reverse": NUMBERS, "c_l0": STATE},
    ),
    "ChildSumTreeLSTMCell": Case(lambda: cells.ChildSumTreeLSTMCell(SIZE, HIDDEN), {"x": NUMBERS, **CHILDREN}),
    "DotAttention": Case(cells.DotAttention, {"h": STATE, "memory": ragged(HIDDEN)}),
    "DotAttention general": Case(lambda: cells.DotAttention(HIDDEN, SIZE), MEMORY),
    "EmbeddingChildSumTreeLSTMCell": Case(
        lambda: cells.EmbeddingChildSumTreeLSTMCell(*VOCABULARY), {"token": TOKEN, **CHILDREN}
    ),
    "EmbeddingGRUCell": Case(lambda: cells.EmbeddingGRUCell(*VOCABULARY), {"token": TOKEN, "h": STATE}),
    "EmbeddingGRUCell unfolded": Case(
        lambda: cells.EmbeddingGRUCell(*VOCABULARY, fold=False), {"token": TOKEN, "h": STATE}
    ),
    "EmbeddingGRUDecoder": Case(lambda: cells.EmbeddingGRUDecoder(*VOCABULARY, END), {"token": TOKEN, "h": STATE}),
    "EmbeddingGRUDecoder of three layers": Case(
        lambda: cells.EmbeddingGRUDecoder(*VOCABULARY, END, num_layers=3), None
    ),
    "EmbeddingGRUDecoder unfolded": Case(
        lambda: cells.EmbeddingGRUDecoder(*VOCABULARY, END, fold=False), {"token": TOKEN, "h": STATE}
    ),
    "EmbeddingLSTMCell": Case(lambda: cells.EmbeddingLSTMCell(*VOCABULARY), {"token": TOKEN, **LSTM_STATES}),
    "EmbeddingLSTMDecoder": Case(lambda: cells.EmbeddingLSTMDecoder(*VOCABULARY, END), {"token": TOKEN, **LSTM_STATES}),
    "EmbeddingLSTMDecoder of two layers": Case(
        lambda: cells.EmbeddingLSTMDecoder(*VOCABULARY, END, num_layers=2),
        {"token": TOKEN, "h": rows(2, HIDDEN), "c": rows(2, HIDDEN)},
    ),
    "EmbeddingLSTMDecoder with its logits": Case(
        lambda: cells.EmbeddingLSTMDecoder(*VOCABULARY, END, return_logits=True, return_logprobs=True), None
    ),
    "EmbeddingTreeLSTMLeaf": Case(lambda: cells.EmbeddingTreeLSTMLeaf(*VOCABULARY), {"token": TOKEN}),
    "EmbeddingTreeLSTMLeaf unfolded": Case(
        lambda: cells.EmbeddingTreeLSTMLeaf(*VOCABULARY, fold=False), {"token": TOKEN}
    ),
    "GatedMLP": Case(lambda: GatedMLP(SIZE, HIDDEN), {"x": NUMBERS}),
    "GRUCell": Case(lambda: cells.GRUCell(SIZE, HIDDEN), {"x": NUMBERS, "h": STATE}),
    "GRUCell wide": Case(lambda: cells.GRUCell(SIZE, WIDE), {"x": NUMBERS, "h": rows(WIDE)}),
    "GRUInput": Case(lambda: cells.GRUInput(SIZE, HIDDEN), {"x": NUMBERS}),
    "GRURecurrent": Case(lambda: cells.GRURecurrent(HIDDEN), {"gates": rows(3 * HIDDEN), "h": STATE}),
    "Joined": Case(lambda: cells.Joined(cells.LSTMInput(SIZE, HIDDEN)), BOTH),
    "Joined alone": Case(lambda: cells.Joined(nn.Identity()), BOTH),
    "JoinedCell GRU": Case(lambda: cells.JoinedCell(cells.GRUCell(SIZE, HIDDEN)), {**BOTH, "h": STATE}),
    "JoinedCell LSTM": Case(lambda: cells.JoinedCell(cells.LSTMCell(SIZE, HIDDEN)), {**BOTH, **LSTM_STATES}),
    "LSTMCell": Case(lambda: cells.LSTMCell(SIZE, HIDDEN), {"x": NUMBERS, **LSTM_STATES}),
    "LSTMCell wide": Case(lambda: cells.LSTMCell(WIDE, WIDE), {"x": rows(WIDE), "h": rows(WIDE), "c": rows(WIDE)}),
    "LSTMInput": Case(lambda: cells.LSTMInput(SIZE, HIDDEN), {"x": NUMBERS}),
    "LSTMRecurrent": Case(lambda: cells.LSTMRecurrent(HIDDEN), {"gates": rows(4 * HIDDEN), **LSTM_STATES}),
    "MLP": Case(lambda: MLP(SIZE, HIDDEN), {"x": NUMBERS}),
    "NaryTreeLSTMCell": Case(
        lambda: cells.NaryTreeLSTMCell(3, SIZE, HIDDEN),
        {"x": NUMBERS, **{f"{state}_{child}": STATE for child in range(3) for state in "hc"}},
    ),
    "Projection": Case(lambda: cells.Projection(WIDE, TOKENS), {"h": rows(WIDE)}),
    "ProjectionArgmax": Case(lambda: cells.ProjectionArgmax(HIDDEN, TOKENS, END), {"h": STATE}),
    "Sample": Case(lambda: cells.Sample(END), {**LOGITS, **DRAWN}),
    "Sample of few": Case(lambda: cells.Sample(END, temperature=0.7, top_k=5, top_p=0.8), {**LOGITS, **DRAWN}),
    "SamplingDecoder": Case(
        lambda: cells.SamplingDecoder(cells.EmbeddingLSTMDecoder(*VOCABULARY, END), cells.Sample(END)),
        {"token": TOKEN, **DRAWN, **LSTM_STATES},
    ),
    "SamplingDecoder with attention": Case(
        lambda: cells.SamplingDecoder(
            cells.AttentionLSTMDecoder(*VOCABULARY, END, input_feeding=True, return_logprobs=True), cells.Sample(END)
        ),
        None,
    ),
    "TreeLSTMLeaf": Case(lambda: cells.TreeLSTMLeaf(SIZE, HIDDEN), {"x": NUMBERS}),
}


def specs_of(case: Case, module: Any) -> Mapping[str, RowSpec]:
    """The inputs of a case in float32."""
    specs: Mapping[str, RowSpec] = module.input_specs() if case.inputs is None else case.inputs
    return specs


MADE = {name: case.make() for name, case in CASES.items()}
STEPPED = [name for name, module in MADE.items() if hasattr(module, "steps")]
with torch.inference_mode():
    WITH_FORM = [name for name, module in MADE.items() if getattr(module, "compiled_form", lambda: None)() is not None]
RAGGED = [name for name in CASES if any(spec.ragged for spec in specs_of(CASES[name], MADE[name]).values())]

WITH_PAGES = "reads spans or pages, or makes cells that do: see tests/unfolders and tests/engine/test_pages.py"
WITH_POSITIONS = "a part of layers that know positions"
NOT_CELLS = {
    "Linear": "the layer inside the attention cells; as a cell it is Projection",
    "LlamaSizes": "what a Llama is made of",
    **dict.fromkeys(["Attention", "CrossAttention", "Llama", "SelfAttention", "TransformerLayer"], WITH_PAGES),
    "StackSizes": "what a TransformerStack is made of",
    "RMSNorm": "a norm inside layers, with a test of its own",
    **dict.fromkeys(["GreedyLanguageModel", "language_model", "encoder_decoder_cells", "sentence_encoder"], WITH_PAGES),
    **dict.fromkeys(
        ["Embedding", "Head", "Layer", "LayeredModel", "LlamaLayers", "layered_language_model"], WITH_PAGES
    ),
    **dict.fromkeys(["GPT2", "GPT2Layer", "LayerStack", "T5", "T5Stack"], WITH_PAGES),
    **dict.fromkeys(["Mamba2", "Mamba2Layer", "Step"], "parts of a model of several cells, compared in tests/language"),
    "Int8Linear": "a layer of int8 weights, compared in tests/language",
    "SamplingLimits": "the most that a request may ask of a model that samples",
    **dict.fromkeys(["Memory", "Sampler", "SamplingHead", "SamplingLanguageModel"], WITH_PAGES),
    **dict.fromkeys(["GreedyDecoder", "SentenceEncoder", "SourceEncoder", "TransformerStack"], WITH_PAGES),
    **dict.fromkeys(
        ["append_key_values", "cached_attention", "cross_attention", "key_values", "span_attention"],
        "a part of a user's own cell, with a test of its own",
    ),
    **dict.fromkeys(["BeamScorer", "transformer_beam_step"], WITH_PAGES),
    **dict.fromkeys(
        ["LearnedPositions", "RelativePositions", "RotaryPositions", "SinusoidalPositions"], WITH_POSITIONS
    ),
}
"""Public names in the package that look like cells, and why they are none."""


class Mode(NamedTuple):
    """How cells run; ``margin`` is how far floats are moved to see whether a row's integers hang on rounding."""

    dtype: torch.dtype
    is_inference: bool
    tolerance: float
    margin: float


MODES = {
    "fused": Mode(torch.float32, True, 1e-5, 1e-4),
    "plain": Mode(torch.float32, False, 1e-5, 1e-4),
    "bfloat16": Mode(torch.bfloat16, True, 2e-2, 3e-2),
    "float16": Mode(torch.float16, True, 3e-3, 5e-3),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Row = dict[str, Tensor]
"""A row of each input: ``[*shape]``, of a ragged one ``[n, *shape]``."""


def typed(value: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() and name not in ALWAYS_FLOAT32 else value


def specs_in(dtype: torch.dtype, specs: Mapping[str, RowSpec]) -> dict[str, RowSpec]:
    return {
        name: spec._replace(dtype=typed(torch.empty(0, dtype=spec.dtype), name, dtype).dtype)
        for name, spec in specs.items()
    }


def random_row(specs: Mapping[str, RowSpec], dtype: torch.dtype, generator: torch.Generator) -> Row:
    """A row; ragged inputs of one row have the same number of rows, often none."""
    row, count = {}, max(0, int(torch.randint(-1, 5, (), generator=generator)))
    for name, spec in specs.items():
        shape = (count, *spec.shape) if spec.ragged else spec.shape
        if not spec.dtype.is_floating_point:
            row[name] = torch.randint(LIMITS[name], shape, generator=generator)
            continue
        row[name] = torch.randn(shape, generator=generator)
        if name == "score":  # The best hypothesis comes first, and some beams are not there yet.
            row[name] = row[name].mul(3).sub(9).sort(descending=True).values
            row[name][count:] = -torch.inf
        row[name] = typed(row[name], name, dtype)
    return row


def batch_of(specs: Mapping[str, RowSpec], some: Sequence[Row]) -> list[CellInput]:
    """These rows as the inputs of a cell."""
    inputs: list[CellInput] = []
    for name, spec in specs.items():
        parts = [row[name] for row in some]
        if spec.ragged:
            counts = torch.tensor([0, *(len(part) for part in parts)])
            inputs.append(RaggedRows(torch.cat(parts), counts.cumsum(0)))
        else:
            inputs.append(torch.stack(parts))
    return inputs


class Subject(NamedTuple):
    """A cell in a mode, and the rows that it is tried on."""

    cell: Cell
    mode: Mode
    pool: list[Row]

    def run(self, some: Sequence[Row]) -> Row:
        """One step on these rows."""
        with torch.inference_mode(self.mode.is_inference):
            return self._named(self.cell.run_step(*batch_of(self.cell.inputs, some)))

    def run_chains(self, chains: Sequence[Sequence[Row]], batch_sizes: list[int]) -> list[Row]:
        """All steps in one call; chains are from the longest to the shortest. The outputs of each step."""
        inputs = []
        for name, spec in self.cell.inputs.items():
            steps = [[chain[step] for chain in chains[:size]] for step, size in enumerate(batch_sizes)]
            some = steps[0] if name in self.cell.carry else [row for step in steps for row in step]
            inputs += batch_of({name: spec}, some)
        with torch.inference_mode(self.mode.is_inference):
            packed = self._named(self.cell.run_steps(batch_sizes, *inputs))
        parts = {name: value.split(batch_sizes) for name, value in packed.items()}
        return [{name: parts[name][step] for name in parts} for step in range(len(batch_sizes))]

    def draw(self, count: int, generator: torch.Generator) -> list[Row]:
        """Random rows of the pool."""
        return [self.pool[k] for k in torch.randint(len(self.pool), (count,), generator=generator).tolist()]

    def draw_chains(self, lengths: Sequence[int], generator: torch.Generator) -> list[list[Row]]:
        return [self.draw(length, generator) for length in lengths]

    def assert_same(self, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], factor: int = 1) -> None:
        """Floats within ``factor`` times the tolerance of the type; integers are equal."""
        tolerance = self.mode.tolerance * factor
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            try:
                torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
            except AssertionError as error:
                raise AssertionError(f"{self.cell.name}, output {name!r}: {error}") from None

    def _named(self, outputs: Sequence[Tensor]) -> Row:
        return {name: value.detach() for name, value in zip(self.cell.outputs, outputs, strict=True)}


@functools.cache
def subject_of(name: str, mode_name: str) -> Subject:
    """The subject of a test; its weights and its pool are the same each time."""
    mode = MODES[mode_name]
    if not mode.is_inference:
        fused = subject_of(name, "fused")
        with_gradients = deepcopy(fused.cell)
        if isinstance(with_gradients.module, nn.Module):
            with_gradients.module.requires_grad_()
        return Subject(with_gradients, mode, fused.pool)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = CASES[name].make()
    specs = specs_of(CASES[name], module)
    if isinstance(module, nn.Module):
        module = module.to(mode.dtype)
    made = cell(module, specs_in(mode.dtype, specs), name=name)
    generator = seeded(0)
    drawn = [random_row(specs, mode.dtype, generator) for _ in range(3 * POOL_ROWS)]
    if any(not spec.dtype.is_floating_point for spec in made.outputs.values()):
        exact = deepcopy(made)
        if isinstance(exact.module, nn.Module):
            exact.module.double()
        drawn = clear_rows(exact, drawn, mode.margin)
    return Subject(made, mode, drawn[:POOL_ROWS])


def clear_rows(exact: Cell, drawn: list[Row], margin: float) -> list[Row]:
    """Those rows whose integer outputs stay the same, over some steps, when every float of input and state moves.

    ``exact`` is the cell with its weights in float64.
    """
    wide = [{name: typed(value, name, torch.float64) for name, value in row.items()} for row in drawn]
    generator, is_clear = seeded(1), torch.ones(len(drawn), dtype=torch.bool)
    expected = integers(exact, wide, 0.0, generator)
    for _ in range(6):
        for value, other in zip(expected, integers(exact, wide, margin, generator), strict=True):
            is_clear &= (value == other).flatten(1).all(dim=1)
    clear = [row for row, keeps in zip(drawn, is_clear.tolist()) if keeps]
    if len(clear) < POOL_ROWS:
        raise ValueError(f"{exact.name}: {len(drawn) - len(clear)} rows of {len(drawn)} hang on rounding")
    return clear


@torch.inference_mode()
def integers(exact: Cell, some: Sequence[Row], margin: float, generator: torch.Generator) -> list[Tensor]:
    """The integer outputs of successive steps, ``[rows, n]`` each, with noise of size ``margin`` on every float."""
    inputs, found = dict(zip(exact.inputs, batch_of(exact.inputs, some))), []
    for _ in range(MOST_STEPS if exact.has_steps else 1):
        noisy = {name: moved(value, margin, generator) for name, value in inputs.items()}
        outputs = dict(zip(exact.outputs, exact.run_step(*noisy.values())))
        found += [value.unflatten(0, (len(some), -1)) for value in outputs.values() if not value.is_floating_point()]
        inputs |= {name: outputs[output] for name, output in exact.carry.items()}
    return found


def moved(value: CellInput, margin: float, generator: torch.Generator) -> CellInput:
    if isinstance(value, RaggedRows):
        return value._replace(values=value.values + margin * torch.randn(value.values.shape, generator=generator))
    if not value.is_floating_point():
        return value
    return value + margin * torch.randn(value.shape, generator=generator, dtype=value.dtype)
