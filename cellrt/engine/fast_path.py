"""The fast path of a request: one of a known graph, with nothing asked but its results, is handed in by compiled C.

``native/hand_in.c`` does what ``Submission.submit`` and ``Door.hand_in`` do for it step by step, in a fifth of their
time. Where it was not built, or the environment has ``CELLRT_FAST_PATH=off``, those do it all.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from concurrent.futures._base import FINISHED, PENDING
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.state.tables import (
    ANSWERED,
    MAX_SUBMISSIONS,
    MAX_TENSORS,
    NEVER,
    QUEUE,
    SEQUENCE,
    SUBMISSION,
    SUBMITTED,
)
from cellrt.definition.bits import NUMPY_DTYPES
from cellrt.engine.crew import Crew
from cellrt.engine.door import Door
from cellrt.engine.future import SETTLING, RequestFuture
from cellrt.engine.option_checks import USUAL_PRIORITY, HandIn
from cellrt.engine.places import Places, Room
from cellrt.engine.registry import Model, Plan
from cellrt.engine.request_group import NO_INPUTS, NO_STATES, NO_TENSORS, NOBODY, RequestGroup
from cellrt.engine.turns import Turns
from cellrt.graph.known import Known
from cellrt.graph.slots import Slot
from cellrt.worker.turn_words import ASLEEP

try:
    from cellrt.native import _hand_in
except ImportError:
    _hand_in = None  # type: ignore[assignment]

MOST_BYTES = 1 << 16
"""The most bytes of a request's tensors, and of its results: larger ones are copied without the interpreter lock."""
ALIGNMENT = 16
"""In bytes: of a request's word, which lies behind its results, and of its tensors, which lie together."""


def is_built() -> bool:
    """Return whether C may hand requests in here: it was built, and from the tables as they are now."""
    if _hand_in is None or os.environ.get("CELLRT_FAST_PATH") == "off":
        return False
    return bool(_hand_in.layout() == LAYOUT)


def _layout(name: str, dtype: np.dtype[Any]) -> dict[str, int]:
    """Return where each field of a row is, and how long the row is, by the names that C has for them."""
    fields = {f"{name}.{field}": int(at) for field, (_, at, *_) in (dtype.fields or {}).items()}
    return {name: dtype.itemsize, **fields}


LAYOUT = {
    **_layout("Submission", SUBMISSION),
    **_layout("Answered", ANSWERED),
    **_layout("Queue", QUEUE),
    **_layout("Number", np.dtype(np.int32)),
    **_layout("Tensor", np.dtype((np.int64, 2))),
}


class Owner(Protocol):
    """The manager of an engine, as the fast path knows it; C reads its state, too."""

    turns: Turns
    room: Room
    places: Places

    def note_handed_in(self) -> None:
        """Have a worker look for what was handed in to compiled code."""


class FastPath:
    """The fast path of an engine's clients.

    Args:
        models: those that take requests, by name.
        manager, crew, door: of the engine, whose workers were started.
    """

    def __init__(self, models: Mapping[str, Model], manager: Owner, crew: Crew, door: Door) -> None:
        self._door = _hand_in.Door(
            models=models,
            manager=manager,
            turns=manager.turns,
            gate=manager.turns.gate,
            crew=crew,
            door=door,
            room=manager.room,
            wake=manager.note_handed_in,
            places=manager.places,
            group_type=RequestGroup,
            future_type=RequestFuture,
            settling=SETTLING,
            pending=PENDING,
            finished=FINISHED,
            nobody=NOBODY,
            no_inputs=NO_INPUTS,
            no_tensors=NO_TENSORS,
            no_states=NO_STATES,
            rests=array("q", crew.rest_addresses).tobytes(),
            asleep=ASLEEP,
            max_submissions=MAX_SUBMISSIONS,
            max_tensors=MAX_TENSORS,
            submitted=SUBMITTED,
            sequence=SEQUENCE,
            **door.memory,
        )
        self.hand_in: HandIn = self._door

    def tell(self, answered: NDArray[Any], first: int, end: int) -> tuple[dict[Model, NDArray[np.int64]], list[int]]:
        """Take the answers ``first`` to ``end`` out of their ring, and end the futures of those that are plain.

        Return of these, by model, ``[requests, 4]``: when each arrived, began and ended, and its rows; and the others'
        places in the ring.
        """
        counts, others = self._door.tell(answered.__array_interface__["data"][0], len(answered), first, end)
        return {model: np.frombuffer(its, np.int64).reshape(-1, 4) for model, its in counts.items()}, others

    def prepare(self, model: Model, request: Any, plan: Plan) -> None:
        """Have later requests with the key of one that was unfolded take this path, if they can."""
        known = model.known_graph_of(request)
        if known is None or known.recorded is None or known.prepared is not None or not known.may_be_prepared:
            return
        prepared = self._prepared(model, known, plan)
        known.may_be_prepared = prepared is not None
        if prepared is not None:
            known.prepare(prepared)

    def _prepared(self, model: Model, known: Known, plan: Plan) -> Any:
        """Return what hands in requests of a known graph; None if these are for Python."""
        slots, answers, template = known.slots, plan.answers, plan.template
        if slots is None or slots.empty or len(slots.brought) > MAX_TENSORS or plan.states:
            return None
        recorded = known.recorded
        if recorded is None or (recorded.program, recorded.results) != (plan.program, plan.results):
            return None
        given, brought, at = [], [], 0
        for slot in slots.brought:
            if not isinstance(slot, Slot):
                return None
            dtype = slot.spec.dtype
            bits, numpy_dtype = np.dtype(NUMPY_DTYPES.get(dtype, np.int16)), NUMPY_DTYPES.get(dtype)
            size = prod(slot.shape) * bits.itemsize
            is_integers = dtype == torch.int64 and len(slot.shape) == 1
            given.append((slot.path, dtype, numpy_dtype, slot.shape, size, slot.kind, is_integers))
            brought.append((slot.kind, bits, slot.rows_shape, at))
            at += _aligned(size)
        if at > MOST_BYTES or answers.num_bytes > MOST_BYTES:
            return None
        group: Any = RequestGroup(
            *(None, None, plan, None, 0, 1, USUAL_PRIORITY, 0, None, None, None, None, 0.0, _nobody, 0)  # type: ignore[arg-type]
        )
        group.brought = tuple(brought)
        return _hand_in.Prepared(
            group=group,
            tensor_type=torch.Tensor,
            array_type=np.ndarray,
            places=model.places,
            template_at=template.template.address,
            lengths_at=plan.lengths_address,
            answers_at=answers.address,
            num_lengths=template.lengths.size,
            num_answers=answers.count,
            word_begin=_aligned(answers.num_bytes),
            num_rows=plan.num_nodes,
            priority=USUAL_PRIORITY,
            never=NEVER,
            given=tuple(given),
        )


def _nobody(_: RequestGroup) -> Any:
    """Return None, in place of who is told how a request ends."""


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
