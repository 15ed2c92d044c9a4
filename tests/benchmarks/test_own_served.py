"""The models of users' own cells: peers and cellrt give what the modules give, called one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cellrt
from benchmarks import own_chains, own_dags, own_trees
from benchmarks.own_models import HIDDEN, TOKENS, seeded
from benchmarks.own_served import MODELS, check
from benchmarks.server import Runner
from benchmarks.trees import Tree, parse_like_trees
from cellrt import RaggedRows

sentences = st.lists(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=12), min_size=1, max_size=6)


def answers(run: Runner, requests: list[Any]) -> list[Tensor]:
    with torch.inference_mode():
        found = list(run(requests))
    assert sorted(k for k, _ in found) == list(range(len(requests)))
    return [answer for _, answer in sorted(found, key=lambda each: each[0])]


@torch.inference_mode()
def classify(words: list[int]) -> Tensor:
    """The step word after word, then attention over a list of one memory."""
    model, rows = seeded(own_chains.Classifier), []
    state = {"h": torch.zeros(1, 2, HIDDEN), "c": torch.zeros(1, 2, HIDDEN)}
    for word in words:
        out = model.step(torch.tensor([word]), **state)
        rows.append(out.pop("top"))
        state = out
    scores = torch.softmax(torch.cat(rows) @ model.attend.query(rows[-1])[0], 0)
    return model.attend.head(torch.cat([rows[-1][0], scores @ torch.cat(rows)]))


@torch.inference_mode()
def fold(words: list[int]) -> Tensor:
    step, h = seeded(own_chains.MLPStep), torch.zeros(1, HIDDEN)
    for word in words:
        h = step(torch.tensor([word]), h)["h"]
    return h[0]


@torch.inference_mode()
def compose(tree: Tree) -> Tensor:
    model, states = seeded(own_trees.TreeModel), []
    words, children = iter(tree.tokens), iter(tree.children)
    for level in tree.levels:
        if level:
            left, right = next(children)
            states.append(model.node(states[left], states[right])["h"])
        else:
            states.append(model.leaf(torch.tensor([next(words)]))["h"])
    return states[-1][0]


@given(sentences)
def test_lstm_peers_equal_the_step_word_after_word(words: list[list[int]]) -> None:
    expected, model = [classify(each) for each in words], seeded(own_chains.Classifier)
    for run in (own_chains.padded_lstm(False, 1), own_chains.stepped_lstm(model, model.step)):
        torch.testing.assert_close(answers(run, words), expected, rtol=1e-4, atol=1e-5)


@given(sentences)
def test_mlp_peer_equals_the_step_word_after_word(words: list[list[int]]) -> None:
    expected = [fold(each) for each in words]
    torch.testing.assert_close(answers(own_chains.padded_mlp(False, 1), words), expected, rtol=1e-4, atol=1e-5)


@given(st.integers(1, 8), st.integers(0, 100))
def test_tree_peer_equals_the_nodes_one_after_the_other(count: int, seed: int) -> None:
    trees = parse_like_trees(count, TOKENS, seed)
    expected = [compose(tree) for tree in trees]
    torch.testing.assert_close(answers(own_trees.levels(False, 1), trees), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def settle(circuit: own_dags.Circuit) -> Tensor:
    gate, states = seeded(own_dags.Gate), torch.zeros(0, HIDDEN)
    for node, token in enumerate(circuit.tokens):
        read = states[circuit.sources[circuit.offsets[node] : circuit.offsets[node + 1]]]
        made = gate(torch.tensor([token]), RaggedRows(read, torch.tensor([0, len(read)])))["h"]
        states = torch.cat([states, made])
    return states[-1]


@given(st.integers(1, 8), st.integers(0, 100))
def test_dag_peer_equals_the_nodes_one_after_the_other(count: int, seed: int) -> None:
    circuits = own_dags.draw_circuits(count, seed)
    expected = [settle(circuit) for circuit in circuits]
    torch.testing.assert_close(answers(own_dags.levels(False, 1), circuits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", MODELS)
def test_cellrt_answers_as_the_peer(part: str) -> None:
    served = MODELS[part]
    requests = served.draw(8, 3)
    for path in (served.path, *served.forms.values()):
        module, _, name = path.partition(":")
        model = getattr(__import__(module, fromlist=[name]), name)()
        with cellrt.Engine(1, compile="off") as engine:
            engine.register(model, warm_up=False)
            futures = engine.submit_many(served.model, requests)
            check(served, requests, part, [future.result(60) for future in futures])


def test_a_wrong_answer_is_found() -> None:
    served = MODELS["mlp"]
    requests = served.draw(8, 3)
    right = answers(served.runner(False, 1), requests)
    check(served, requests, "right", right)
    with pytest.raises(AssertionError, match="wrong: 1 of 8"):
        check(served, requests, "wrong", [*right[:7], right[7] + 1e-2])
