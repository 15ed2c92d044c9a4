"""A client's bindings: which it has for each model's name, as answers and the engine's news tell it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from cellrt.errors import UnknownModelError
from cellrt.graph.unfolder import Unfolder
from cellrt.process.binding import Binding, Unfolders


class Bindings:
    """See the module. Holds no client, which may be dropped. Safe from any thread, and waits for none that waits.

    Attributes:
        by_name: those to unfold new requests for.
        unfolders: that were imported. Those of versions that sessions go on with are kept: no file has them any more.
        num_changes: how often the engine told of another model, or of one less.
        on_change: called when it has, in the thread that hears it.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Binding] = {}
        self.unfolders = Unfolders()
        self.num_changes = 0
        self.on_change: Callable[[], object] = lambda: None
        self._by_number: WeakValueDictionary[int, Binding] = WeakValueDictionary()
        self._lock = threading.Lock()

    def all(self) -> dict[int, Binding]:
        """All by number; they stay as long as this dict does."""
        return dict(self._by_number.items())

    def told(self, value: Mapping[str, Any]) -> Binding:
        """The binding that an answer or news tell of."""
        number = int(value["binding"])
        with self._lock:
            binding = self._by_number.get(number)
            if binding is None:
                binding = self._by_number[number] = Binding(number, value["description"], self.unfolders)
        return binding

    def is_named(self, model: str, binding: Binding, num_changes: int) -> bool:
        """Whether new requests of a model go to a binding that was asked for when there were so many changes: if there
        is no other, and none can have taken its place meanwhile."""
        if self.by_name.setdefault(model, binding) is binding and self.num_changes != num_changes:
            self.forget(binding)
        return self.by_name.get(model) is binding

    def change(self, news: Mapping[str, Any]) -> Binding | None:
        """Takes in that a model of a name was registered or taken out; returns the binding whose time is over.

        The one that comes in its place is there from now on, if the engine told of it, and else asked for. Forgets
        versions that nobody uses.
        """
        name, versions = news["model"], news["versions"]
        self.num_changes += 1
        for known in list(self.unfolders):
            if known[0] == name and known[1] not in versions:
                self.unfolders.forget(known)
        before = self.by_name.get(name)
        if news["now"] is not None:
            self.by_name[name] = self.told(news["now"])
        else:
            self.by_name.pop(name, None)
        self.on_change()
        return None if before is self.by_name.get(name) else before

    def forget(self, binding: Binding) -> None:
        """Takes out a binding, unless there is another by now."""
        if self.by_name.get(binding.name) is binding:
            self.by_name.pop(binding.name, None)


def check_name(model: object) -> str:
    """The name of a model, if it is one. Raises UnknownModelError."""
    if isinstance(model, str):
        return model
    given = f"{model!r}; its name is {model.name!r}" if isinstance(model, Unfolder) else type(model).__name__
    raise UnknownModelError(f"expected the name of a registered model, got {given}")
