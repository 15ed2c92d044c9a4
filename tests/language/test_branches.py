"""Several answers to a long prompt, which is read once: each is the answer that it is alone."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

import cellrt
from cellrt.engine.due import Due
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import DeadlineError, RequestError, SessionError
from cellrt.language import branches, served
from cellrt.language.branches import Branches
from cellrt.language.model import LanguageModel
from tests.language import tiny
from tests.waiting import until

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
LONG = [token % 200 for token in range(7, 7 * 90, 7)]
EACH = {"max_tokens": 10, "logprobs": 2, "temperature": 1.2, "seed": 3, "presence_penalty": 0.7}


def alone(model: LanguageModel, count: int, **options: Any) -> list[Any]:
    seed = options.pop("seed", None)
    return [
        model.generate(LONG, **options, **({} if seed is None else {"seed": seed + number})) for number in range(count)
    ]


@pytest.mark.parametrize("options", [EACH, {"max_tokens": 5}, {**EACH, "mask": lambda made: range(1, 200, 3)}])
def test_each_answer_is_that_of_its_prompt_alone(model: LanguageModel, options: dict[str, Any]) -> None:
    if "mask" in options:
        options = {**options, "mask": lambda made: list(range(1, 200, 3))}
    expected = alone(model, 4, **options)
    assert model.samples(LONG, 4, **options) == expected
    assert asyncio.run(model.asamples(LONG, 4, **options)) == expected
    until(lambda: model.engine.statistics()["sessions"]["open"] == 0, "the sessions are closed")


def rows_read(engine: cellrt.Engine) -> int:
    return sum(cell["rows"] for cell in engine.statistics()["cells"].values())


def test_the_prompt_is_read_once(model: LanguageModel, engine: cellrt.Engine) -> None:
    engine.drain()
    before = rows_read(engine)
    model.samples(LONG, 8, max_tokens=2)
    engine.drain()
    assert rows_read(engine) - before == len(LONG) - 1 + 8 * 2


def used_pages(engine: Any) -> int:
    return int(engine.statistics()["rows"]["worker 1"]["used_pages"])


def test_a_prompt_of_1000_tokens_is_held_once_for_8_answers(engine: cellrt.Engine) -> None:
    model = LanguageModel(served.served(tiny.checkpoint("long", context=1100)), engine)
    prompt = [token % 200 for token in range(7, 7007, 7)]
    with engine.session("long") as session:
        session.submit({"prompt": prompt[:-1], "max_tokens": 1}).result(60)
        alone, states = used_pages(engine), len(session._record.states)
    began = Branches(partial(engine.session, "long"), prompt, 8, Due(None, None), 1)
    branches_of_it = began.read()
    assert branches_of_it is not None
    assert used_pages(engine) == alone + 7 * states  # the last page of each is not full
    assert engine.statistics()["sessions"]["bytes"]["saved"] == 0
    for branch in branches_of_it:
        branch.session.close()
    until(lambda: used_pages(engine) == 0, "closed sessions gave their pages back")
    expected = [model.generate(prompt, **{**EACH, "seed": 3 + number}) for number in range(8)]
    assert model.samples(prompt, 8, **EACH) == expected
    until(lambda: used_pages(engine) == 0, "ended answers gave their pages back")


def test_a_few_tokens_are_read_by_each(model: LanguageModel) -> None:
    short = LONG[:8]
    assert not branches.are_worth_it(model.language, short, 3) and branches.are_worth_it(model.language, LONG, 2)
    assert model.samples(short, 3, max_tokens=4) == [model.generate(short, max_tokens=4)] * 3


def test_where_there_is_no_room_for_sessions_each_reads_the_prompt() -> None:
    limits = SessionLimits(max_sessions=3)
    with cellrt.Engine(workers=1, page_bytes=1 << 20, sessions=limits) as engine:
        model = LanguageModel(served.served(tiny.checkpoint()), engine)
        made = model.samples(LONG, 5, **EACH)
        assert made == alone(model, 5, **EACH)
        until(lambda: engine.statistics()["sessions"]["open"] == 0, "those that were opened are closed")


def test_what_is_wrong_is_said_before_anything_is_read(model: LanguageModel, engine: cellrt.Engine) -> None:
    before = engine.statistics()["done"]
    for wrong, match in (({"max_tokens": 1000}, "max_tokens"), ({"tokens": 3}, "unknown"), ({"top_p": 0.0}, "top_p")):
        with pytest.raises(RequestError, match=match):
            model.samples(LONG, 4, **{"temperature": 1.0, **wrong})
    assert engine.statistics()["done"] <= before + 1
    until(lambda: engine.statistics()["sessions"]["open"] == 0, "the sessions are closed")


def test_reading_that_is_late_or_cancelled_leaves_nothing(model: LanguageModel, engine: cellrt.Engine) -> None:
    with pytest.raises(DeadlineError):
        model.samples(LONG, 4, deadline=1e-6)

    async def cancelled() -> None:
        task = asyncio.create_task(model.asamples(LONG, 4, max_tokens=300))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(5):
        asyncio.run(cancelled())
    assert engine.drain(60)
    until(lambda: engine.statistics()["sessions"]["open"] == 0, "the sessions are closed")


def test_a_state_goes_to_other_sessions_of_the_model_alone(model: LanguageModel, engine: cellrt.Engine) -> None:
    engine.register(served.served(tiny.checkpoint("other")))
    first, second, other = engine.session("tiny"), engine.session("tiny"), engine.session("other")
    first.submit({"prompt": LONG, "max_tokens": 1}).result(60)
    for wrong in ([first], [other], [3]):
        with pytest.raises(RequestError):
            first.copy_to(wrong)  # type: ignore[arg-type]
    first.copy_to([second])
    assert first.export() == second.export()
    first.reset()
    assert first.export() != second.export()
    second.close()
    with pytest.raises(SessionError):
        first.copy_to([second])
    first.leave()
    other.leave()
    other.leave()
    until(lambda: engine.statistics()["sessions"]["open"] == 0, "the sessions are closed")


def test_sessions_of_an_engine_elsewhere_are_copied_too() -> None:
    with cellrt.EngineProcess(workers=1, page_bytes=1 << 20) as client:
        client.register("tests.serve.language_models:decoder")
        unfolder: Any = client.binding("tiny").unfolder
        model = LanguageModel(unfolder, client, is_registered=True)
        assert model.samples(LONG, 3, **EACH) == alone(model, 3, **EACH)
        assert asyncio.run(model.asamples(LONG, 3, **EACH)) == alone(model, 3, **EACH)
        client.drain(60)
        began = Branches(partial(client.session, "tiny"), [*LONG[:80], 1], 8, Due(None, None), 1)
        made = began.read()
        pages = used_pages(client)
        for branch in made or ():
            branch.session.close()
        with client.session("tiny") as session:
            session.submit({"prompt": LONG[:80], "max_tokens": 1}).result(60)
            assert pages == used_pages(client)  # all of them are full
        until(lambda: client.statistics()["sessions"]["open"] == 0, "the sessions are closed")
