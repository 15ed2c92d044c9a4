"""The types of ``hand_in.c``."""

from typing import Any

SOURCE: int
"""The checksum of the source that it was built from."""

class Prepared:
    """The facts that requests of one graph have in common."""

    count: int
    """The number of requests since the graph is known."""

    def __new__(cls, **facts: Any) -> Prepared: ...

class Door:
    """Hands in a plain request of a known graph: returns its future, or None if Python must do it."""

    def __new__(cls, **facts: Any) -> Door: ...
    def __call__(self, name: str, request: Any, may_wait: bool, /) -> Any: ...
    def hand_in(self, prepared: Prepared, plan: Any, model: Any, name: str, request: Any, may_wait: bool, /) -> Any: ...
    def tell(
        self, answered_at: int, size: int, first: int, end: int, /
    ) -> tuple[dict[Any, bytearray], dict[Any, bytearray], list[int]]: ...

def layout() -> dict[str, int]:
    """Return where each field of the rows is, and how long the rows are."""
