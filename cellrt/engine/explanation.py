"""The explanation of what a request waits for, in words: at its client, in a queue, or in the scheduler's tables."""

from __future__ import annotations

from cellrt.core.processor import Processor
from cellrt.core.state.moves import LIVE_REQUEST, LiveState
from cellrt.core.waiting_reasons import Namer
from cellrt.core.waiting_reasons import explain as explain_parts
from cellrt.engine.future import RequestFuture
from cellrt.engine.request_group import RequestGroup
from cellrt.engine.requests import Requests
from cellrt.engine.turns import Turns
from cellrt.errors import RequestError

HAS_ENDED = "the request has ended"


def explain(turns: Turns, requests: Requests, processor: Processor, name_of: Namer, future: RequestFuture) -> str:
    """Return in words what the request of a future waits for; it calls a turn.

    Raise RequestError for a future that is not of an engine in this process, EngineClosedError.
    """
    group = future._owner
    if future.done() or group is None:
        return HAS_ENDED
    if not isinstance(group, RequestGroup):
        raise RequestError(f"explain: expected a future of this engine, got {future!r}")
    return explain_request(turns, requests, processor, name_of, group, future.place)


def explain_request(
    turns: Turns, requests: Requests, processor: Processor, name_of: Namer, group: RequestGroup, number: int
) -> str:
    """Return the same for a request by its number in its group."""
    turns.call(bool)  # a turn answers calls before it admits: what was handed in just now is in the tables after one
    return turns.call(lambda: _explain(requests, processor, name_of, group, number))


def _explain(requests: Requests, processor: Processor, name_of: Namer, group: RequestGroup, number: int) -> str:
    if not requests.has_begun(group):
        return HAS_ENDED
    state = LiveState(group.states[number])
    told = [f"{group.name_of(number)}: {LIVE_REQUEST.states[state]}"]
    if state == LiveState.ADMITTED:
        told += explain_parts(processor, group.ids[number], name_of)
    elif state == LiveState.WAITING:
        told.append(f"{processor.num_live} requests are in the tables")
    return "\n  ".join(told)
