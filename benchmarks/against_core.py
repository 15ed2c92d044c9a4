"""The scheduler's cost of a node, of whichever version of cellrt is imported; ``against.py`` runs this file.

The request processor is driven as the engine drives it, with tasks that end at once and take one step: chains of 24
steps by the batch, chains of two layers whose every step is streamed at two workers, and trees like a treebank's. It
asks for nothing but what every version since 2a12ad4 has.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import time
from typing import Any

import numpy as np

LENGTH, NUM_WORDS, ROOM = 24, 1_000, 128
BATCHES = (8, 64, 512, 4_096)
REPEATS = 9


def name_of(name: str) -> Any:
    """Return a class or word of the core, in whichever module this version has it."""
    for module in ("state.ports", "state.settings", "ports", "settings", "processor", "templates.program", "program"):
        try:
            return getattr(importlib.import_module(f"cellrt.core.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"no cellrt.core has {name}")


OP_EXTERNAL, OP_NODE, OP_CHAIN, OP_RESULT = map(name_of, ("OP_EXTERNAL", "OP_NODE", "OP_CHAIN", "OP_RESULT"))
CARRY, FIXED, STEP = map(name_of, ("CARRY", "FIXED", "STEP"))


def make_processor(num_workers: int, num_requests: int) -> Any:
    """Return a processor with room for so many requests, and one kind of rows, number 0."""
    limits = name_of("Limits")
    events = "max_events" if "max_events" in inspect.signature(limits).parameters else "story_events"
    room = ROOM * num_requests
    sizes = {"max_nodes": room, "max_values": room, "max_links": 4 * room, "max_subgraphs": room, events: 0}
    settings = name_of("SchedulerSettings")(runs=False)
    processor = name_of("Processor")(num_workers, limits(max_requests=num_requests, **sizes), settings)
    processor.add_kind(room, room)
    return processor


def chains(batch: int) -> tuple[Any, list[Any], int, bool]:
    """Return chains of one layer, four times as many as a task has."""
    port, count = name_of("Port"), max(256, 4 * batch)
    processor = make_processor(1, count)
    cell = processor.add_type([port(0), port(0, carry=0)], [port(0)], max_batch=batch)
    program = [OP_EXTERNAL, 0, LENGTH + 1, OP_CHAIN, cell, LENGTH, STEP, 0, 1, CARRY, LENGTH]
    program += [OP_RESULT, 2 * LENGTH, 1, 1]
    return processor, [processor.compile(np.array(program, np.int32))] * count, LENGTH * count, False


def two_layers(batch: int) -> tuple[Any, list[Any], int, bool]:
    """Return chains of two layers, of which the second follows the first."""
    port, count = name_of("Port"), 1_024
    processor = make_processor(2, count)
    ports = [port(0), port(0, carry=0)], [port(0)]
    first, second = (processor.add_type(*ports, max_batch=batch) for _ in range(2))
    program = [OP_EXTERNAL, 0, LENGTH + 1, OP_CHAIN, first, LENGTH, STEP, 0, 1, CARRY, LENGTH]
    program += [OP_CHAIN, second, LENGTH, STEP, LENGTH + 1, 1, CARRY, LENGTH, OP_RESULT, 2 * LENGTH + 1, 1, LENGTH]
    return processor, [processor.compile(np.array(program, np.int32))] * count, 2 * LENGTH * count, True


def without_state(batch: int) -> tuple[Any, list[Any], int, bool]:
    """Return chains of two layers that carry nothing, as of an embedding and what follows it: all steps of one go
    together.
    """
    port, count = name_of("Port"), 1_024
    processor = make_processor(1, count)
    first, second = (processor.add_type([port(0)], [port(0)], max_batch=batch) for _ in range(2))
    program = [OP_EXTERNAL, 0, LENGTH, OP_CHAIN, first, LENGTH, STEP, 0, 1]
    program += [OP_CHAIN, second, LENGTH, STEP, LENGTH, 1, OP_RESULT, 2 * LENGTH, 1, LENGTH]
    return processor, [processor.compile(np.array(program, np.int32))] * count, 2 * LENGTH * count, False


def trees(batch: int) -> tuple[Any, list[Any], int, bool]:
    """Return trees of leaves and inner nodes."""
    from benchmarks.trees import parse_like_trees

    port, count = name_of("Port"), 1_024
    processor = make_processor(1, count)
    leaf = processor.add_type([port(0)], [port(0)], max_batch=batch)
    inner = processor.add_type([port(0), port(0)], [port(0)], max_batch=batch, priority=1)
    templates, num_nodes = [], 0
    for tree in parse_like_trees(count, NUM_WORDS, 0):
        levels, children, words, leaves = tree.levels.tolist(), iter(tree.children.tolist()), len(tree.tokens), 0
        program = [OP_EXTERNAL, 0, words]
        for level in levels:
            if level == 0:
                program += [OP_NODE, leaf, FIXED, leaves]
                leaves += 1
            else:
                left, right = next(children)
                program += [OP_NODE, inner, FIXED, words + left, FIXED, words + right]
        program += [OP_RESULT, words + len(levels) - 1, 1, 1]
        templates.append(processor.compile(np.array(program, np.int32)))
        num_nodes += len(levels)
    return processor, templates, num_nodes, False


def node_ns(processor: Any, templates: list[Any], num_nodes: int, is_streamed: bool) -> float:
    """Return scheduling and completion, nanoseconds a node: the least of some repeats, as a quiet moment shows."""
    num_workers, times = processor.num_workers, []
    for _ in range(REPEATS + 1):
        for sequence, template in enumerate(templates):
            if processor.admit(template, sequence, streamed=is_streamed) is None:
                raise RuntimeError(f"no room for request {sequence}")
        done: list[int] = []
        start, is_more = time.perf_counter(), True
        while is_more:
            tasks = [task for worker in range(num_workers) for task in processor.schedule(worker + 1)]
            for task in tasks:
                told = processor.complete(task, 0)
                done += told.done() if hasattr(told, "done") else [id for id, what in told if what == 1]
            is_more = bool(tasks)
        times.append(1e9 * (time.perf_counter() - start) / num_nodes)
        if len(done) != len(templates):
            raise RuntimeError(f"{len(done)} of {len(templates)} requests are done")
        processor.release(done)
    return min(times[1:])


def measure() -> list[float]:
    """Return nanoseconds a node in each of ``NODE_CASES`` of ``against.py``, of the cellrt that is imported."""
    made = [*((chains, batch) for batch in BATCHES), (two_layers, 512), (without_state, 512)]
    made += [(trees, 64), (trees, 512)]
    gc.disable()
    return [node_ns(*make(batch)) for make, batch in made]


if __name__ == "__main__":
    print(json.dumps(measure()))
