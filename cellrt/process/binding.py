"""A model as an engine in another process knows it: what is needed to unfold its requests here.

``described`` makes it where the engine is, as JSON; ``Binding`` reads it where the client is. Of constants only digests
cross, of cells their identities: a client whose cells have other weights than the engine's is told so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch

from cellrt.definition.bits import NUMPY_DTYPES
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.engine.registry import Model, Registry
from cellrt.errors import DefinitionError, RequestError, UnknownModelError
from cellrt.graph.known import KnownGraphs
from cellrt.graph.results import StateLayout
from cellrt.graph.unfolder import Unfolder
from cellrt.process.source import ModelSource, made_of


class RowFormat:
    """The rows of a kind as bytes.

    Attributes:
        spec: of a row.
        bits: NumPy dtype of its bits; see ``definition.bits.as_bits``.
        num_bytes: of a row.
    """

    __slots__ = ("bits", "num_bytes", "spec")

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self.bits = np.dtype(NUMPY_DTYPES.get(spec.dtype, np.int16))
        self.num_bytes = spec.num_bytes


def described(model: Model, registry: Registry) -> dict[str, Any]:
    """What a client must know of a model, as JSON has it."""
    constants = [(kind, _digest(content), row) for (kind, content), row in dict(registry.constants).items()]
    return {
        "name": model.name,
        "source": model.origin.source.text,
        "version": model.origin.version,
        "max_nodes": model.max_nodes,
        "types": dict(model.types),
        "kinds": [
            (list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.page_size, spec.page_dim)
            for spec in list(registry.kinds)
        ],
        "constants": constants,
        "states": [list(state) for state in model.states],
        "outline": model.unfolder.outline,
    }


class Unfolders(dict[tuple[str, int], Unfolder]):
    """The models that a client has imported, by name and version: with compiled forms a model is described anew, and
    its file may be another by then.

    Attributes:
        on_import: called with how many were forgotten so far whenever one was imported.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_import: Callable[[int], object] = lambda num_gone: None
        self._num_gone = 0

    def imported(self, its: tuple[str, int], load: Callable[[], Unfolder]) -> Unfolder:
        """The one of a name and version; what is new is loaded."""
        found = self.get(its)
        if found is None:
            found = self.setdefault(its, load())
            self.on_import(self._num_gone)
        return found

    def forget(self, its: tuple[str, int]) -> None:
        """Gives up one that nobody uses."""
        self._num_gone += self.pop(its, None) is not None


class Binding:
    """A model of an engine elsewhere; a graph is built for it as for one here (``graph.recorder.Binding``).

    Made by whoever hears of it, and quickly: it is imported when somebody first unfolds for it.

    Args:
        number: what messages call it.
        description: see ``described``.
        unfolders: of this process.

    Attributes:
        number, name: of the model.
        version: how many models of that name there were, with this one.
        unfolder, known: of this process, and the graphs that it is known to make; imported at first, which raises
            UnknownModelError, DefinitionError.
        formats: of rows, by kind.
        states: what its sessions keep.
        users: who unfolds for it now: an object of each call, and of each session a weak reference, which goes with it.
        is_outdated: whether the engine has another model of that name, or none.
        is_released: whether the engine was told that nothing unfolded for it will come any more.
    """

    def __init__(self, number: int, description: Mapping[str, Any], unfolders: Unfolders) -> None:
        self.number, self.name = number, str(description["name"])
        self.version = int(description["version"])
        self.source = ModelSource(description["source"])
        self._outline: Mapping[str, Any] | None = description["outline"]
        self._unfolders = unfolders
        self._unfolder: Unfolder | None = None
        self._known: KnownGraphs | None = None
        self.max_nodes = int(description["max_nodes"])
        self.formats = [
            RowFormat(RowSpec(tuple(shape), getattr(torch, dtype), page_size=page_size, page_dim=page_dim))
            for shape, dtype, page_size, page_dim in description["kinds"]
        ]
        self.states = tuple(StateLayout(*state) for state in description["states"])
        self.users: set[object] = set()
        self.is_outdated = self.is_released = False
        self._types: dict[str, int] = description["types"]
        self._kinds = {each.spec: kind for kind, each in enumerate(self.formats)}
        self._constants = {(kind, digest): row for kind, digest, row in description["constants"]}

    @property
    def is_imported(self) -> bool:
        """Whether the model is there to unfold with."""
        return self._known is not None

    def imported(self) -> Self:
        """The binding, with its model imported. Raises UnknownModelError, DefinitionError."""
        _ = self.known
        return self

    @property
    def unfolder(self) -> Unfolder:
        """See the class."""
        if self._unfolder is None:
            its = self.name, self.version
            unfolder = self._unfolders.imported(its, self._load)
            if unfolder.name != self.name:
                raise UnknownModelError(
                    f"model {self.name!r}: {self.source.text} is model {unfolder.name!r} in this process"
                )
            self._unfolder = unfolder
        return self._unfolder

    def _load(self) -> Unfolder:
        try:
            return self.source.load() if self._outline is None else made_of(self._outline)
        except DefinitionError as error:  # the engine's process could
            raise DefinitionError(
                f"{error}; a client imports the model for itself, from where its imports look: the folder of its "
                "program (of python -m the working folder), PYTHONPATH, and what is installed"
            ) from error

    @property
    def known(self) -> KnownGraphs:
        """See the class."""
        if self._known is None:
            self._known = KnownGraphs(self.unfolder)
        return self._known

    def cell_type(self, cell: Cell) -> int:
        """Type id of a cell. Raises RequestError if the model does not have it."""
        type_id = self._types.get(cell.identity)
        if type_id is None:
            raise RequestError(
                f"cell {cell.name!r} of {self.source.text} is not one of the model's in the engine's process: it was "
                "made with other weights or code there (draw weights with a seed, or load them; if what it reads has "
                f"changed since, load({self.name!r}) anew), or the example request did not use it"
            )
        return type_id

    def kind(self, spec: RowSpec) -> int:
        """Kind of a row spec. Raises RequestError if no cell of the engine has such rows."""
        kind = self._kinds.get(spec.stored)
        if kind is None:
            raise RequestError(f"no cell of this engine has rows of {spec}")
        return kind

    def constant_row(self, kind: int, content: bytes) -> int:
        """Permanent row of a constant, or -1: then it travels with the request."""
        return self._constants.get((kind, _digest(content)), -1) if self._constants else -1


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
