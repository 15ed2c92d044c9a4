"""Cells with pages and spans, compiled by AOTInductor: they give what their modules give, whatever befalls requests.

Each cell of plain torch is compiled once here, for all tests together. Tests of all but the decoder are slow, as those
of our own layers are: a compiler takes a quarter of a minute for each.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cellrt
from cellrt import PagedRows, RequestError
from cellrt.cells import append_key_values, cross_attention, key_values
from cellrt.cells.language_models import GreedyLanguageModel, language_model
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.paged_attention import Spans
from cellrt.cells.positions import RelativePositions, RotaryPositions
from cellrt.cells.row_layers import RMSNorm
from cellrt.cells.transformer import GatedMLP, Heads, SelfAttention, TransformerLayer
from cellrt.cells.transformer_stack import EncoderDecoder, StackSizes, TransformerStack, encoder_decoder_cells
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.step_program import export_step
from cellrt.definition.aot.store import CACHE_VARIABLE, LibraryStore
from cellrt.definition.attention_operator import ALL
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.computation import Computation
from cellrt.definition.examples import random_nodes
from cellrt.engine import cell_compiler
from cellrt.unfolders import complete
from tests.cells.test_cached_attention import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SIZE,
    VOCABULARY,
    Decoder,
    Encoder,
    plain_attention,
    read,
)
from tests.effort import examples, quickly
from tests.engine.helpers import WAIT_S, close_and_check, error_of
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.timeout(400),  # for the compilers
]
COMPILED = "AOTInductor"
LIMIT = 12


class AppendsThenReads(nn.Module):
    """Half precision; what it appends is read by what does not depend on it, and it makes rows contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(SIZE, HEADS * SIZE)

    def forward(self, x: Tensor, kv: PagedRows) -> Tensor:
        query = self.query(x).view(-1, HEADS, SIZE).half()
        key = x.half()[:, None].expand(-1, KV_HEADS, -1).transpose(0, 1).contiguous().transpose(0, 1)
        before = cross_attention(query, kv)
        append_key_values(key, 2 * key, kv)
        return torch.cat([before, cross_attention(query, kv)], 1).flatten(1).float()


def decoder() -> cellrt.Cell:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = key_values(KV_HEADS, SIZE, layers=LAYERS, page_size=4)
        return cellrt.cell(Decoder().eval(), {"token": cellrt.token, "kv": state}, max_batch=4, max_batch_rows=6)


def encoder() -> cellrt.Cell:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        inputs = {"token": cellrt.token, "text": cellrt.span(whole=True), "memory": key_values(KV_HEADS, SIZE)}
        return cellrt.cell(Encoder().eval(), inputs, max_batch=4, max_batch_rows=32)


def reader() -> cellrt.Cell:
    return cellrt.cell(read, {"query": (HEADS, SIZE), "memory": key_values(KV_HEADS, SIZE, only_read=True)})


def awkward() -> cellrt.Cell:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        state = key_values(KV_HEADS, SIZE, dtype=torch.float16, page_size=2)
        return cellrt.cell(AppendsThenReads().eval(), {"x": (SIZE,), "kv": state}, max_batch=16)


class ReadyMade(nn.Module):
    """Layers of ours: rotary and relative positions, a window, a gate."""

    def __init__(self) -> None:
        super().__init__()
        heads = Heads(HEADS * 6, HEADS, KV_HEADS)
        relative = RelativePositions(HEADS, buckets=8, max_distance=5, both_ways=True)
        self.tokens = nn.Embedding(VOCABULARY, HEADS * 6)
        self.attention = SelfAttention(heads, causal=False, window=3, rotary=RotaryPositions(6), relative=relative)
        self.layer = TransformerLayer(self.attention, GatedMLP(HEADS * 6, 20), lambda: RMSNorm(HEADS * 6))

    def forward(self, token: Tensor, text: cellrt.Spans) -> Tensor:
        """``[rows, hidden]``."""
        rows: Tensor = self.layer(self.tokens(token), Spans(text.offsets, text.positions))
        return rows


def ready_made() -> cellrt.Cell:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return cellrt.cell(ReadyMade().eval(), {"token": cellrt.token, "text": cellrt.span(whole=True)}, max_batch=4)


def pair() -> EncoderDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        sizes = StackSizes(VOCABULARY, 30, HIDDEN, 24, 2, HEADS)
        stacks = TransformerStack(sizes), TransformerStack(sizes, is_decoder=True)
        return encoder_decoder_cells(*stacks, nn.Linear(HIDDEN, VOCABULARY), 0, page_size=3, max_batch=4)


def source_encoder() -> cellrt.Cell:
    return pair().encoder


def greedy_decoder() -> cellrt.Cell:
    return pair().decoder


def llama() -> cellrt.Cell:
    """With a tied embedding, whose products take it packed."""
    with torch.random.fork_rng():
        torch.manual_seed(8)
        sizes = LlamaSizes(VOCABULARY, hidden=24, inner=32, layers=2, heads=4, kv_heads=2, is_tied=True)
        return language_model(Llama(sizes).eval(), 0, page_size=4, max_batch=4, max_batch_rows=6)


CELLS = (decoder, encoder, reader, awkward)
READY_MADE = (ready_made, source_encoder, greedy_decoder, llama)


class Forms:
    """Each cell's form, compiled when it is first asked for: to trace a cell again takes a second."""

    def __init__(self, store: LibraryStore) -> None:
        self._store = store
        self._by_identity: dict[str, CompiledForm] = {}

    def of(self, made: cellrt.Cell) -> CompiledForm:
        if made.identity not in self._by_identity:
            self._by_identity[made.identity] = compile_cell(made, self._store)
        return self._by_identity[made.identity]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(LibraryStore(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def compiled(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Has engines get these forms."""
    monkeypatch.setattr(cell_compiler, "compile_cells", lambda cells, store, _: map(forms.of, cells))
    return monkeypatch


def refuse_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, *inputs):
        raise AssertionError(f"cell {self.name!r} was run by its module")

    monkeypatch.setattr(Computation, "run_step", refuse)


def engine_of(model: cellrt.Unfolder, workers: int = 1, **options: object) -> cellrt.Engine:
    options.setdefault("page_bytes", 1 << 20)
    engine = cellrt.Engine(workers, compile="wait", **options)
    engine.register(model, warm_up=False)
    assert {cell["form"] for cell in engine.statistics()["cells"].values()} == {COMPILED}
    return engine


@pytest.mark.parametrize("make", quickly([decoder], of=CELLS))
def test_a_form_gives_and_appends_what_its_module_does(forms: Forms, make) -> None:
    check_form(make(), forms.of(make()), 2e-3 if make is awkward else 1e-5)


def test_a_form_reads_no_other_memory_than_that_of_its_pages(forms: Forms) -> None:
    made, form = decoder(), forms.of(decoder())
    inputs = dict(zip(made.inputs, random_nodes(made.inputs.values(), 2, 3, 0, torch.Generator())))
    assert form.run(6, inputs) is not None
    kv = inputs["kv"]
    assert isinstance(kv, PagedRows)
    with pytest.raises(cellrt.DefinitionError, match="input 'kv': expected tables of pages 0 to 1"):
        form.run(6, {**inputs, "kv": kv._replace(tables=kv.tables + 2)})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", READY_MADE)
def test_our_own_layers_can_be_traced(make) -> None:
    operators = {node.target for node in export_step(make()).program.graph.nodes}
    assert not operators.isdisjoint(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("make", READY_MADE)
def test_our_own_layers_give_compiled_what_they_give(tmp_path, make) -> None:
    check_form(make(), compile_cell(make(), LibraryStore(tmp_path)), 1e-5)


def check_form(made: cellrt.Cell, form: CompiledForm, tolerance: float) -> None:
    """On nodes of one row and of several, with rows before them and without."""
    generator = torch.Generator().manual_seed(1)
    for nodes, rows, before in ((1, 1, 0), (1, 1, 8), (1, 6, 3), (2, 3, 0), (4, 1, 17)):
        inputs = random_nodes(made.inputs.values(), nodes, rows, before, generator)
        if "token" in made.inputs:
            inputs[0] = torch.randint(VOCABULARY, (nodes * rows,), generator=generator)
        own = [value._replace(pages=value.pages.clone()) if isinstance(value, PagedRows) else value for value in inputs]
        with torch.inference_mode():
            outputs = form.run(nodes * rows, dict(zip(made.inputs, own)))
            expected = made.run(*inputs)
        assert outputs is not None
        for name, value in zip(made.outputs, expected):
            torch.testing.assert_close(outputs[name], value, rtol=tolerance, atol=tolerance)
        for value, other in zip(own, inputs):
            if isinstance(other, PagedRows):
                torch.testing.assert_close(value.pages, other.pages, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_decoder_goes_on_as_in_plain_torch_without_its_module(compiled, workers: int) -> None:
    made = decoder()
    engine = engine_of(complete("mine", made, max_tokens=30), workers)
    prompts = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in (1, 9, 4, 7, 2)]
    expected = [made.module.write(prompt, 30) for prompt in prompts]
    refuse_modules(compiled)
    futures = engine.submit_many("mine", prompts)
    assert [future.result(WAIT_S)["token"].tolist() for future in futures] == expected
    close_and_check(engine)


@pytest.mark.slow
def test_an_encoder_and_what_reads_it_run_without_their_modules(compiled) -> None:
    encode, ask = encoder(), reader()

    def unfold(graph, request):
        text, queries = request
        pages = graph.pages(encode)
        rows = graph.chain(encode, token=text, memory=pages).output
        return {"rows": rows, "read": graph.chain(ask, query=queries, memory=pages).output}

    example = torch.ones(2, dtype=torch.int64), torch.zeros(2, HEADS, SIZE)
    engine = engine_of(cellrt.Unfolder("asked", unfold, example))
    requests = [
        (torch.randint(1, VOCABULARY, (length,)), torch.randn(asked, HEADS, SIZE))
        for length, asked in ((1, 3), (8, 1), (5, 2))
    ]
    with torch.no_grad():
        wholes = [encode.module.whole(text) for text, _ in requests]
    refuse_modules(compiled)
    for (text, queries), (rows, key, value), future in zip(requests, wholes, engine.submit_many("asked", requests)):
        made = future.result(WAIT_S)
        found = plain_attention(queries, key, value, torch.ones(len(queries), len(text)).bool()).flatten(1)
        torch.testing.assert_close(made["rows"], rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made["read"], found, rtol=1e-5, atol=1e-5)
    close_and_check(engine)


@pytest.mark.slow
def test_a_language_model_says_compiled_what_it_says(tmp_path, monkeypatch) -> None:
    """Prompts are read in pieces, of which the logits of the last row alone are made."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    prompts = [torch.randint(1, VOCABULARY, (length,)) for length in (1, 20, 4, 13, 2)]
    answers = []
    for wanted in ("written by hand", COMPILED):
        engine = cellrt.Engine(page_bytes=1 << 20, compile="wait")
        engine.register(complete("lm", llama(), max_tokens=20), warm_up=False)
        answers.append([result["token"].tolist() for result in engine.submit_many("lm", prompts).results()])
        assert engine.statistics()["cells"]["language model"]["form"] == wanted
        close_and_check(engine)
        monkeypatch.setattr(GreedyLanguageModel, "compiled_form", lambda _: None)
    assert answers[0] == answers[1]


PROMPTS = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=14)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(8))
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=8),
    wrong=st.sets(st.integers(0, 7)),
    cancelled=st.sets(st.integers(0, 7)),
    workers=st.integers(1, 2),
    pages=st.sampled_from([10, 16, 64]),
)
def test_each_request_gets_its_own_answer_whatever_befalls_the_others(
    compiled, prompts, wrong, cancelled, workers, pages
) -> None:
    """Tokens outside the vocabulary, cancellations, and so few pages that requests are suspended."""
    made = decoder()
    page = made.inputs["kv"].stored.num_bytes
    engine = engine_of(complete("mine", made, max_tokens=LIMIT), workers, page_bytes=pages * page)
    requests = [[*prompt, VOCABULARY + 3] if k in wrong else prompt for k, prompt in enumerate(prompts)]
    futures = engine.submit_many("mine", requests)
    for k in cancelled & set(range(len(futures))):
        futures[k].cancel()
    for k, (prompt, future) in enumerate(zip(prompts, futures)):
        error = error_of(future)
        if k in cancelled and isinstance(error, cellrt.CancelledError):
            continue
        if k in wrong:
            assert isinstance(error, RequestError)
        else:
            assert error is None and future.result(WAIT_S)["token"].tolist() == made.module.write(prompt, LIMIT)
    close_and_check(engine)


def test_a_session_goes_on_with_what_was_read(compiled) -> None:
    made = decoder()
    engine = engine_of(complete("mine", made, max_tokens=4, keep=True))
    with engine.session("mine") as session:
        first = session.submit([5, 6]).result(WAIT_S)["token"].tolist()
        prompt = [first[-1], 7, 8]
        second = session.submit(prompt).result(WAIT_S)["token"].tolist()
    assert first == made.module.write([5, 6], 4)
    assert second == made.module.write([5, 6, *first[:-1], *prompt], 4)
    close_and_check(engine)


def test_requests_go_on_while_the_form_is_adopted(compiled) -> None:
    made = decoder()
    engine = cellrt.Engine(page_bytes=1 << 20, compile="background")
    engine.register(complete("mine", made, max_tokens=30), warm_up=False)
    prompts = [[1 + k % 20, 2, 3] for k in range(40)]
    expected = [made.module.write(prompt, 30) for prompt in prompts]
    before = engine.submit_many("mine", prompts)
    until(lambda: engine.statistics()["cells"]["Decoder"]["form"] == COMPILED, "the form")
    after = engine.submit_many("mine", prompts)
    for futures in (before, after):
        assert [future.result(WAIT_S)["token"].tolist() for future in futures] == expected
    close_and_check(engine)


def test_what_reads_pages_itself_stays_as_it_is(tmp_path) -> None:
    def sums(x: Tensor, seen: PagedRows) -> Tensor:
        seen.append(x)
        return torch.stack([seen.rows_of(node).sum(0) for node in seen.nodes.tolist()])

    made = cellrt.cell(sums, {"x": (4,), "seen": cellrt.grows(4)})
    with pytest.raises(NotCompiledError) as refused:
        compile_cell(made, LibraryStore(tmp_path))
    assert refused.value.reason is Reason.PAGES
