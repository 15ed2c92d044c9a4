"""A user's own cell, compiled by AOTInductor: equal to its module, found by structure, switched to while it serves.

One decoder with attention over a ragged memory is compiled here, for all tests together.
"""

from __future__ import annotations

import copy
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt import Cell, DefinitionError, RaggedRows, RequestError, Unfolder
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.refusal import Reason
from cellrt.definition.aot.step_program import export_step
from cellrt.definition.aot.store import CACHE_VARIABLE, LibraryStore
from cellrt.definition.compiled_form import DONE, CompiledForm
from cellrt.graph.reference import run_one_by_one
from cellrt.worker.cpu.cpu_executor import Executor
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.waiting import until

WIDTH, TOKENS = 6, 11
COMPILED = "AOTInductor"


class Decoder(nn.Module):
    """A GRUCell, attention over a ragged memory, a constant, the best token; it stops when it has counted down."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(TOKENS, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, TOKENS)

    def forward(self, token: Tensor, left: Tensor, h: Tensor, memory: RaggedRows) -> dict[str, Tensor]:
        h = self.cell(self.table(token), h)
        owner = torch.repeat_interleave(memory.offsets.diff(), output_size=memory.values.shape[0])
        weights = (h[owner] * memory.values).sum(1).exp()
        total = torch.zeros_like(h[:, 0]).index_add(0, owner, weights)
        context = torch.zeros_like(h).index_add(0, owner, (weights / total[owner])[:, None] * memory.values)
        logits = self.head(torch.cat([h, context], 1)) - torch.tensor([0.25, *[0.0] * (TOKENS - 1)])
        return {"token": logits.argmax(1), "left": left - 1, "stop": left <= 1, "h": h, "logits": logits}


INPUTS = {"token": cellrt.token, "left": cellrt.token, "h": (WIDTH,), "memory": cellrt.ragged(WIDTH)}


def decoder(seed: int, name: str = "decoder") -> Cell:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cellrt.cell(Decoder(), INPUTS, name=name, max_batch=64)


def model_of(made: Cell, name: str = "decode", keep: Sequence[str] = ()) -> Unfolder:
    """A request is a memory and a number of steps; the memory's rows are inputs, as no other cell makes them."""

    @cellrt.unfold(name, example=(torch.zeros(2, WIDTH), 3))
    def model(graph, request):
        memory, steps = request
        start = {"token": 1, "left": steps, "h": torch.zeros(WIDTH)}
        loop = graph.loop(made, **start, memory=list(memory), until="stop", max_steps=20, keep=keep)
        return {"token": loop.token, "h": loop.last.h, "logits": loop.logits}

    return model


def requests_of(count: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(k % 7, WIDTH, generator=generator), 1 + k % 9) for k in range(count)]


def inputs_of(made: Cell, counts: list[int], seed: int = 0) -> dict[str, Tensor | RaggedRows]:
    """Random rows, each with so many of the memory."""
    generator, rows = torch.Generator().manual_seed(seed), len(counts)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return {
        "token": torch.randint(TOKENS, (rows,), generator=generator),
        "left": torch.randint(4, (rows,), generator=generator),
        "h": torch.randn(rows, WIDTH, generator=generator),
        "memory": RaggedRows(torch.randn(int(offsets[-1]), WIDTH, generator=generator), offsets),
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LibraryStore:
    """With the decoder's library in it."""
    made = LibraryStore(tmp_path_factory.mktemp("cache"))
    compile_cell(decoder(0), made)
    assert made.num_compiled == 1
    return made


@pytest.fixture(scope="module")
def form(store: LibraryStore) -> CompiledForm:
    """The decoder's, whose weights are always the same."""
    return compile_cell(decoder(0), store)


@pytest.fixture
def cache(store: LibraryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines find the decoder's library."""
    monkeypatch.setenv(CACHE_VARIABLE, str(store.folder.parent))


def refuse_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, cell_type, buffer):
        raise AssertionError(f"cell {cell_type.cell.name!r} was run by its module")

    monkeypatch.setattr(Executor, "_run_module", refuse)


@pytest.mark.parametrize(
    "counts", [[3], [1], [0], [2, 0, 5], [0, 0, 0], [1, 0], [0, 1, 0, 0], [4] * 64, [k % 5 for k in range(33)]]
)
def test_a_form_gives_what_its_module_gives(form: CompiledForm, counts: list[int]) -> None:
    made = decoder(0)
    inputs = inputs_of(made, counts)
    outputs = form.run(len(counts), inputs)
    assert outputs is not None
    assert_same(outputs, dict(zip(made.outputs, made.run(*inputs.values()))))


def test_calls_from_several_threads_leave_no_memory_behind(form: CompiledForm) -> None:
    made = decoder(0)
    failures: list[str] = []

    def call(seed: int) -> None:
        some = [inputs_of(made, [(seed + k) % 5 for k in range(rows)], seed) for rows in (1, 2, 5, 13, 30)]
        expected = [dict(zip(made.outputs, made.run(*inputs.values()))) for inputs in some]
        bound = [form.bind(len(inputs["h"]), inputs) for inputs in some]
        for _ in range(300):
            for run, _ in bound:
                assert run() == DONE
        for (_, outputs), values in zip(bound, expected):
            try:
                assert_same(outputs, values)
            except AssertionError as error:
                failures.append(str(error))

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    call(9)
    before = resident_bytes()
    threads = [Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert resident_bytes() - before < 12 << 20  # 6,000 calls: the handles of one call, left behind by each, are more


@pytest.mark.slow
@pytest.mark.parametrize("function", [torch.expm1, torch.atanh])
def test_small_numbers_keep_their_digits(tmp_path, function) -> None:
    x = torch.linspace(-1e-4, 1e-4, 192).reshape(3, 64)
    form = compile_cell(cellrt.cell(lambda x: function(x), {"x": (64,)}), LibraryStore(tmp_path))
    made = form.run(3, {"x": x})
    assert made is not None
    torch.testing.assert_close(made["output"], function(x.double()).float(), rtol=1e-5, atol=0.0)


@pytest.mark.slow
def test_other_weights_are_found_again_and_give_other_results(store: LibraryStore) -> None:
    some, other = decoder(0), decoder(1)
    inputs = inputs_of(some, [2, 3, 1])
    results = [compile_cell(made, store).run(3, inputs)["logits"] for made in (some, other, some)]
    assert store.num_compiled == 1
    assert not torch.allclose(results[0], results[1], atol=1e-2)
    assert torch.equal(results[0], results[2])
    assert_same({"logits": results[1]}, {"logits": other.run(*inputs.values())[-1]})


def test_structure_is_what_is_compiled_and_not_weights_or_names() -> None:
    digest = export_step(decoder(0)).digest()
    assert export_step(decoder(5, "other")).digest() == digest
    double = {"h": cellrt.rows(WIDTH, dtype=torch.float64), "memory": cellrt.ragged(WIDTH, dtype=torch.float64)}
    assert export_step(cellrt.cell(Decoder().double(), {**INPUTS, **double})).digest() != digest


@pytest.mark.parametrize("workers", [1, 2])
def test_loops_over_a_ragged_memory_run_without_python(cache: None, monkeypatch, workers: int) -> None:
    refuse_modules(monkeypatch)
    models = [model_of(decoder(seed), f"decode{seed}") for seed in (0, 1)]
    engine = small_engine(workers, compile="wait", debug=True)
    for model in models:
        engine.register(model)
    asked = [(models[k % 2], request) for k, request in enumerate(requests_of(60))]
    futures = [engine.submit(model.name, request) for model, request in asked]
    for (model, request), future in zip(asked, futures):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    assert {cell["form"] for cell in engine.statistics()["cells"].values()} == {COMPILED}
    assert "2 of 2 cells compiled" in repr(engine)
    close_and_check(engine)


def test_chains_run_without_python(cache: None, monkeypatch) -> None:
    refuse_modules(monkeypatch)
    made = decoder(0)

    @cellrt.unfold("chain", example=torch.zeros(2, WIDTH))
    def model(graph, memory):
        node = made(token=2, left=9, h=torch.ones(WIDTH), memory=list(memory))
        for _ in range(len(memory)):
            node = made(token=node.token, left=node.left, h=node.h, memory=list(memory))
        return {"h": node.h, "token": node.token}

    engine = small_engine(compile="wait")
    engine.register(model)
    requests = [memory for memory, _ in requests_of(30)]
    for future, request in zip(engine.submit_many("chain", requests), requests):
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    close_and_check(engine)


def test_a_token_that_does_not_exist_fails_its_own_request(cache: None) -> None:
    made = decoder(0)

    @cellrt.unfold("step", example=1)
    def model(graph, token):
        node = made(token=token, left=3, h=torch.ones(WIDTH), memory=[torch.ones(WIDTH)] * 3)
        return {"h": node.h}

    engine = small_engine(compile="wait")
    engine.register(model)
    good, bad, other = engine.submit_many("step", [1, TOKENS, 2])
    with pytest.raises(RequestError, match="input 'token': expected tokens from 0 to 10, got 11"):
        bad.result(WAIT_S)
    for future, token in ((good, 1), (other, 2)):
        assert_same(future.result(WAIT_S), run_one_by_one(model, token))
    close_and_check(engine)


BAD_TOKEN = f"""
import cellrt, torch
from tests.engine.test_own_cells import TOKENS, WIDTH, decoder, wait_for_form

made = decoder(0)

@cellrt.unfold("step", example=1)
def model(graph, token):
    return {{"h": made(token=token, left=3, h=torch.ones(WIDTH), memory=[torch.ones(WIDTH)] * 3).h}}

with cellrt.Engine(1, compile="wait") as engine:
    engine.register(model)
    wait_for_form(engine)
    for future in engine.submit_many("step", [1, TOKENS, 2]):
        print(type(future.exception({WAIT_S})).__name__)
"""


def test_a_token_that_does_not_exist_leaves_no_frames_on_the_standard_error(store: LibraryStore) -> None:
    environment = {**os.environ, CACHE_VARIABLE: str(store.folder.parent)}
    command = [sys.executable, "-c", BAD_TOKEN]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.stdout.split() == ["NoneType", "RequestError", "NoneType"], ended.stderr
    assert not [line for line in ended.stderr.splitlines() if not line.startswith("cellrt ")]


def wait_for_form(engine: cellrt.Engine | cellrt.EngineProcess, name: str = "decoder") -> None:
    until(lambda: engine.statistics()["cells"][name]["form"] == COMPILED, f"{name} is compiled")


def test_a_form_that_comes_later_takes_requests_from_then_on(cache: None) -> None:
    made = decoder(0)
    model = model_of(made)
    engine = small_engine(compile="background", debug=True)
    engine.register(model)
    asked = requests_of(20)
    before = engine.submit_many(model.name, asked)
    wait_for_form(engine)
    num_tasks = engine.statistics()["cells"]["decoder"]["tasks"]
    after = engine.submit_many(model.name, asked)
    for futures in (before, after):
        for future, request in zip(futures, asked):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    assert engine.drain(WAIT_S)
    counts = engine.statistics()["cells"]
    assert counts.keys() == {"decoder"} and counts["decoder"]["tasks"] > num_tasks
    assert len(engine._registry.types) == 1
    close_and_check(engine)


def test_nothing_fails_while_modules_are_traced(cache: None) -> None:
    models = [model_of(decoder(seed, f"decoder{seed}"), f"decode{seed}") for seed in range(3)]
    engine = small_engine(2, compile="background", debug=True)
    asked = requests_of(16)
    futures = []
    for model in models:
        engine.register(model, warm_up=False)
        for known in models[: models.index(model) + 1]:
            futures += [(known, request, engine.submit(known.name, request)) for request in asked]
    for seed in range(3):
        wait_for_form(engine, f"decoder{seed}")
        futures += [(models[seed], request, engine.submit(models[seed].name, request)) for request in asked]
    for model, request, future in futures:
        assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    close_and_check(engine)


@pytest.mark.slow
def test_clients_and_sessions_new_and_old_go_on_when_a_form_comes(cache: None, tmp_path: Path) -> None:
    path, asked = tmp_path / "mine.py", (torch.ones(2, WIDTH), 3)
    source = "from tests.engine.test_own_cells import decoder, model_of\nmodel = model_of(decoder(0), keep=['h'])\n"
    path.write_text(source)
    wanted = run_one_by_one(model_of(decoder(0)), asked)
    with cellrt.EngineProcess(1, arena_bytes=1 << 16, compile="background") as engine:
        engine.register(f"{path}:model", warm_up=False)
        before, kept = engine.binding("decode"), engine.session("decode", "kept")
        wait_for_form(engine)
        until(lambda: engine.binding("decode") is not before, "the client hears of it")
        with cellrt.connect(engine.address) as other:
            assert_same(other.submit("decode", asked).result(WAIT_S), wanted)
        path.write_text(source.replace("0", "1"))  # which nobody asked for
        for submit in (partial(engine.submit, "decode"), kept.submit, engine.session("decode", "new").submit):
            assert_same(submit(asked).result(WAIT_S), wanted)
        now = engine.binding("decode")
        assert now.version == before.version and now.unfolder is before.unfolder
        engine.check()


def test_models_that_share_a_cell_all_get_its_form_and_give_it_up_in_any_order(cache: None) -> None:
    known = {"broken": 0}

    @cellrt.unfold("broken", example=(torch.zeros(2, WIDTH), 3))
    def broken(graph, request):
        known["broken"] += 1
        if known["broken"] > 1:
            raise KeyError("it unfolds once")
        return model_of(decoder(0)).function(graph, request)

    models, asked = [model_of(decoder(0), name, ["h"]) for name in ("one", "two")], (torch.ones(2, WIDTH), 3)
    engine = small_engine(compile="background", debug=True)
    with engine._register_lock:  # no form is taken up before all are registered
        engine._register_lock, lock = threading.Lock(), engine._register_lock
        for model in (broken, *models):
            engine.register(model, warm_up=False)
        eager = engine.session("one")
        first = eager.submit(asked).result(WAIT_S)
        engine._register_lock = lock
    until(lambda: all(form is not None for form in forms_of(engine, "one", "two")), "both have the form")
    assert forms_of(engine, "broken") == [None]
    compiled = engine._models["one"].types[decoder(0).identity]
    engine.register(model_of(decoder(1), "one", ["h"]), warm_up=False, replace=True)
    engine.unregister("two")
    until(lambda: compiled not in engine._registry.types, "the later form is given up first")
    eager.close()
    for name in ("broken", "one"):
        engine.unregister(name)
    until(lambda: not engine._registry.types, "the cell is given up, in both forms")
    assert_same(first, run_one_by_one(models[0], asked))
    close_and_check(engine)


def forms_of(engine: cellrt.Engine, *models: str) -> list[object]:
    types = [type_id for name in models for type_id in engine._models[name].types.values()]
    return [engine._registry.types[type_id].form for type_id in types]


def test_a_session_keeps_its_state_when_a_form_comes(cache: None) -> None:
    made, memory = decoder(0), torch.ones(2, WIDTH)

    @cellrt.unfold("session", example=3)
    def model(graph, steps):
        loop = graph.loop(
            made, token=1, left=steps, h=torch.zeros(WIDTH), memory=list(memory), until="stop", max_steps=9, keep=["h"]
        )
        return {"h": loop.last.h}

    engine = small_engine(compile="background", debug=True)
    engine.register(model)
    with engine._register_lock:  # the form cannot be taken up before the session has begun
        first = engine.session("session", "known").submit(2).result(WAIT_S)
    wait_for_form(engine)
    second = engine.session("session", "known").submit(3).result(WAIT_S)
    new = engine.session("session", "new").submit(2).result(WAIT_S)
    assert_same(new, first)
    h, token = torch.zeros(1, WIDTH), torch.tensor([1])
    for steps in (2, 3):
        token = torch.tensor([1])
        for left in range(steps, 0, -1):
            token, _, _, h, _ = made.run(token, torch.tensor([left]), h, RaggedRows(memory, torch.tensor([0, 2])))
    assert_same(second, {"h": h[0]})
    assert len(engine._registry.types) == 2
    for key in ("known", "new"):
        engine.session("session", key).close()
    close_and_check(engine)


def test_without_a_compiler_the_module_serves(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = model_of(decoder(0))
    engine = small_engine(compile="wait")
    engine.register(model)
    assert engine.statistics()["cells"]["decoder"]["form"] == f"eager: {Reason.NO_COMPILER}: no-such-compiler"
    assert "'decoder' stays eager" in caplog.text
    request = requests_of(5)[3]
    assert_same(engine.submit("decode", request).result(WAIT_S), run_one_by_one(model, request))
    close_and_check(engine)


def test_a_switch_turns_it_off() -> None:
    engine = small_engine(compile="off")
    engine.register(model_of(decoder(0)))
    assert engine.statistics()["cells"]["decoder"]["form"] == "eager: compile is off"
    close_and_check(engine)
    with pytest.raises(DefinitionError, match="compile: expected one of 'off', 'background', 'wait', got 'yes'"):
        small_engine(compile="yes")


def test_a_form_says_whether_rows_keep_their_bits(store: LibraryStore) -> None:
    made = decoder(0)
    form = compile_cell(made, store)
    inputs = inputs_of(made, [3, 0, 2, 5, 1, 1, 4])
    together = form.run(7, inputs)
    offsets = inputs["memory"].offsets.tolist()
    same = True
    for row in range(7):
        values = inputs["memory"].values[offsets[row] : offsets[row + 1]]
        alone = {name: inputs[name][row : row + 1] for name in ("token", "left", "h")}
        alone["memory"] = RaggedRows(values, torch.tensor([0, len(values)]))
        same &= all(torch.equal(value[0], together[name][row]) for name, value in form.run(1, alone).items())
    assert same or not form.is_batch_invariant


def test_cells_with_forms_are_copied_and_pickled() -> None:
    made = decoder(0)
    assert copy.deepcopy(made).identity == pickle.loads(pickle.dumps(made)).identity == made.identity
