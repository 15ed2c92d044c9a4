"""A step of a language model as one call: its bits are those of the modules, and what it does not take they do."""

import copy
import pickle

import pytest
import torch

import cellrt
from cellrt.cells import _llama_step, _sampling_step, _weights
from cellrt.cells._llama_stack import run_layers
from cellrt.cells._llama_step import LlamaStep
from cellrt.cells._paged_attention import append, attend
from cellrt.cells._sampling import sample_rows
from cellrt.cells.language_models import GreedyLanguageModel, language_model
from cellrt.cells.llama import Llama
from cellrt.definition.spans import PagedRows
from cellrt.errors import RequestError
from cellrt.unfolders.completion import complete
from tests.cells.test_llama import small

END, PAGE = 7, 4
SPANS = [(20, 20), (6, 1), (5, 5), (40, 3), (1, 1)]
"""Rows of each node, and how many of them are this step's."""


def given(model: Llama, seed: int = 0) -> tuple[torch.Tensor, PagedRows]:
    """Tokens and pages, in a mixed order, of a chunk of each of some texts, of which the last rows are read."""
    draw = torch.Generator().manual_seed(seed)
    sizes, width = model.sizes, 10
    shape = sizes.layers, 2, PAGE, sizes.kv_heads, sizes.attention.size
    pages = torch.randn(len(SPANS) * width, *shape, generator=draw)
    tables = torch.randperm(len(pages), generator=draw).to(torch.int32).view(len(SPANS), width)
    counts = torch.tensor([count for _, count in SPANS])
    offsets = torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length - count, length) for length, count in SPANS]).to(torch.int32)
    lengths = torch.tensor([length for length, _ in SPANS], dtype=torch.int32)
    nodes = torch.arange(len(SPANS), dtype=torch.int32).repeat_interleave(counts)
    is_read = torch.zeros(len(positions), dtype=torch.bool)
    is_read[offsets[1:].long() - 1] = True
    tokens = torch.randint(0, sizes.vocabulary, (len(positions),), generator=draw)
    return tokens, PagedRows(pages, tables, lengths, offsets, nodes, positions, is_read, 2)


def by_modules(module: GreedyLanguageModel, token, kv, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LlamaStep, "run", lambda *_: None)
        return module(token, kv)


@torch.inference_mode()
@pytest.mark.parametrize(
    "changed",
    [{}, {"window": 9}, {"norms_heads": True, "has_bias": True}, {"is_tied": False, "head_dim": 20}, {"hidden": 40}],
)
def test_one_call_gives_the_bits_of_the_modules(changed, monkeypatch):
    model = small(**changed)
    module = GreedyLanguageModel(model, END)
    token, kv = given(model)
    again = kv.copied()
    wanted = by_modules(module, token, again, monkeypatch)
    made = module._in_one_call.run(model, token, kv)
    assert made is not None
    for value, expected in zip(made, wanted, strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value[kv.is_read], expected[kv.is_read])
    assert torch.equal(kv.pages, again.pages)
    assert len({*made[0].tolist()}) > 2


HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def no_instructions(monkeypatch):
    """A processor on which torch has no fast products in 16 bits."""
    monkeypatch.setattr(_weights, "_is_fast_in_torch", lambda dtype: False)


@torch.inference_mode()
@pytest.mark.parametrize("changed", [{}, {"norms_heads": True, "has_bias": True}, {"is_tied": False, "head_dim": 20}])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_call_in_16_bits_is_the_widened_model_but_for_the_rounding_of_what_pages_keep(
    dtype, changed, no_instructions, monkeypatch
):
    model = small(**changed).to(dtype)
    token, kv = given(model)
    kv = kv._replace(pages=kv.pages.to(dtype))
    wide = kv._replace(pages=kv.pages.float())
    expected = by_modules(GreedyLanguageModel(copy.deepcopy(model).float(), END), token, wide, monkeypatch)
    made = LlamaStep(END).run(model, token, kv)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(made[1][kv.is_read], expected.logprob[kv.is_read], atol=4 * rounding, rtol=0)
    torch.testing.assert_close(kv.pages.float(), wide.pages, atol=4 * rounding, rtol=rounding)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_call_in_16_bits_gives_a_row_the_same_bits_alone(dtype, no_instructions):
    model = small().to(dtype)
    token, kv = given(model)
    kv = kv._replace(pages=kv.pages.to(dtype))
    alone = kv.copied()
    step = LlamaStep(END)
    together = step.run(model, token, kv)
    for node, (first, last) in enumerate(zip(kv.offsets.tolist(), kv.offsets[1:].tolist())):
        own = slice(first, last)
        one = alone._replace(
            tables=alone.tables[node : node + 1],
            lengths=alone.lengths[node : node + 1],
            offsets=torch.tensor([0, last - first], dtype=torch.int32),
            nodes=torch.zeros(last - first, dtype=torch.int32),
            positions=alone.positions[own],
            is_read=alone.is_read[own],
        )
        assert all(map(torch.equal, step.run(model, token[own], one), [made[own] for made in together]))
    assert torch.equal(alone.pages, kv.pages)


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_step_in_16_bits_has_a_compiled_form(dtype, sampling, no_instructions):
    cell = language_model(small().to(dtype), END, page_size=PAGE, sampling=sampling)
    assert cell.compiled_form is not None and cell.compiled_form.is_batch_invariant


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_where_torch_has_instructions_for_16_bits_a_step_has_no_form(dtype, monkeypatch):
    monkeypatch.setattr(_weights, "_is_fast_in_torch", lambda dtype: True)
    assert language_model(small().to(dtype), END, page_size=PAGE).compiled_form is None


@torch.inference_mode()
def test_the_end_token_stops():
    model = small()
    token, kv = given(model)
    likeliest = LlamaStep(-1).run(model, token, kv.copied())[0]
    end = int(likeliest[kv.is_read][0])
    stop = LlamaStep(end).run(model, token, kv)[2]
    assert stop[kv.is_read].tolist() == (likeliest[kv.is_read] == end).tolist()


@torch.inference_mode()
def test_changed_weights_are_seen():
    model = small(is_tied=False)
    token, kv = given(model)
    step = LlamaStep(END)
    before = step.run(model, token, kv.copied())[1]
    for weight in (model.head.weight, model.norm.weight, model.embedding.weight, model.layers[0].mlp.up.weight):
        weight.data = 2 * weight.data
        after = step.run(model, token, kv.copied())[1]
        assert not torch.equal(before, after)
        before = after


def hooked(model):
    model.norm.register_forward_hook(lambda *_: None)


def scaled(model):
    model.embedding.max_norm = 1.0


def doubled(model):
    model.double()


class Other(Llama):
    """May do anything."""


def other(model):
    model.__class__ = Other


@torch.inference_mode()
@pytest.mark.parametrize("change", [hooked, scaled, doubled, other])
def test_a_model_that_does_something_else_goes_through_its_modules(change):
    model = small()
    token, kv = given(model)
    change(model)
    if change is doubled:
        kv = kv._replace(pages=kv.pages.double())
    assert LlamaStep(END).run(model, token, kv) is None


@torch.inference_mode()
@pytest.mark.parametrize(
    "wrong",
    [
        lambda token, kv: (token.int(), kv),
        lambda token, kv: (token[:-1], kv),
        lambda token, kv: (token[:0], kv),
        lambda token, kv: (token.clamp(min=40), kv),
        lambda token, kv: (token - 40, kv),
        lambda token, kv: (token, kv._replace(tables=kv.tables.long())),
        lambda token, kv: (token, kv._replace(tables=kv.tables[:-1])),
        lambda token, kv: (token, kv._replace(tables=kv.tables.t())),
        lambda token, kv: (token, kv._replace(lengths=kv.lengths[1:])),
        lambda token, kv: (token, kv._replace(offsets=kv.offsets[1:])),
        lambda token, kv: (token, kv._replace(positions=kv.positions[1:])),
        lambda token, kv: (token, kv._replace(is_read=kv.is_read[1:])),
        lambda token, kv: (token, kv._replace(is_read=kv.is_read.int())),
        lambda token, kv: (token, kv._replace(pages=kv.pages[:, :1])),
        lambda token, kv: (token, kv._replace(pages=kv.pages[::2])),
        lambda token, kv: (token, kv._replace(pages=kv.pages.half())),
        lambda token, kv: (token, kv._replace(page_dim=1)),
    ],
)
def test_other_rows_than_the_call_reads_are_left_to_the_modules(wrong):
    model = small()
    step, (token, kv) = LlamaStep(END), given(model)
    assert step.run(model, token, kv.copied()) is not None
    pages = kv.pages.clone()
    assert step.run(model, *wrong(token, kv)) is None
    assert torch.equal(kv.pages, pages)


def test_gradients_are_those_of_the_modules():
    model = small()
    token, kv = given(model)
    assert LlamaStep(END).run(model, token, kv) is None


@torch.inference_mode()
def test_copies_have_weights_of_their_own():
    module = GreedyLanguageModel(small(), END)
    token, kv = given(module.model)
    wanted = module(token, kv.copied())
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    module.model.norm.weight.data = 3 * module.model.norm.weight.data
    for each in copies:
        assert each._in_one_call._last is None
        assert all(map(torch.equal, each(token, kv.copied()), wanted))


def test_a_token_outside_the_vocabulary_is_named():
    model = complete("lm", language_model(small(), END, page_size=PAGE), max_tokens=3)
    with cellrt.Engine(1, page_bytes=1 << 22) as engine:
        engine.register(model)
        with pytest.raises(RequestError, match="expected tokens from 0 to 39, got 40"):
            engine.submit("lm", {"prompt": [1, 40, 2], "max_tokens": 3}).result(30.0)
        assert len(engine.submit("lm", {"prompt": [1, 39, 2], "max_tokens": 3}).result(30.0)["token"])


def test_positions_that_the_form_has_no_turns_for_go_through_the_modules(monkeypatch):
    prompt = torch.randint(0, 40, (1_100,), generator=torch.Generator().manual_seed(6)).tolist()

    def tokens() -> list[int]:
        with cellrt.Engine(1, page_bytes=1 << 20) as engine:
            engine.register(complete("lm", language_model(small(), -1, page_size=PAGE), max_tokens=4))
            return engine.submit("lm", {"prompt": prompt, "max_tokens": 4}).result(60.0)["token"].tolist()

    wanted = tokens()
    monkeypatch.setattr(_llama_step, "MOST_POSITIONS", 1)  # a table has 1,024 at least
    runs = []
    in_modules = LlamaStep.run
    monkeypatch.setattr(LlamaStep, "run", lambda *given: runs.append(1) or in_modules(*given))
    assert tokens() == wanted
    assert len(runs) >= 4


@pytest.mark.parametrize(
    "called", [run_layers, attend, append, sample_rows, _llama_step._run_step, _sampling_step._run_step]
)
def test_what_a_whole_step_calls_is_a_part_of_it_and_no_machine_code_is_made_of_it_before(called):
    assert called.targetoptions["no_cpython_wrapper"]
