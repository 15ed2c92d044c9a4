"""A client's bindings by model, kept current by the engine's answers and news."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from cellrt.errors import UnknownModelError
from cellrt.graph.unfolder import Unfolder
from cellrt.process.model_binding import Binding, Unfolders


class Bindings:
    """The bindings of one client. They do not refer to the client, so that it may be dropped.

    Safe from any thread; no method waits for a thread that waits.

    Attributes:
        by_name: the bindings for new requests.
        unfolders: the imported models. Versions that sessions go on with are kept: no file has them any more.
        num_changes: the number of times that the engine told of another model, or of one less.
        on_change: called after each such change, in the thread that receives it.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Binding] = {}
        self.unfolders = Unfolders()
        self.num_changes = 0
        self.on_change: Callable[[], object] = lambda: None
        self._by_number: WeakValueDictionary[int, Binding] = WeakValueDictionary()
        self._lock = threading.Lock()

    def all(self) -> dict[int, Binding]:
        """Return all bindings by number; they stay as long as this dict does."""
        return dict(self._by_number.items())

    def binding_of(self, value: Mapping[str, Any]) -> Binding:
        """Return the binding that an answer or news describe."""
        number = int(value["binding"])
        with self._lock:
            binding = self._by_number.get(number)
            if binding is None:
                binding = self._by_number[number] = Binding(number, value["description"], self.unfolders)
        return binding

    def is_named(self, model: str, binding: Binding, num_changes: int) -> bool:
        """Make a binding that of a model's new requests, if there is no other; return whether it is now.

        ``num_changes``: the number of changes before the binding was requested; after later changes it may be outdated,
        and
        is not used.
        """
        if self.by_name.setdefault(model, binding) is binding and self.num_changes != num_changes:
            self.forget(binding)
        return self.by_name.get(model) is binding

    def change(self, news: Mapping[str, Any]) -> Binding | None:
        """Record that a model of a name was registered or removed; return the binding that is outdated.

        The new binding is used from now on if the engine described it, and requested at the next use if not. Versions
        that are
        not used are forgotten.
        """
        name, versions = news["model"], news["versions"]
        self.num_changes += 1
        for known in list(self.unfolders):
            if known[0] == name and known[1] not in versions:
                self.unfolders.forget(known)
        before = self.by_name.get(name)
        if news["now"] is not None:
            self.by_name[name] = self.binding_of(news["now"])
        else:
            self.by_name.pop(name, None)
        self.on_change()
        return None if before is self.by_name.get(name) else before

    def forget(self, binding: Binding) -> None:
        """Remove a binding from ``by_name``, unless another one has replaced it."""
        if self.by_name.get(binding.name) is binding:
            self.by_name.pop(binding.name, None)


def check_name(model: object) -> str:
    """Return the name of a model. Raise UnknownModelError for anything else."""
    if isinstance(model, str):
        return model
    given = f"{model!r}; its name is {model.name!r}" if isinstance(model, Unfolder) else type(model).__name__
    raise UnknownModelError(f"expected the name of a registered model, got {given}")
