"""Sequences: a model that runs layers of recurrent cells over the steps of a request."""

from __future__ import annotations

from typing import Any

from torch import nn

from cellrt import Cell, DefinitionError, Graph, Unfolder
from cellrt.unfolders.recurrent import Layer, Stack, StackRun, from_torch, step_inputs


def chain(
    name: str,
    layers: Stack | Cell | nn.LSTM | nn.GRU | nn.LSTMCell | nn.GRUCell,
    *,
    head: Cell | None = None,
    states: bool | None = None,
    keep: bool = False,
    example: Any = None,
) -> Unfolder:
    """Return a model over sequences: ``engine.register(chain("tagger", nn.LSTM(...), head=tags))``.

    A request is ``[steps, *shape]``, at least one step: a tensor, or a list of numbers (tokens). Its results, as
    torch's modules give them without a batch dimension:

    - without a head ``output`` ``[steps, directions * hidden]``: the first output of the top layer's cells;
    - with one, each of the head's outputs ``[steps, *shape]``, by its name;
    - with ``states`` (default: without a head), for each output ``x`` of the cells that carries state ``x_n``
      ``[layers * directions, *shape]``: after the last step of each layer and direction, such as ``h_n`` and ``c_n``.

    Args:
        name: the model's name.
        layers: a stack (see ``from_torch``), a single cell, or a torch module.
        head: a cell for each step, such as a classifier. If the top layer runs in both directions, it reads both rows
            side by side, or each as an input of its own if it has two inputs.
        keep: each request of a session continues from the state that the one before left (see ``Engine.session``).
        example: a request for the check at registration; default: two steps of zeros.

    Raise DefinitionError if the head does not fit the layers, and for ``keep`` with layers in both directions.
    """
    stack = as_stack(layers)
    directions = len(stack.top.directions)
    if keep and any(layer.reverse is not None for layer in stack.layers):
        raise DefinitionError(f"chain {name!r}: layers that run backwards cannot be continued: keep=True")
    if head is not None and not isinstance(head, Cell):
        raise DefinitionError(
            f"chain {name!r}: head: expected a cell, got {type(head).__name__}: cellrt.cell(module, {{'input': ...}})"
        )
    num_read = 1 if head is None else len(step_inputs(head))
    if num_read not in (1, directions):
        raise DefinitionError(f"chain {name!r}: the head reads {num_read} inputs; the layers have {directions}")
    if head is not None:
        made = [stack.top.size] * directions if num_read == directions else [stack.output_spec()]
        reads = {each: head.inputs[each] for each in step_inputs(head)}
        if [*reads.values()] != made:
            described = {each: str(spec) for each, spec in reads.items()}
            raise DefinitionError(
                f"chain {name!r}: the head {head.name!r} reads {described}; the layers make {', '.join(map(str, made))}"
            )
    with_states = head is None if states is None else states

    def unfold(graph: Graph, request: Any) -> object:
        run = stack(graph, request, keep=keep)
        top = run.steps if num_read == directions else (stack.output(graph, run),)
        results: dict[str, object] = {"output": top[0]}
        if head is not None:
            inputs: dict[str, Any] = dict(zip(step_inputs(head), top))
            tags = graph.chain(head, **inputs)
            results = {output: getattr(tags, output) for output in head.outputs}
        return {**results, **(_final(stack, run) if with_states else {})}

    return Unfolder(name, unfold, stack.example() if example is None else example, stack.cells, key=len)


def as_stack(layers: Stack | Cell | nn.Module) -> Stack:
    """Return a stack of what was given; see ``chain``."""
    if isinstance(layers, Stack):
        return layers
    return Stack((Layer(layers),)) if isinstance(layers, Cell) else from_torch(layers)  # type: ignore[arg-type]


def _final(stack: Stack, run: StackRun) -> dict[str, object]:
    """Return the states after the last steps, by name."""
    return {f"{output}_n": run.states(output) for output in stack.top.ahead.carry.values()}
