"""The connection of an encoder to a decoder: first states, through a bridge, and the rows that the decoder attends
to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

from cellrt import Cell, DefinitionError, Graph, RequestError, RowSpec, cell
from cellrt.cells import Bridge
from cellrt.unfolders.recurrent import Stack, StackRun, step_inputs
from cellrt.unfolders.sequences import as_stack

Layers = Stack | Cell | nn.LSTM | nn.GRU | nn.LSTMCell | nn.GRUCell
"""The types that may be an encoder."""


class Reader(NamedTuple):
    """A decoder as its encoder sees it.

    Attributes:
        name: for errors.
        inputs: all of its inputs.
        states: those that it carries, but for its token.
        recurrent: those of them that start from an encoder all or not at all, where that is known.
    """

    name: str
    inputs: Mapping[str, RowSpec]
    states: tuple[str, ...]
    recurrent: tuple[str, ...]


def reader_of(decoder: Cell) -> Reader:
    """Return a decoder that is a cell."""
    states = tuple(name for name in decoder.carry if name != "token")
    return Reader(decoder.name, decoder.inputs, states, tuple(getattr(decoder.module, "states", ())))


class _Last(NamedTuple):
    """A state after the last step: an output of one of a stack's last nodes, by its number."""

    node: int
    output: str
    spec: RowSpec


class Encoder:
    """Layers over a source, and how what they make becomes a decoder's inputs.

    Args:
        model: the model's name, for errors.
        layers: a stack, a cell or a torch module, with one input that is not carried.
        decoder: what reads it.
        bridge: see ``encoder_decoder``.
        memory: the output of the top layer that is attended to; None: nothing is.
        keys: a cell of ``AttentionKeys``.

    Raises DefinitionError if these do not fit each other.
    """

    def __init__(
        self,
        model: str,
        layers: Layers,
        decoder: Reader,
        *,
        bridge: Cell | Bridge | None = None,
        memory: str | None = None,
        keys: Cell | None = None,
    ) -> None:
        self._model, self._decoder, self._memory, self._keys = model, decoder, memory, keys
        self.stack = stack_of(model, layers)
        lowest = self.stack.layers[0].cells[0]
        if len(step_inputs(lowest)) != 1:
            raise self._error(f"the encoder must have one input that is not carried, got {step_inputs(lowest)}")
        self._last = _last_states(self.stack)
        self._is_direct = False
        self.bridge = self._default_bridge() if bridge is None else self._given_bridge(bridge)
        self._attends = memory is not None and self._check_attention(memory)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells."""
        return (*self.stack.cells, *(made for made in (self.bridge, self._keys) if made is not None))

    @property
    def states(self) -> tuple[str, ...]:
        """The decoder's inputs that come from the encoder's last states."""
        if self.bridge is not None:
            return tuple(self.bridge.outputs)
        return tuple(self._shared()) if self._is_direct else ()

    @property
    def gives_nothing(self) -> bool:
        """True if the decoder reads nothing of the encoder."""
        return not self.states and not self._attends

    def __call__(self, graph: Graph, source: Any) -> dict[str, Any]:
        """Add the encoder over a source ``[n, *shape]``; the decoder's inputs that it gives."""
        run = self.stack(graph, source)
        given = self._first_states(graph, run)
        if self._attends and self._memory is not None:
            given["memory"] = self.stack.output(graph, run, self._memory)
            if self._keys is not None:
                made = graph.chain(self._keys, **{next(iter(self._keys.inputs)): given["memory"]})
                given["keys"] = getattr(made, next(iter(self._keys.outputs)))
        return given

    def _first_states(self, graph: Graph, run: StackRun) -> dict[str, Any]:
        if self._is_direct:
            return {state: getattr(run.last[0], state) for state in self.states}
        if self.bridge is None:
            return {}
        sources = {name: self._last[name] for name in self.bridge.inputs}
        node = graph.call(
            self.bridge, **{name: getattr(run.last[last.node], last.output) for name, last in sources.items()}
        )
        return {state: getattr(node, state) for state in self.bridge.outputs}

    def _error(self, text: str) -> DefinitionError:
        return DefinitionError(f"model {self._model!r}: {text}")

    def _shared(self) -> list[str]:
        """Return the states that encoder and decoder have of one name."""
        carried = self.stack.top.ahead.carry.values()
        return [state for state in self._decoder.states if state in carried]

    def _default_bridge(self) -> Cell | None:
        """Return the decoder's states from the encoder's, by name: of several layers a row for each, of two
        directions side by side.
        """
        shared = self._shared()
        lost = [state for state in self.stack.top.ahead.carry.values() if state not in shared]
        missing = [state for state in self._decoder.recurrent if state not in shared] if shared else []
        if lost or missing:
            ends, starts = list(self.stack.top.ahead.carry.values()), list(self._decoder.states)
            raise self._error(
                f"the encoder's states are {ends}, those of the decoder {self._decoder.name!r} are {starts}: say which "
                f"becomes which{_hint(*starts[:1])}"
            )
        layers = {state: self._by_layer(state) for state in shared}
        self._is_direct = bool(shared) and len(self.stack.layers) == len(self.stack.top.directions) == 1
        if not shared or self._is_direct:
            return None
        return self._made(Bridge({state: names if len(names) > 1 else names[0] for state, names in layers.items()}))

    def _by_layer(self, state: str) -> list[list[str]]:
        """Return the names of a state's sources, for each layer.

        Raise DefinitionError unless they fit the decoder as is.
        """
        layers, directions = self.stack.layers, len(self.stack.top.directions)
        names = [[f"{state}{place}" for place in _places(k, directions)] for k in range(len(layers))]
        spec, wanted = self._last[names[-1][0]].spec, self._decoder.inputs[state]
        shape = (directions * spec.shape[0], *spec.shape[1:]) if spec.shape else spec.shape
        shape = shape if len(layers) == 1 else (len(layers), *shape)
        specs = {name: last.spec for name, last in self._last.items() if last.output == state}
        if {*specs.values()} != {spec} or wanted != RowSpec(shape, spec.dtype):
            raise self._error(
                f"the encoder ends with {_text(specs)}, together {RowSpec(shape, spec.dtype)}; the decoder "
                f"{self._decoder.name!r} starts with {state}: {wanted}: fit them together{_hint(state)}"
            )
        return names

    def _given_bridge(self, bridge: object) -> Cell | None:
        """Return the bridge that was asked for, as a cell. Raise DefinitionError unless it fits both sides."""
        last = {name: state.spec for name, state in self._last.items()}
        if isinstance(bridge, Bridge):
            made = self._made(bridge) if bridge.names else None
        elif isinstance(bridge, Cell):
            made = bridge
        else:
            raise self._error(f"expected a Bridge or a cell as bridge, got {type(bridge).__name__}")
        for name, spec in () if made is None else made.inputs.items():
            if name not in last or last[name] != spec:
                raise self._error(f"the bridge reads {name}: {spec}; the encoder's last states are {_text(last)}")
        wanted = {key: spec for key, spec in self._decoder.inputs.items() if key != "token" and not spec.ragged}
        for name, spec in () if made is None else made.outputs.items():
            if wanted.get(name) != spec:
                raise self._error(
                    f"the bridge makes {name}: {spec}; the decoder {self._decoder.name!r} reads {_text(wanted)}"
                )
        return made

    def _made(self, bridge: Bridge) -> Cell:
        last = {name: state.spec for name, state in self._last.items()}
        unknown = [name for name in bridge.names if name not in last]
        if unknown:
            raise self._error(f"the bridge reads {unknown}; the encoder's last states are {_text(last)}")
        return cell(bridge, {name: last[name] for name in bridge.names}, name=f"{self._model} bridge")

    def _check_attention(self, memory: str) -> bool:
        """Return whether the decoder attends.

        Raise DefinitionError if its ragged inputs are not those that there are.
        """
        decoder, outputs = self._decoder, self.stack.top.ahead.outputs
        wanted = {name: spec for name, spec in decoder.inputs.items() if spec.ragged}
        given = (["memory"] if "memory" in wanted else []) + (["keys"] if self._keys is not None else [])
        if sorted(wanted) != sorted(given):
            raise self._error(f"the decoder's ragged inputs are {list(wanted)}, but there are {given}")
        if not wanted:
            return False
        if memory not in outputs:
            raise self._error(f"{self.stack.top.ahead!r} has no output {memory!r} to attend to")
        row = self.stack.output_spec(memory)
        self._check_rows("memory", row)
        if self._keys is not None:
            if (len(self._keys.inputs), len(self._keys.outputs)) != (1, 1):
                raise self._error(f"{self._keys!r} must have one input and one output")
            ((read, reads),) = self._keys.inputs.items()
            if reads != row:
                raise self._error(f"the keys' {read!r} is {reads}; the encoder's rows are {row}")
            self._check_rows("keys", next(iter(self._keys.outputs.values())))
        return True

    def _check_rows(self, name: str, row: RowSpec) -> None:
        wanted = self._decoder.inputs[name]
        if wanted != row._replace(ragged=True):
            raise self._error(
                f"the decoder {self._decoder.name!r} attends to {name}: {wanted}; the encoder gives rows of {row}"
            )


def stack_of(model: str, layers: Layers) -> Stack:
    """Return the layers of a model. Raise DefinitionError, naming it, for what is none."""
    try:
        return as_stack(layers)
    except DefinitionError as error:
        raise DefinitionError(f"model {model!r}: the encoder cannot be used: {error}") from None


def take(request: object, key: str, others: Collection[str]) -> dict[str, Any]:
    """Return a copy of a request that is a dict with this key, and maybe with others.

    Raise RequestError for another.
    """
    if not isinstance(request, Mapping) or key not in request:
        got = list(request) if isinstance(request, Mapping) else type(request).__name__
        raise RequestError(f"expected a dict with {key!r} as request, got {got}")
    unknown = [name for name in request if name != key and name not in others]
    if unknown:
        raise RequestError(f"expected a dict with {key!r} and maybe {[*others]} as request; {unknown} are unknown")
    return dict(request)


def _places(layer: int, directions: int) -> list[str]:
    """Return the ends of names of a layer's states: ``_l0``, and of two directions ``_l0_reverse``."""
    return [f"_l{layer}", f"_l{layer}_reverse"][:directions]


def _last_states(stack: Stack) -> dict[str, _Last]:
    """Return the outputs of a stack's last nodes, by their names for bridges."""
    found: dict[str, _Last] = {}
    places = [place for k, layer in enumerate(stack.layers) for place in _places(k, len(layer.directions))]
    cells = [made for layer in stack.layers for made in layer.directions]
    for node, (place, made) in enumerate(zip(places, cells, strict=True)):
        found |= {f"{name}{place}": _Last(node, name, spec) for name, spec in made.outputs.items()}
    return found


def _hint(state: str = "h") -> str:
    """Return how to pass a bridge, for the end of an error."""
    return f" with a bridge, such as bridge=cellrt.cells.Bridge({ ({state: [f'{state}_l0']}) }, ...)"


def _text(specs: Mapping[str, RowSpec]) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "none"
