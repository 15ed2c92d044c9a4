"""The description of a model that a client needs to unfold its requests in another process.

``described`` makes it in the engine's process, as JSON; ``Binding`` reads it in the client's. Of constants only digests
cross, of cells their identities: a client whose cells have other weights than the engine's gets an error.
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
    """The format in bytes of a row kind.

    Attributes:
        spec: the spec of a row.
        bits: the NumPy dtype of its bits (see ``definition.bits.as_bits``).
        num_bytes: the size of a row in bytes.
    """

    __slots__ = ("bits", "num_bytes", "spec")

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self.bits = np.dtype(NUMPY_DTYPES.get(spec.dtype, np.int16))
        self.num_bytes = spec.num_bytes


def described(model: Model, registry: Registry) -> dict[str, Any]:
    """Return the description of a model for clients, as a JSON object."""
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
    """The models that a client has imported, by name and version.

    They are kept because a model whose compiled forms are ready is described anew, and its file may have changed by
    then.

    Attributes:
        on_import: called after each import, with the number of models forgotten so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_import: Callable[[int], object] = lambda num_gone: None
        self._num_gone = 0

    def imported(self, its: tuple[str, int], load: Callable[[], Unfolder]) -> Unfolder:
        """Return the model of a name and version; load it if it is new."""
        found = self.get(its)
        if found is None:
            found = self.setdefault(its, load())
            self.on_import(self._num_gone)
        return found

    def forget(self, its: tuple[str, int]) -> None:
        """Forget a model that is not used."""
        self._num_gone += self.pop(its, None) is not None


class Binding:
    """A model of an engine elsewhere. A graph is built for it as for one here (``graph.recorder.Binding``).

    Making one is quick: the model is imported when a request is first unfolded for it.

    Args:
        number: names the binding in messages.
        description: see ``described``.
        unfolders: those of this process.

    Attributes:
        number, name: the number of the binding, and the name of the model.
        version: the number of models of that name so far, with this one.
        unfolder, known: the model of this process, and its known graphs. The first use imports it, which raises
            UnknownModelError, DefinitionError.
        formats: the formats of rows, by kind.
        states: the states of its sessions.
        users: the present users: an object for each call, and for each session a weak reference, which goes with it.
        is_outdated: whether the engine has another model of that name, or none.
        is_released: whether the engine was told that no more requests will be unfolded for it.
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
        """True once the model is imported."""
        return self._known is not None

    def imported(self) -> Self:
        """Return the binding, with its model imported. Raise UnknownModelError, DefinitionError."""
        _ = self.known
        return self

    @property
    def unfolder(self) -> Unfolder:
        """The model of this process, imported at the first use. Raises UnknownModelError, DefinitionError."""
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
        """The known graphs of the model. Raises like ``unfolder``."""
        if self._known is None:
            self._known = KnownGraphs(self.unfolder)
        return self._known

    def cell_type(self, cell: Cell) -> int:
        """Return the type id of a cell. Raise RequestError if the model does not have it."""
        type_id = self._types.get(cell.identity)
        if type_id is None:
            raise RequestError(
                f"cell {cell.name!r} of {self.source.text} is not one of the model's in the engine's process: it was "
                "made with other weights or code there (draw weights with a seed, or load them; if what it reads has "
                f"changed since, load({self.name!r}) anew), or the example request did not use it"
            )
        return type_id

    def kind(self, spec: RowSpec) -> int:
        """Return the kind of a row spec. Raise RequestError if no cell of the engine has such rows."""
        kind = self._kinds.get(spec.stored)
        if kind is None:
            raise RequestError(f"no cell of this engine has rows of {spec}")
        return kind

    def constant_row(self, kind: int, content: bytes) -> int:
        """Return the permanent row of a constant, or -1: then it travels with the request."""
        return self._constants.get((kind, _digest(content)), -1) if self._constants else -1


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
