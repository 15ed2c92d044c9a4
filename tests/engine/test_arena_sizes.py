"""How many rows and pages an engine has by itself, and what it says when they are too few."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cellrt.definition.define import cell
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import RowSpec, grows, rows, span
from cellrt.engine import arena_sizes
from cellrt.engine.arena_sizes import ArenaBytes, ArenaSizes, NumRows
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError, RequestTooLargeError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.make import memory_of
from tests.engine.helpers import WAIT_S, close_and_check, error_of, small_engine
from tests.engine.paged_models import WIDTH
from tests.engine.test_arena_memory import TELLS_OF_PAGES, bytes_in_memory
from tests.engine.test_resident_memory import resident_bytes
from tests.engine.test_room_of_sessions import appending

MB, GB = 1 << 20, 1 << 30
WIDE = 4096
ROW, PAGE = rows(1024), grows(1024, page_size=256).stored


def chosen(
    spec: RowSpec, monkeypatch: pytest.MonkeyPatch, *, free: int | None, workers: int = 1, max_batch: int = 1, **more
) -> tuple[int, int]:
    """Bytes at the host and at each worker."""
    monkeypatch.setattr(arena_sizes, "free_bytes", lambda: free)
    made = cell(lambda x: x, {"x": (1024,)}, name="same", max_batch=max_batch)
    (num_rows,) = ArenaSizes(ArenaBytes(), workers, **more).choose([spec], [made]).values()
    return num_rows.host * spec.num_bytes, num_rows.worker * spec.num_bytes


@pytest.mark.parametrize(
    ("free", "workers", "expected"),
    [(None, 1, 64 * MB), (64 * GB, 1, 64 * MB), (64 * GB, 30, 60 * MB), (1 * GB, 1, 16 * MB)],
)
def test_rows_are_a_part_of_the_free_memory(monkeypatch, free, workers, expected):
    host, worker = chosen(ROW, monkeypatch, free=free, workers=workers)
    assert worker == pytest.approx(expected, rel=0.01) and host == 4 * worker


def test_rows_are_more_where_full_batches_need_them(monkeypatch):
    _, worker = chosen(ROW, monkeypatch, free=64 * GB, max_batch=8192)
    assert worker == 4 * 8192 * ROW.num_bytes
    _, worker = chosen(ROW, monkeypatch, free=4 * GB, max_batch=65_536)
    assert worker == pytest.approx(4 * GB / 8 / 5, rel=0.01), "an eighth of the memory, at five places"


@pytest.mark.parametrize(
    ("free", "workers", "expected"), [(None, 1, 256 * MB), (15 * GB, 1, GB), (24 * GB, 2, 4 * GB / 3)]
)
def test_pages_come_to_a_third_of_the_free_memory(monkeypatch, free, workers, expected):
    host, worker = chosen(PAGE, monkeypatch, free=free, workers=workers)
    assert worker == pytest.approx(expected, rel=0.01) and host == pytest.approx(4 * worker, rel=0.01)


def test_pages_of_further_models_come_to_a_third_of_what_is_left(monkeypatch):
    monkeypatch.setattr(arena_sizes, "free_bytes", lambda: 30 * GB)
    sizes, others = ArenaSizes(ArenaBytes(), 1), [grows(width, page_size=256).stored for width in range(512, 522)]
    total = 0
    for spec in others:
        (num_rows,) = sizes.choose([spec], []).values()
        total += (num_rows.host + num_rows.worker) * spec.num_bytes
    assert 28 * GB < total < 30 * GB


@pytest.mark.parametrize("at_worker", [None, 64 * GB])
def test_a_small_state_leaves_the_pages_of_a_large_one_nearly_all(monkeypatch, at_worker):
    """As the tokens of a text beside its keys and values."""
    monkeypatch.setattr(arena_sizes, "free_bytes", lambda: 30 * GB)
    small, found = grows(dtype=torch.int32, page_size=PAGE.page_size).stored, []
    for specs in ([PAGE], [PAGE, small], [small, PAGE]):
        sizes = ArenaSizes(ArenaBytes(), 1, None if at_worker is None else lambda: at_worker)
        chosen = sizes.choose(specs, [])
        found.append(chosen[PAGE].worker)
        assert small not in chosen or chosen[small].worker >= chosen[PAGE].worker
    assert min(found[1:]) > 0.99 * found[0]


def test_a_device_has_parts_of_its_own_memory_and_the_host_of_its_own(monkeypatch):
    host, worker = chosen(PAGE, monkeypatch, free=6 * GB, free_at_worker=lambda: 80 * GB)
    assert worker == pytest.approx(20 * GB, rel=0.01) and host == pytest.approx(2 * GB, rel=0.01)
    host, worker = chosen(ROW, monkeypatch, free=6 * GB, free_at_worker=lambda: 80 * GB)
    assert (host, worker) == (256 * MB, 64 * MB)


def test_what_was_given_is_what_there_is():
    sizes = ArenaSizes(ArenaBytes(8 * MB, 64 * MB), 3)
    assert sizes.choose([ROW, PAGE], []) == {ROW: NumRows(8192, 2048), PAGE: NumRows(256, 64)}


@TELLS_OF_PAGES
def test_arenas_take_no_memory_before_they_are_used():
    engine = Engine(1, freeze=False)
    try:
        engine.register(appending(16, keep=False, max_batch=8, max_batch_rows=8), warm_up=False)
        arenas = [each[kind] for each in engine._arenas for kind in range(len(each))]
        held = sum(arena.nbytes for arena in arenas)
        assert held > 64 * MB and sum(map(bytes_in_memory, arenas)) < held / 4
    finally:
        close_and_check(engine)


def test_many_engines_in_a_process_take_little():
    before = resident_bytes()
    engines = [small_engine(1, arena_bytes=None) for _ in range(8)]
    try:
        for engine in engines:
            engine.register(appending(16, keep=False, max_batch=8, max_batch_rows=8), warm_up=False)
        assert resident_bytes() - before < 512 * MB
    finally:
        for engine in engines:
            close_and_check(engine)


def wanted_bytes(told: object, option: str) -> int:
    """What an error says that an option must be."""
    (found,) = re.findall(rf"{option}=(\d+)\)", str(told))
    return int(found)


def test_an_engine_made_as_the_error_says_has_the_rows():
    add = cell(lambda x, h: {"h": h + x}, {"x": (WIDTH,), "h": (WIDTH,)}, name="add")
    model = Unfolder("sum", lambda graph, x: {"h": graph.chain(add, x=x).h}, torch.zeros(1, WIDTH))
    long, arena_bytes = torch.ones(3000, WIDTH), 1
    for _ in range(2):
        with small_engine(arena_bytes=arena_bytes) as engine:
            engine.register(model, warm_up=False)
            if arena_bytes > 1:
                assert engine.submit("sum", long).result(WAIT_S)["h"].shape == (3000, WIDTH)
                continue
            with pytest.raises(RequestTooLargeError, match="rows of .* at the host, which have 64 and") as told:
                engine.submit("sum", long)
            arena_bytes = wanted_bytes(told.value, "arena_bytes")


def test_an_engine_made_as_the_error_says_has_the_pages():
    model, page_bytes = appending(1, keep=True, max_batch=8, max_batch_rows=8), 1
    for _ in range(2):
        with small_engine(page_bytes=page_bytes) as engine:
            engine.register(model, warm_up=False)
            session = engine.session("append")
            session.submit(torch.ones(50, WIDTH)).result(WAIT_S)
            error = error_of(session.submit(torch.ones(30, WIDTH)))
            if page_bytes > 1:
                assert error is None
                continue
            assert "with what its session has kept, the request needs 80 pages of 1" in str(error)
            page_bytes = wanted_bytes(error, "page_bytes")


class Wide(nn.Module):
    """A large row for each row of a state that grows."""

    def forward(self, x: torch.Tensor, total: PagedRows) -> torch.Tensor:
        total.append(x)
        return x.repeat(1, WIDE // WIDTH)


def test_tasks_have_no_more_rows_than_a_worker_has_room_for_their_outputs():
    made = cell(Wide(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=4)}, name="wide")

    def read(graph, x):
        return {"last": graph.chain(made, x=x, total=graph.pages(made)).last.output}

    with small_engine(arena_bytes=64 * WIDE * 4, page_bytes=1 << 20) as engine:
        engine.register(Unfolder("read", read, torch.zeros(2, WIDTH)), warm_up=False)
        x = torch.randn(100, WIDTH)
        last = engine.submit("read", x).result(WAIT_S)["last"]
        assert torch.equal(last, x[-1].repeat(WIDE // WIDTH))
        assert engine.statistics()["cells"]["wide"]["tasks"] == 2  # of 64 rows and 36
        engine.check()


def test_what_must_be_read_whole_and_is_longer_is_told_what_it_takes():
    made = cell(lambda x, spans: x, {"x": (WIDTH,), "spans": span(whole=True)}, name="whole")

    def read(graph, x):
        return {"x": graph.chain(made, x=x).output}

    with small_engine() as engine:
        engine.register(Unfolder("read", read, torch.zeros(2, WIDTH)), warm_up=False)
        assert len(engine.submit("read", torch.ones(512, WIDTH)).result(WAIT_S)["x"]) == 512
        with pytest.raises(RequestTooLargeError, match=r"at most 512; that takes cell\(max_batch_rows=600\) or more"):
            engine.submit("read", torch.ones(600, WIDTH))


def test_tables_that_are_too_small_are_named_with_what_they_must_be():
    add = cell(lambda x: {"y": x + 1}, {"x": (WIDTH,)}, name="add")
    model = Unfolder("many", lambda graph, x: {"y": [add(x=row).y for row in x]}, torch.zeros(1, WIDTH))
    with small_engine(arena_bytes=1 << 22) as engine:
        engine.register(model, warm_up=False)
        with pytest.raises(
            RequestTooLargeError, match=r"5,000 nodes, the tables hold 4,096; .*Limits\(max_nodes=5000\)"
        ):
            engine.submit("many", torch.ones(5000, WIDTH))


def test_more_than_any_engine_has_is_told_as_such():
    model = appending(1, keep=False)
    with small_engine(page_bytes=1) as engine, pytest.raises(DefinitionError, match="an engine has at most 65,536"):
        engine.register(Unfolder("append", model.function, 70_000), warm_up=False)


def test_workers_that_share_a_device_share_its_free_memory(monkeypatch):
    def device(name: str) -> SimpleNamespace:
        return SimpleNamespace(torch_device=torch.device(name))

    free = {"cuda:0": 8 * GB, "cuda:1": 5 * GB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (free[str(place)], 80 * GB))
    asked = [memory_of([device(name) for name in names]) for names in (["cuda:0"] * 2, ["cuda:0", "cuda:1"])]
    assert [ask() for ask in asked] == [4 * GB, 5 * GB]
    assert memory_of([None, None]) is None and memory_of([device("cpu")]) is None
