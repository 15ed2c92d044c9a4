"""The fast path of a request: one of a known graph, with nothing asked but its results, is handed in by compiled C.

``native/hand_in.c`` does what ``Submission.submit`` and ``Door.hand_in`` do for it step by step, in a fifth of their
time. Where it was not built, or the environment has ``CELLRT_FAST_PATH=off``, those do it all.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures._base import FINISHED, PENDING
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

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
from cellrt.engine.door import Door, Taken
from cellrt.engine.future import SETTLING, RequestFuture
from cellrt.engine.option_checks import USUAL_PRIORITY, HandIn
from cellrt.engine.places import Places, Room
from cellrt.engine.registry import Model, Plan
from cellrt.engine.request_group import NO_INPUTS, NO_STATES, NO_TENSORS, NOBODY, Inputs, RequestGroup
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
    """Return whether C may hand requests in here: it was built from its source and the tables as they are now."""
    if _hand_in is None or os.environ.get("CELLRT_FAST_PATH") == "off":
        return False
    if _hand_in.layout() == LAYOUT and getattr(_hand_in, "SOURCE", None) == _source():
        return True
    _warn_of_another_source()
    return False


@cache
def _warn_of_another_source() -> None:
    logging.getLogger("cellrt").warning(
        "the extension in C was built from another version of its source and is not used: submitting a request takes "
        "several times as long; build it again, with `pip install .` or `python setup.py build_ext --inplace`"
    )


@cache
def _source() -> int:
    """Return the checksum of the source of the extension that is here; of an installation, which has none, its own."""
    source = Path(__file__).parents[1] / "native" / "hand_in.c"
    return crc32(source.read_bytes()) if source.exists() else getattr(_hand_in, "SOURCE", 0)


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


class _Given(NamedTuple):
    """One tensor that each request of a graph brings.

    Attributes:
        path: the keys that lead to it in what is handed in.
        torch_dtype, array_dtype, shape: of a tensor or an array; None: it is none.
        kind: its kind of rows.
        is_integers: True if a list of integers will do.
        bits, rows_shape: of its rows.
    """

    path: tuple[Any, ...]
    torch_dtype: torch.dtype | None
    array_dtype: Any
    shape: tuple[int, ...]
    kind: int
    is_integers: bool
    bits: np.dtype[Any]
    rows_shape: tuple[int, ...]


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

    def tell(self, answered: NDArray[Any], first: int, end: int) -> Taken:
        """Take the answers ``first`` to ``end`` out of their ring, and end the futures of those that are plain."""
        at = answered.__array_interface__["data"][0]
        counted, together, others = self._door.tell(at, len(answered), first, end)
        return Taken(
            {model: np.frombuffer(its, np.int64).reshape(-1, 4) for model, its in counted.items()},
            {group: np.frombuffer(its, np.int32) for group, its in together.items()},
            others,
        )

    def prepare(self, model: Model, request: Any, plan: Plan) -> None:
        """Have later requests with the key of one that was unfolded take this path, if they can."""
        known = model.known_graph_of(request)
        if known is None or known.recorded is None or known.prepared is not None or not known.may_be_prepared:
            return
        prepared = _prepared(model, plan, _by_slots(known, plan), plan)
        known.may_be_prepared = prepared is not None
        if prepared is not None:
            known.prepare(prepared)

    def hand_in_unfolded(self, model: Model, plan: Plan, inputs: Inputs, may_wait: bool) -> RequestFuture | None:
        """Hand in a plain request that was unfolded; return its future, or None if Python must do it.

        The first request of a graph is for Python: most graphs that come once never come again.
        """
        prepared = plan.prepared
        if prepared is None and plan.comes_again:
            prepared = plan.prepared = _prepared(model, plan, _unfolded(inputs), None) or False
        if not prepared:
            return None
        future: RequestFuture | None = self._door.hand_in(prepared, plan, model, model.name, inputs, may_wait)
        return future


def _by_slots(known: Known, plan: Plan) -> list[_Given] | None:
    """Return the tensors that requests of a known graph bring; None if Python must find them."""
    slots, recorded = known.slots, known.recorded
    if slots is None or slots.empty or recorded is None:
        return None
    if (recorded.program, recorded.results) != (plan.program, plan.results):
        return None
    found: list[_Given] = []
    for slot in slots.brought:
        if not isinstance(slot, Slot):
            return None
        dtype = slot.spec.dtype
        array_dtype = NUMPY_DTYPES.get(dtype)
        bits, is_integers = np.dtype(array_dtype or np.int16), dtype == torch.int64 and len(slot.shape) == 1
        found.append(_Given(slot.path, dtype, array_dtype, slot.shape, slot.kind, is_integers, bits, slot.rows_shape))
    return found


def _unfolded(inputs: Inputs) -> list[_Given]:
    """Return the tensors that requests bring which are unfolded to the same kinds and shapes as one."""
    return [
        _Given((k, 1), None, rows.dtype, rows.shape, kind, False, rows.dtype, rows.shape)
        for k, (kind, rows) in enumerate(inputs)
    ]


def _prepared(model: Model, plan: Plan, given: Sequence[_Given] | None, held: Plan | None) -> Any:
    """Return what hands in requests of a graph; None if these are for Python.

    It holds the plan ``held``: none, where the plan holds it.
    """
    answers, template = plan.answers, plan.template
    if given is None or len(given) > MAX_TENSORS or plan.states:
        return None
    sizes = [prod(its.shape) * its.bits.itemsize for its in given]
    ends = [0, *accumulate(map(_aligned, sizes))]
    if ends[-1] > MOST_BYTES or answers.num_bytes > MOST_BYTES:
        return None
    group: Any = RequestGroup(
        *(None, None, held, None, 0, 1, USUAL_PRIORITY, 0, None, None, None, None, 0.0, _nobody, 0)  # type: ignore[arg-type]
    )
    group.brought = tuple([(its.kind, its.bits, its.rows_shape, at) for its, at in zip(given, ends)])
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
        given=tuple([(*its[:4], size, *its[4:6]) for its, size in zip(given, sizes)]),
    )


def _nobody(_: RequestGroup) -> Any:
    """Return None, in place of who is told how a request ends."""


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
