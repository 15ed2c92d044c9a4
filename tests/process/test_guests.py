"""What a client has in the engine's process: the order in which it is told what became of its requests."""

from __future__ import annotations

import torch

from cellrt.errors import CellError
from cellrt.graph.reference import run_one_by_one
from cellrt.process.client import connect
from cellrt.process.guest import _messages
from cellrt.process.outcomes import Outcome
from cellrt.process.recorded import LENGTH
from cellrt.process.wire import Kind, Message
from tests.engine.helpers import WAIT_S, assert_same, error_of
from tests.process import models
from tests.process.helpers import steps
from tests.steps import RAISE
from tests.waiting import until


def test_requests_that_got_places_have_futures_though_the_first_has_failed_before_that_is_said(doorkeeper, monkeypatch):
    submission = doorkeeper.engine._submission
    submit = submission.submit_recorded

    def submit_and_see_it_fail(*given):
        submit(*given)
        (guest,) = doorkeeper._guests.values()
        until(lambda: not guest._live, "all have ended")

    with connect(doorkeeper.address) as client:
        client.register(models.chain, warm_up=False)
        monkeypatch.setattr(submission, "submit_recorded", submit_and_see_it_fail)
        wrong, right = client.submit_many("chain", [torch.full_like(steps(1), RAISE), steps(1)], wait=True)
        assert type(error_of(wrong)) is CellError
        assert_same(right.result(WAIT_S), run_one_by_one(models.chain, steps(1)))


def test_that_requests_have_places_is_told_before_their_ends_and_all_else_after():
    answer = Message(Kind.ANSWER, (b"",))
    news = [answer, (7, CellError("a row")), Outcome(8, True, ()), Message(Kind.ACCEPTED, (LENGTH.pack(7),))]
    kinds = [message.kind for message in _messages(news)]
    assert kinds == [Kind.ACCEPTED, Kind.OUTCOMES, Kind.ERRORS, Kind.ANSWER]
