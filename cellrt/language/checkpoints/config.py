"""Values of JSON objects and of GGUF's fields, each checked as it is read: a file may say anything."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cellrt import DefinitionError

MOST, MOST_TOKENS = 1 << 20, 1 << 24
"""The largest size of a layer; the largest vocabulary and context."""
REQUIRED = object()
"""A default that means: the field must be there."""
Values = Mapping[str, Any]


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file of at most this many bytes.

    Raise DefinitionError for a larger file, and for one that is no plain file or cannot be read.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DefinitionError(f"{path}: expected a plain file")
        if found.st_size > most:
            raise DefinitionError(f"{path}: expected at most {most} bytes, got {found.st_size}")
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise DefinitionError(f"{path}: it cannot be read: {error}") from error


def read_json(path: Path, most: int = 1 << 20) -> Values:
    """Return the JSON object in a file. Raise DefinitionError for anything else."""
    values = _read(path, most)
    if not isinstance(values, dict):
        raise DefinitionError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def read_list(path: Path, most: int = 1 << 20) -> list[Any]:
    """Return the JSON list in a file. Raise DefinitionError for anything else."""
    values = _read(path, most)
    if not isinstance(values, list):
        raise DefinitionError(f"{path}: expected a JSON list, got {type(values).__name__}")
    return values


def _read(path: Path, most: int) -> Any:
    content = read_bytes(path, most)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DefinitionError(f"{path}: it is no JSON: {error}") from error


class Config:
    """The fields of an object, by name. Errors name the object by ``where``. A field that is null counts as missing."""

    def __init__(self, where: str, values: Values) -> None:
        self.where, self.values = where, values

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def count(self, name: str, default: Any = REQUIRED, *, least: int = 1, most: int = MOST) -> int:
        """Return an int field within these bounds."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, f"an int from {least} to {most}", value)
        return value

    def number(self, name: str, default: Any = REQUIRED, *, least: float = 0.0, most: float = 1e12) -> float:
        """Return a number above ``least`` and at most ``most``."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= most:
            raise self._wrong(name, f"a number above {least:g} and at most {most:g}", value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """Return a string field."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def part(self, name: str) -> Config:
        """Return an object within this one, which is empty if it is missing."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Config(f"{self.where}, {name}", value)

    def expect(self, name: str, *allowed: object) -> Any:
        """Return a field that must be one of the allowed values; a missing one is the first of them."""
        value = self._get(name, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self._wrong(name, " or ".join(map(repr, allowed)), value)
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return token numbers: none, one or a list of them."""
        value = self._get(name, [])
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < MOST_TOKENS for one in listed):
            raise self._wrong(name, "a token number or a list of them", value)
        return tuple(listed)

    def token(self, name: str) -> int | None:
        """Return the first of ``tokens``."""
        return next(iter(self.tokens(name)), None)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is REQUIRED:
            raise DefinitionError(f"{self.where}: expected {name}, which is not there")
        return default if value is None else value

    def _wrong(self, name: str, expected: str, value: object) -> DefinitionError:
        return DefinitionError(f"{self.where}, {name}: expected {expected}, got {value!r:.80}")
