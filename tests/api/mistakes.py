"""What an unfolder can get wrong: a graph for each mistake, and what must be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cellrt.cells import LSTMCell
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.graph import Graph
from tests.api.dag_mistakes import DAG_MISTAKES, NARROW
from tests.api.models import SIZE, attending, child_sum, counter, embedded, leaf, pair, recurrent

STEP, TOKEN, ATTEND, COUNT, SUM, LEAF, PAIR = (
    recurrent(),
    embedded(),
    attending(),
    counter(),
    child_sum(),
    leaf(),
    pair(),
)
LSTM = cell(LSTMCell(SIZE, SIZE), {"x": (SIZE,), "h": (SIZE,), "c": (SIZE,)})
TORCH_GRU = cell(torch.nn.GRUCell(SIZE, 3), {"input": (SIZE,), "hx": (3,)})
HALF = cell(lambda x: x, {"x": rows(dtype=torch.float16)}, name="half")
BRAIN = cell(lambda x: x, {"x": rows(1, dtype=torch.bfloat16)}, name="brain")
BYTE = cell(lambda x: x, {"x": rows(dtype=torch.uint8)}, name="byte")
WIDE = cell(lambda x, h: {"h": torch.cat([x, h], 1)}, {"x": (SIZE,), "h": (SIZE,)}, name="wide")
DOUBLE = cell(lambda h: {"h": h.double()}, {"h": (SIZE,)}, name="double")
ROW = torch.ones(SIZE)
OTHER: list[Any] = []
"""Handles of a graph that was recorded before."""

Write = Callable[[Graph], object]

MISTAKES: dict[str, tuple[Write, str]] = {
    **DAG_MISTAKES,
    "unknown input": (
        lambda graph: STEP(x=ROW, y=ROW),
        r"cell 'Recurrent', node 0, input 'y': unknown; the cell has inputs \['x', 'h'\]",
    ),
    "missing input": (
        lambda graph: [STEP(x=ROW), STEP(h=ROW)][1],
        r"cell 'Recurrent', node 1, input 'x': missing; expected float32\[4\]",
    ),
    "a state that nobody carries": (
        lambda graph: graph.chain(TORCH_GRU, input=torch.ones(2, SIZE)),
        r"input 'hx': missing; expected float32\[3\] \(if .*: cellrt\.cell\(\.\.\., carry=\{'hx': 'output'\}\)\)",
    ),
    "a state of another width than its output": (
        lambda graph: graph.chain(WIDE, x=torch.ones(2, SIZE)),
        r"cell 'wide', node 0, input 'h': missing; expected float32\[4\]; output 'h' is float32\[8\], so it is not "
        r"carried to input 'h', float32\[4\]",
    ),
    "a loop's state of another dtype than its output": (
        lambda graph: graph.loop(DOUBLE, max_steps=2, h=ROW).last,
        r"loop of cell 'double': no input is carried .*; output 'h' is float64\[4\], so it is not carried to input 'h'",
    ),
    "a loop's input for each step": (
        lambda graph: graph.loop(STEP, max_steps=3, x=torch.ones(3, SIZE)).last,
        r"input 'x': expected float32\[4\], got float32\[3, 4\]; what a loop is given is the same at every step",
    ),
    "half a state": (
        lambda graph: LSTM(x=torch.ones(SIZE), h=torch.ones(SIZE)),
        r"cell 'LSTMCell', node 0, input 'c': missing; expected float32\[4\], as \['h'\] are given too",
    ),
    "wrong shape": (
        lambda graph: STEP(x=torch.ones(5)),
        r"cell 'Recurrent', node 0, input 'x': expected float32\[4\], got float32\[5\]",
    ),
    "wrong dtype": (
        lambda graph: STEP(x=ROW.double()),
        r"cell 'Recurrent', node 0, input 'x': expected float32\[4\], got float64\[4\]",
    ),
    "wrong dtype of an array": (
        lambda graph: STEP(x=np.ones(SIZE)),
        r"cell 'Recurrent', node 0, input 'x': expected float32\[4\], got float64\[4\]",
    ),
    "a float for an integer": (
        lambda graph: TOKEN(token=1.5),
        r"cell 'Embedded', node 0, input 'token': expected int64\[\], got float64\[\]",
    ),
    "text": (lambda graph: TOKEN(token="a"), r"cell 'Embedded', node 0, input 'token': expected int64\[\], got"),
    "nothing": (lambda graph: STEP(x=None), r"cell 'Recurrent', node 0, input 'x': expected float32\[4\], got"),
    "an output of another shape": (
        lambda graph: STEP(x=COUNT(number=1, limit=1, step=1).number),
        r"cell 'Recurrent', node 1, input 'x': expected float32\[4\], got int64\[\]",
    ),
    "a node of several outputs": (
        lambda graph: TOKEN(token=COUNT(number=1, limit=1, step=1)),
        r"node 1, input 'token': expected int64\[\], got Node\('count_up'\), not an output",
    ),
    "a chain as an input": (
        lambda graph: STEP(x=graph.chain(STEP, x=[ROW, ROW])),
        r"node 2, input 'x': expected float32\[4\], got Chain\('Recurrent', 2 nodes\)",
    ),
    "steps as an input": (
        lambda graph: STEP(x=graph.chain(STEP, x=[ROW, ROW]).h),
        r"node 2, input 'x': expected float32\[4\], got Steps\(2 of float32\[4\]\)",
    ),
    "a loop's steps as an input": (
        lambda graph: TOKEN(token=graph.loop(COUNT, max_steps=2, limit=1, step=1).number),
        r"node 1, input 'token': expected int64\[\], got LoopSteps\(up to 2",
    ),
    "unknown output": (
        lambda graph: STEP(x=STEP(x=ROW).c),
        r"AttributeError: cell 'Recurrent' has outputs \['h'\], not 'c'",
    ),
    "unknown state": (lambda graph: STEP(x=graph.zeros(STEP).c), r"the state has \['h'\], not 'c'"),
    "a node from another graph": (
        lambda graph: STEP(x=OTHER[0].h),
        r"cell 'Recurrent', node 0, input 'x': the node belongs to another graph",
    ),
    "steps from another graph": (
        lambda graph: graph.chain(STEP, x=OTHER[1].h),
        r"cell 'Recurrent', node 0, input 'x': the node belongs to another graph",
    ),
    "a list from another graph": (
        lambda graph: ATTEND(x=ROW, memory=[ROW, OTHER[0].h]),
        r"cell 'Attending', node 0, input 'memory\[1\]': the node belongs to another graph",
    ),
    "a result from another graph": (
        lambda graph: {"h": STEP(x=ROW), "o": OTHER[0].h},
        r"result 'o': the node belongs to another graph",
    ),
    "a wrong row in a list": (
        lambda graph: ATTEND(x=ROW, memory=[ROW, torch.ones(3)]),
        r"cell 'Attending', node 0, input 'memory\[1\]': expected float32\[4\], got float32\[3\]",
    ),
    "wrong rows": (
        lambda graph: ATTEND(x=ROW, memory=torch.ones(2, 3)),
        r"cell 'Attending', node 0, input 'memory': expected rows of ragged float32\[4\]",
    ),
    "no list": (
        lambda graph: ATTEND(x=ROW, memory=STEP(x=ROW).h),
        r"cell 'Attending', node 1, input 'memory': expected a list for ragged float32\[4\]",
    ),
    "no result": (lambda graph: [STEP(x=ROW), {}][1], r"the graph has no result"),
    "no dict": (lambda graph: [STEP(x=ROW), None][1], r"must return a dict of results, got NoneType"),
    "empty graph": (lambda graph: {"h": graph.constant(ROW)}, r"the graph is empty: the unfolder called no cell"),
    "a constant as a result": (
        lambda graph: {"h": STEP(x=ROW), "c": graph.constant(ROW)},
        r"result 'c': expected an output of a node, got a constant",
    ),
    "zeros as a result": (
        lambda graph: {"h": [STEP(x=ROW).h, graph.zeros(STEP).h]},
        r"result 'h'\[1\]: expected an output of a node, got a constant",
    ),
    "a number that does not fit": (
        lambda graph: BYTE(x=300),
        r"cell 'byte', node 0, input 'x': expected uint8\[\], got a number that does not fit: 300",
    ),
    "an input without its name": (lambda graph: STEP(ROW), r"cell 'Recurrent': inputs go by name: x=, h="),
    "a wrong dtype for each step": (
        lambda graph: graph.chain(STEP, x=torch.zeros(3, SIZE, dtype=torch.float64)).last,
        r"node 0, input 'x': expected float32\[4\] for each step, got float64\[3, 4\] for all steps; use .float\(\)$",
    ),
    "a float that does not fit": (
        lambda graph: HALF(x=1e6),
        r"cell 'half', node 0, input 'x': expected float16\[\], got a number that does not fit: 1000000.0",
    ),
    "a float that bfloat16 cannot hold": (
        lambda graph: BRAIN(x=[1e300]),
        r"cell 'brain', node 0, input 'x': expected bfloat16\[1\], got a number that does not fit: \[1e\+300\]",
    ),
    "a complex number for bfloat16": (
        lambda graph: BRAIN(x=[1 + 2j]),
        r"cell 'brain', node 0, input 'x': expected bfloat16\[1\], got list \[\(1\+2j\)\]",
    ),
    "an array of float64 for bfloat16": (
        lambda graph: BRAIN(x=np.ones(1)),
        r"cell 'brain', node 0, input 'x': expected bfloat16\[1\], got float64\[1\]",
    ),
    "a number as the name of a result": (lambda graph: {3: STEP(x=ROW).h}, r"the name of a result: .* got 3 \(int\)"),
    "a tensor as a result": (lambda graph: {"h": STEP(x=ROW), "x": ROW}, r"result 'x': expected an output"),
    "an empty list as a result": (lambda graph: {"h": STEP(x=ROW), "x": []}, r"result 'x': expected an output"),
    "a node of several outputs as a result": (
        lambda graph: {"x": COUNT(number=1, limit=1, step=1)},
        r"result 'x': expected an output .* got Node with outputs \['number', 'stop', 'half'\]",
    ),
    "a chain as a result": (
        lambda graph: {"h": graph.chain(STEP, x=[ROW, ROW])},
        r"result 'h': expected an output .*, got Chain with outputs \['h'\]",
    ),
    "a mixed list as a result": (
        lambda graph: {"x": [STEP(x=ROW).h, COUNT(number=1, limit=1, step=1).number]},
        r"result 'x'\[1\]: expected float32\[4\] as of the first, got int64\[\]",
    ),
    "too many nodes": (
        lambda graph: graph.chain(TOKEN, token=[1] * 101).last,
        r"cell 'Embedded': the graph has 101 nodes, at most 100 are allowed",
    ),
    "too many nodes one by one": (
        lambda graph: [TOKEN(token=1) for _ in range(101)][-1],
        r"cell 'Embedded': the graph has 101 nodes, at most 100 are allowed",
    ),
    "a chain of none": (lambda graph: graph.chain(TOKEN, token=[]).last, r"chain of cell 'Embedded': no steps"),
    "a chain without steps": (
        lambda graph: graph.chain(TOKEN, token=1).last,
        r"chain of cell 'Embedded': no input has a value for each step: input 'token': expected int64\[steps\] or a "
        r"list, got int 1",
    ),
    "a chain of one row": (
        lambda graph: graph.chain(STEP, x=ROW).last,
        r"chain of cell 'Recurrent': no input .*: input 'x': expected float32\[steps, 4\] or a list, got float32\[4\]",
    ),
    "a chain of too many dimensions": (
        lambda graph: graph.chain(STEP, x=np.ones((2, 3, SIZE))).last,
        r"input 'x': expected float32\[steps, 4\] or a list, got float64\[2, 3, 4\]",
    ),
    "a chain of nothing": (
        lambda graph: graph.chain(STEP, x=None).last,
        r"chain of cell 'Recurrent': no input .*: input 'x': expected float32\[steps, 4\] or a list, got None",
    ),
    "a chain of text": (
        lambda graph: graph.chain(PAIR, h_left="hello", h_right=STEP(x=ROW).h).last,
        r"input 'h_left': expected .* got str 'hello'; input 'h_right': .* got Output\(float32\[4\]\)",
    ),
    "a chain of carried inputs alone": (
        lambda graph: graph.chain(cell(lambda h: h + 1, {"h": (SIZE,)}, carry={"h": "output"}), h=ROW).last,
        r"(no input is read step by step: \['h'\] are carried or ragged|is not one of the model's)",
    ),
    "a chain of unequal inputs": (
        lambda graph: graph.chain(LEAF, x=[ROW, torch.ones(3)]).last,
        r"cell 'tree_leaf', node 0, input 'x\[1\]': expected float32\[4\], got float32\[3\]",
    ),
    "a wrong number in a list": (
        lambda graph: graph.chain(TOKEN, token=[1, 2, 2.5]).last,
        r"cell 'Embedded', node 0, input 'token\[2\]': expected int64\[\], got float64\[\]",
    ),
    "nothing in a list with an output": (
        lambda graph: graph.chain(TOKEN, token=[1, COUNT(number=1, limit=1, step=1).number, None]).last,
        r"cell 'Embedded', node 1, input 'token\[2\]': expected int64\[\], got None",
    ),
    "steps in a list": (
        lambda graph: ATTEND(x=ROW, memory=[ROW, graph.chain(STEP, x=[ROW, ROW]).h]),
        r"input 'memory\[1\]': expected float32\[4\], got Steps\(2 of float32\[4\]\), not an output of one node",
    ),
    "a smaller integer": (
        lambda graph: BYTE(x=torch.tensor(1)),
        r"cell 'byte', node 0, input 'x': expected uint8\[\], got int64\[\]",
    ),
    "a bool for an integer": (
        lambda graph: TOKEN(token=torch.tensor(True)),
        r"cell 'Embedded', node 0, input 'token': expected int64\[\], got bool\[\]",
    ),
    "a chain of unequal lengths": (
        lambda graph: graph.chain(PAIR, h_left=[ROW], h_right=[ROW, ROW]).last,
        r"inputs have different numbers of steps: {'h_left': 1, 'h_right': 2}",
    ),
    "a chain of another shape": (
        lambda graph: graph.chain(STEP, x=torch.ones(2, 3)).last,
        r"cell 'Recurrent', node 0, input 'x': expected float32\[4\] for each step, got float32\[3\]",
    ),
    "a loop without state": (
        lambda graph: graph.loop(LEAF, max_steps=2, x=ROW).last,
        r"loop of cell 'tree_leaf': no input is carried",
    ),
    "a loop without steps": (
        lambda graph: {"n": graph.loop(COUNT, max_steps=0, limit=1, step=1).number},
        r"loop of cell 'count_up': expected max_steps as an int from 1 to 1048575, got 0",
    ),
    "a loop with an unknown end": (
        lambda graph: {"n": graph.loop(STEP, max_steps=2, until="h", x=ROW).h},
        r"loop of cell 'Recurrent': until='h' must be an output of one number a row",
    ),
    "a cycle": (
        lambda graph: graph.tree([1, 0, -1], leaf=SUM, inner=SUM, leaf_inputs={"x": ROW}, inner_inputs={"x": ROW}),
        r"tree: nodes 0 and 1 form a cycle",
    ),
    "a cycle beside the tree": (
        lambda graph: graph.tree([2, 0, 3, 2, -1], leaf=LEAF, inner=PAIR),
        r"tree: nodes 2 and 3 form a cycle",
    ),
    "no root": (
        lambda graph: graph.tree([1, 2, 0], leaf=LEAF, inner=PAIR),
        r"tree: no root: expected parent -1 for one node; nodes 0, 1 and 2 form a cycle",
    ),
    "a long cycle": (
        lambda graph: graph.tree([*range(1, 20), 0], leaf=LEAF, inner=PAIR),
        r"no root: .* nodes 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. form a cycle",
    ),
    "its own parent": (lambda graph: graph.tree([-1, 1], leaf=LEAF, inner=PAIR), r"tree: node 1 is its own parent"),
    "two roots": (lambda graph: graph.tree([-1, 0, -1], leaf=LEAF, inner=PAIR), r"tree: two roots: nodes 0 and 2"),
    "float parents": (
        lambda graph: graph.tree([2.0, 2.5, -1.0], leaf=LEAF, inner=PAIR),
        r"tree: expected parents as integers \[nodes\], at least one, got list \[2.0, 2.5, -1.0\]",
    ),
    "a float tensor of parents": (
        lambda graph: graph.tree(torch.tensor([2, 2, -1.0]), leaf=LEAF, inner=PAIR),
        r"tree: expected parents as integers \[nodes\], at least one, got float32\[3\]",
    ),
    "bool parents": (
        lambda graph: graph.tree([True, False], leaf=LEAF, inner=PAIR),
        r"tree: expected parents as integers \[nodes\], at least one, got list \[True, False\]",
    ),
    "parents of several trees": (
        lambda graph: graph.tree(np.zeros((2, 3), int), leaf=LEAF, inner=PAIR),
        r"tree: expected parents as integers \[nodes\], at least one, got int64\[2, 3\]",
    ),
    "a parent beyond 32 bits": (
        lambda graph: graph.tree([1 << 32, -1], leaf=LEAF, inner=PAIR),
        r"tree: node 0 has parent 4294967296; expected a node number from 0 to 1",
    ),
    "no parents": (lambda graph: graph.tree([], leaf=LEAF, inner=PAIR), r"tree: expected parents"),
    "an unknown parent": (
        lambda graph: graph.tree([5, -1], leaf=LEAF, inner=PAIR),
        r"tree: node 0 has parent 5; expected",
    ),
    "three children of a pair": (
        lambda graph: graph.tree([3, 3, 3, -1], leaf=LEAF, inner=PAIR, leaf_inputs={"x": ROW}),
        r"tree: node 3 has 3 children, cell 'tree_pair' reads 2 by name",
    ),
    "a tree without leaf inputs": (
        lambda graph: graph.tree([1, -1], leaf=LEAF, inner=SUM, inner_inputs={"x": ROW}),
        r"cell 'tree_leaf', node 0, input 'x': missing; expected float32\[4\]",
    ),
    "a tree with other leaf inputs": (
        lambda graph: graph.tree([2, 2, -1], leaf=LEAF, inner=PAIR, leaf_inputs={"x": torch.ones(3, SIZE)}),
        r"cell 'tree_leaf', node 0, input 'x': expected 2 rows, one for each leaf of parents, got 3",
    ),
    "a tree with leaf inputs of another dtype": (
        lambda graph: graph.tree(
            [2, 2, -1], leaf=LEAF, inner=PAIR, leaf_inputs={"x": torch.ones(2, SIZE, dtype=torch.float64)}
        ),
        r"input 'x': expected float32\[4\] a row, got float64\[2, 4\]; use .float\(\)$",
    ),
    "a tree with other inner inputs": (
        lambda graph: graph.tree(
            [1, -1], leaf=LEAF, inner=SUM, leaf_inputs={"x": ROW}, inner_inputs={"x": torch.ones(2, SIZE)}
        ),
        r"input 'x': expected 1 rows, one for each node of parents that has children, got 2",
    ),
    "a tree with given children": (
        lambda graph: graph.tree(
            [1, -1], leaf=LEAF, inner=SUM, leaf_inputs={"x": ROW}, inner_inputs={"x": ROW, "h": []}
        ),
        r"cell 'ChildSum', node 0, input 'h': reads the children of a node and cannot be given",
    ),
    "a tree without inner inputs": (
        lambda graph: graph.tree([1, -1], leaf=LEAF, inner=SUM, leaf_inputs={"x": ROW}),
        r"cell 'ChildSum', node 0, input 'x': missing, and not the name of a child's output",
    ),
    "no cell": (lambda graph: graph.call("STEP", x=ROW), r"node 0: expected a cell, got str"),
    "a constant of another shape": (
        lambda graph: STEP(x=graph.constant(torch.ones(3))),
        r"(node 0, input 'x': expected float32\[4\], got|no cell of this engine has rows of) float32\[3\]",
    ),
    "a constant of text": (
        lambda graph: STEP(x=graph.constant("a")),
        r"constant: expected a number, a tensor or an array, got str 'a'",
    ),
    "a constant that is not of its spec": (
        lambda graph: TOKEN(token=graph.constant(1.5, rows(dtype=torch.int64))),
        r"constant: expected int64\[\], got float64\[\]",
    ),
    "a kept input that is not carried": (
        lambda graph: graph.chain(STEP, keep="x", x=[ROW]).last,
        r"cell 'Recurrent', node 0, input 'x': keep='x', but only \['h'\] are carried",
    ),
    "nothing to keep": (
        lambda graph: graph.chain(LEAF, keep=True, x=[ROW]).last,
        r"cell 'tree_leaf', node 0: keep=True: expected a carried input to keep \(see cell\(carry=...\)\)",
    ),
    "a state that does not fit": (
        lambda graph: graph.chain(STEP, keep=True, x=[ROW], h=torch.ones(3)).last,
        r"cell 'Recurrent', node 0, input 'h': expected float32\[4\], got float32\[3\]",
    ),
    "an unknown start of a state": (
        lambda graph: graph.state(STEP, x=ROW),
        r"cell 'Recurrent', node 0, input 'x': graph.state: unknown; the cell carries \['h'\]",
    ),
    "an unfolder that raises": (
        lambda graph: {}["key"],
        r"the unfolder raised KeyError: 'key'; the request: (function|NoneType|None)",
    ),
}


def good(graph: Graph) -> object:
    """Uses every cell, so that any may be used by other requests."""
    chain = graph.chain(STEP, x=torch.ones(20, SIZE))
    tree = graph.tree([2, 2, -1], leaf=LEAF, inner=PAIR, leaf_inputs={"x": ROW})
    total = SUM(x=tree.h, h=[chain.last.h])
    loop = graph.loop(COUNT, max_steps=3, limit=9, step=1)
    BYTE(x=1)
    HALF(x=1)
    BRAIN(x=[1])
    TORCH_GRU(input=ROW, hx=torch.ones(3))
    LSTM(x=ROW)
    WIDE(x=ROW, h=ROW)
    DOUBLE(h=ROW)
    NARROW(h=[])
    return {"h": ATTEND(x=total.h, memory=[TOKEN(token=loop.last.number).h]).h}
