"""The table of states and moves says of each state what it is, and lets nobody make a move that is not in it."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest

from cellrt.core.state.moves import MACHINES, StateMachine, check_move, word_of
from cellrt.errors import InternalError


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.title)
def test_each_state_has_a_number_of_its_own_and_is_reached_from_the_first(machine: StateMachine):
    first, *_ = machine.states
    assert [state.name for state in machine.states] == list(type(first).__members__)
    assert [word_of(machine, int(state)) for state in machine.states] == list(type(first).__members__)
    assert nx.descendants(nx.DiGraph(list(machine.moves)), first) == set(machine.states) - {first}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.title)
def test_moves_that_are_not_in_the_table_are_refused(machine: StateMachine):
    for before, after in itertools.product(machine.states, machine.states):
        if (before, after) in machine.moves:
            check_move(machine, before, after, "it")
        else:
            with pytest.raises(InternalError, match=f"^it: no legal move from {before.name} to {after.name}$"):
                check_move(machine, before, after, "it")
