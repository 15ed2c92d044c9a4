"""What a front end counts: the messages of a round of the loop at once, each as if alone."""

from __future__ import annotations

import asyncio

from prometheus_client import generate_latest

from cellrt.serve.measures import SECONDS, Measures

TOOK_S = [0.0, 0.0005, 0.0007, 0.3, 0.3, 60.0, 61.0]


def told(measures: Measures) -> list[str]:
    """All samples, but for those that are times."""
    lines = generate_latest(measures.registry).decode().splitlines()
    return [line for line in lines if "_created" not in line and "timestamp" not in line]


def test_messages_of_a_round_are_counted_as_answers_one_by_one() -> None:
    one_by_one, at_once = Measures(is_shared=False), Measures(is_shared=False)
    for seconds in TOOK_S:
        one_by_one.count_answer("session", 200, seconds)
    one_by_one.count_answer("session", 429, 0.1)

    async def count() -> None:
        for seconds in TOOK_S:
            at_once.count_message("session", 200, seconds)
        at_once.count_message("session", 429, 0.1)
        await asyncio.sleep(0)

    asyncio.run(count())
    assert told(at_once) == told(one_by_one)


def test_an_answer_is_in_the_first_bucket_that_is_not_below_it() -> None:
    for place, bound in enumerate(SECONDS):
        measures = Measures(is_shared=False)
        measures.count_answer("infer", 200, bound)
        name, labels = "cellrt_http_request_duration_seconds_bucket", {"handler": "infer"}
        counts = [measures.registry.get_sample_value(name, {**labels, "le": str(each)}) for each in SECONDS]
        assert counts == [0.0] * place + [1.0] * (len(SECONDS) - place)


def test_a_models_last_request_is_noted_with_the_round() -> None:
    measures = Measures(is_shared=False)

    async def note() -> None:
        measures.note_message("chain")
        await asyncio.sleep(0)

    asyncio.run(note())
    assert measures.last_inference_ms("chain") > 0
