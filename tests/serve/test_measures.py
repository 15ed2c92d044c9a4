"""What a front end counts: the answers of a round of the loop at once, each as if alone."""

from __future__ import annotations

import asyncio

from prometheus_client import generate_latest

from cellrt.serve.measures import SECONDS, Measures

TOOK_S = [0.0, 0.0005, 0.0007, 0.3, 0.3, 60.0, 61.0]


def told(measures: Measures) -> list[str]:
    """All samples, but for those that are times."""
    lines = generate_latest(measures.registry).decode().splitlines()
    return [line for line in lines if "_created" not in line and "timestamp" not in line]


def counted(answers: list[tuple[int, float]], *, is_alone: bool) -> Measures:
    """Measures of answers of a round of the loop, or each of a round of its own."""
    measures = Measures(is_shared=False)

    async def count() -> None:
        for status, seconds in answers:
            measures.count_answer("session", status, seconds)
            if is_alone:
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(count())
    return measures


def test_answers_of_a_round_are_counted_as_one_by_one() -> None:
    answers = [*[(200, seconds) for seconds in TOOK_S], (429, 0.1)]
    assert told(counted(answers, is_alone=False)) == told(counted(answers, is_alone=True))


def test_an_answer_is_in_the_first_bucket_that_is_not_below_it() -> None:
    for place, bound in enumerate(SECONDS):
        measures = counted([(200, bound)], is_alone=True)
        name, labels = "cellrt_http_request_duration_seconds_bucket", {"handler": "session"}
        counts = [measures.registry.get_sample_value(name, {**labels, "le": str(each)}) for each in SECONDS]
        assert counts == [0.0] * place + [1.0] * (len(SECONDS) - place)


def test_a_models_last_request_is_noted_with_the_round() -> None:
    measures = Measures(is_shared=False)

    async def note() -> None:
        measures.note_inference("chain")
        await asyncio.sleep(0)

    asyncio.run(note())
    assert measures.last_inference_ms("chain") > 0
