"""Policies that nobody would want: their order is against all others, random, or an error."""

from __future__ import annotations

from hypothesis import strategies as st

from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.scheduling.policy import Policy


def latest(waiting, asked):
    for k in range(waiting.size):
        waiting[k].score = -waiting[k].sequence


def last_type(ready, asked):
    return ready.size - 1


def changing(waiting, asked):
    for k in range(waiting.size):
        asked.kept[0] = (asked.kept[0] * 1103515245 + 12345) % 2147483648
        waiting[k].score = asked.kept[0]


def no_type(ready, asked):
    return -5 if asked.now_ns % 2 else ready.size


def no_numbers(waiting, asked):
    for k in range(waiting.size):
        waiting[k].score = waiting[k].sequence if k % 3 else float("nan")


def broken(waiting, asked):
    if asked.count > 2:
        raise ValueError


def broken_choice(ready, asked):
    if asked.count > 0:
        raise ValueError
    return 0


AGAINST_ALL = Policy("against all", latest, last_type, admit_by="length")
CHANGING = Policy("changing", changing, no_type)
BROKEN = Policy("broken", broken, broken_choice)
ODD = (
    AGAINST_ALL,
    CHANGING,
    BROKEN,
    Policy("no numbers", no_numbers, by_first=True),
    Policy("unbounded", latest, is_bounded=False),
)
ANY_POLICY = st.sampled_from([*POLICIES.values(), *ODD])
