"""Models come by import path, to the engine's process and to every client; they are replaced and taken out for all."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from cellrt.errors import DefinitionError, RequestError, UnknownModelError
from cellrt.graph.unfolder import Unfolder
from cellrt.process.address import listen
from cellrt.process.client import connect
from cellrt.process.source import ModelSource, source_of
from tests.engine.helpers import WAIT_S
from tests.process import models
from tests.process.helpers import start, steps
from tests.waiting import until

HERE = "tests.process.models"


@pytest.fixture(scope="module")
def engine():
    with start() as made:
        yield made


def test_a_model_that_is_replaced_is_another_for_every_client_and_nothing_is_lost(engine):
    with connect(engine.address) as one, connect(engine.address) as other:
        one.register(models.chain, warm_up=False)
        with pytest.raises(DefinitionError, match="registered already"):
            other.register(f"{HERE}:chain")
        assert other.submit("chain", steps(1)).result(WAIT_S).keys() == {"every", "last"}
        ended: list[set[str]] = []
        stop = threading.Event()

        def go_on() -> None:
            while not stop.is_set():
                ended.append(set(other.submit("chain", steps(2)).result(WAIT_S)))

        thread = threading.Thread(target=go_on)
        thread.start()
        one.register(f"{HERE}:other_chain", warm_up=False, replace=True)
        assert one.submit("chain", steps(1)).result(WAIT_S).keys() == {"only"}
        until(lambda: ended[-1:] == [{"only"}], "the other client has the new model")
        stop.set()
        thread.join(WAIT_S)
        assert {frozenset(keys) for keys in ended} == {frozenset({"every", "last"}), frozenset({"only"})}
        one.unregister("chain")
        with pytest.raises(UnknownModelError):
            one.submit("chain", steps(1))
        until(lambda: _is_unknown(other), "the other client hears of it")
        with pytest.raises(UnknownModelError):
            one.unregister("chain")
    until(lambda: engine.statistics()["cells"] == {}, "its cells are given up")


def test_a_callback_may_submit_to_a_model_that_was_just_replaced(engine):
    """As often as one likes, and to one that was taken out meanwhile and came back."""
    engine.register(models.chain, warm_up=False)
    with connect(engine.address) as client:
        ended: list[object] = []
        for make, expected in (("other_chain", {"only"}), ("chain", {"every", "last"})) * 2:
            is_over = threading.Event()

            def again(future, is_over=is_over, expected=expected) -> None:
                try:
                    ended.append(set(future.result()))
                    if ended[-1] == expected:
                        is_over.set()
                    else:
                        client.submit("chain", steps(2)).add_done_callback(again)
                except BaseException as error:
                    ended.append(error)
                    is_over.set()

            client.submit("chain", steps(2)).add_done_callback(again)
            engine.register(f"{HERE}:{make}", warm_up=False, replace=True)
            assert is_over.wait(WAIT_S)
            assert ended[-1] == expected
        engine.unregister("chain")
        until(lambda: _is_unknown(client), "the client hears of it")
        engine.register(models.chain, warm_up=False)
        until(lambda: "chain" in client._bindings.by_name, "the client has it before anybody asks")
    engine.unregister("chain")
    until(lambda: engine.statistics()["cells"] == {}, "its cells are given up")


def _is_unknown(client) -> bool:
    try:
        client.submit("chain", steps(1))
    except UnknownModelError:
        return True
    return False


def test_a_session_goes_on_with_the_model_that_it_was_opened_with(engine):
    engine.register(models.kept, warm_up=False)
    with connect(engine.address) as client:
        session = client.session("kept")
        first = session.submit(steps(2)).result(WAIT_S)["last"]
        engine.register(models.kept, warm_up=False, replace=True)
        until(lambda: client.session("kept", session.id)._binding.is_outdated, "it knows that there is another")
        assert session.submit(steps(1)).result(WAIT_S)["last"][0] > first[0]
        session.close()
    engine.unregister("kept")
    until(lambda: engine.statistics()["cells"] == {}, "its cells are given up")


FILE = """import cellrt, torch
STEP = cellrt.cell(lambda x, h: {'h': x + 2 * h}, {'x': (3,), 'h': (3,)}, name='step')
def make():
    return cellrt.unfold('mine', example=torch.zeros(2, 3))(
        lambda graph, x: {'h': graph.chain(STEP, keep=True, x=x).last.h})
"""


def test_a_client_goes_on_with_sessions_of_a_version_that_no_file_has_any_more(engine, tmp_path):
    path, ones = tmp_path / "mine.py", torch.ones(1, 3)
    path.write_text(FILE)
    with connect(engine.address) as one, connect(engine.address) as other:
        one.register(f"{path}:make")
        for client in (one, other):
            assert client.submit("mine", ones).result(WAIT_S)["h"][0] == 1
        session = one.session("mine", "kept")
        assert session.submit(ones).result(WAIT_S)["h"][0] == 1
        path.write_text(FILE.replace("2 * h", "5 * h"))
        one.register(f"{path}:make", replace=True)
        until(lambda: other.binding("mine").version == 2, "the other client hears of it")
        assert other.session("mine", "kept").submit(ones).result(WAIT_S)["h"][0] == 3
        assert other.submit("mine", torch.ones(2, 3)).result(WAIT_S)["h"][0] == 6
        session.close()
        path.write_text(FILE)
        one.register(f"{path}:make", replace=True)
        until(lambda: other.binding("mine").version == 3, "the other client hears of it")
        assert [version for _, version in other._bindings.unfolders] == [3]
        one.unregister("mine")
    until(lambda: engine.statistics()["cells"] == {}, "its cells are given up")


def test_cells_with_other_weights_than_the_engines_are_refused(engine):
    engine.register(f"{HERE}:drawn", warm_up=False)
    with pytest.raises(RequestError, match="made with other weights or code there"):
        engine.submit("drawn", torch.ones(2))
    engine.unregister("drawn")


def test_a_model_may_come_from_a_file(engine, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(Path(models.__file__).read_text() + "\nfolded = type('Of', (), {'model': loop})\n")
    engine.register(f"{file}:folded.model", warm_up=False)
    assert engine.submit("loop", torch.ones(2)).result(WAIT_S)["total"] == 5
    assert source_of(ModelSource(f"{file}:half").load()).text == f"{file}:half"
    with pytest.raises(DefinitionError, match=rf"{file} has no 'hlaf'; the models there are .*'half'"):
        ModelSource(f"{file}:hlaf").load()
    engine.unregister("loop")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothing", "expected 'module:attribute'"),
        ("a:b c", "expected 'module:attribute'"),
        (3, "expected 'module:attribute'"),
        ("no.such.module:model", "ModuleNotFoundError"),
        (f"{HERE}:nothing", "has no 'nothing'; the models there are"),
        (f"{HERE}:WIDTH", "expected what @cellrt.unfold makes, got int"),
        ("/nowhere/at/all.py:model", "FileNotFoundError"),
        (Unfolder("local", lambda graph, x: x, 1), "cannot be found from another process"),
    ],
)
def test_what_is_no_model_is_refused(engine, given, said):
    with pytest.raises(DefinitionError, match=said):
        engine.register(given)
    assert not [name for name in sys.modules if name.startswith("_cellrt_model_") and "nowhere" in name]


@pytest.mark.slow
def test_an_option_that_is_wrong_is_named():
    with pytest.raises(DefinitionError, match="unknown option 'worker'"):
        start(worker=1)
    with pytest.raises(DefinitionError, match="max_queue: expected a positive integer, got 0"):
        start(max_queue=0)
    with pytest.raises(DefinitionError, match="cannot be handed to another process"):
        start(policy=lambda: None)


@pytest.mark.slow
def test_an_address_that_is_taken_or_left_over(tmp_path):
    path = str(tmp_path / "engine")
    listener = listen(path)
    with pytest.raises(DefinitionError, match="Address already in use"):
        start(address=path)
    os.close(listener.detach())
    assert Path(path).exists()  # as an engine that was killed leaves it
    with start(address=path) as engine, connect(path) as client:
        engine.register(models.chain, warm_up=False)
        client.submit("chain", steps(1)).result(WAIT_S)
    assert list(tmp_path.iterdir()) == []


SOURCE = """
import torch
from cellrt.graph.unfolder import unfold
from tests.steps import STEP, WIDTH

@unfold("keeps", example=torch.zeros(2, WIDTH))
def keeps(graph, x):
    return {"last": graph.chain(STEP, keep=True, x=x).last.h}
"""


def test_a_session_of_a_model_that_its_client_cannot_import_does_not_stay_open(engine, tmp_path):
    path = tmp_path / "keeps_model.py"
    path.write_text(SOURCE)
    engine.register(f"{path}:keeps", warm_up=False)
    path.rename(tmp_path / "gone.py")
    with connect(engine.address) as client:
        for _ in range(2):
            with pytest.raises(DefinitionError, match="keeps_model"):
                client.session("keeps")
        until(lambda: client.statistics()["sessions"]["open"] == 0, "they are closed")


def test_models_of_a_client_that_only_opens_sessions_are_given_up(engine, tmp_path):
    path, before = tmp_path / "sessions.py", len(engine.statistics()["cells"])
    with connect(engine.address) as opener, connect(engine.address) as other:
        for factor in (2, 3, 4):
            path.write_text(FILE.replace("2 * h", f"{factor} * h"))
            other.register(f"{path}:make", replace=factor > 2)
            opener.session("mine").close()
        until(lambda: len(engine.statistics()["cells"]) == before + 1, "the older ones are given up")
        other.unregister("mine")
        until(lambda: len(engine.statistics()["cells"]) == before, "and so is the last")


def test_a_binding_that_a_client_may_have_given_up_gets_another_number(server):
    server.engine.register(models.chain, warm_up=False)
    with connect(server.address):
        until(lambda: server._connections, "the client is in")
        (connection,) = server._connections.values()
        model = server.engine._models["chain"]
        first, again, known = (connection.number_of(model, known) for known in ((), (), (1,)))
        assert first == known == 1 and again == 2
