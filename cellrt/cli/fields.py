"""Make options of a command from the fields of dataclasses, with their names, types and help.

A field ``page_bytes`` becomes the option ``--page-bytes``. A field of a nested dataclass, such as ``max_wait_s`` of
``scheduler``, becomes ``--scheduler-max-wait-s``. Options have the same names in the environment and in a TOML file;
the file may have a table for a nested dataclass, ``[scheduler]``. An option that is not given has the field's default.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

MOST, LONGEST_S = 1 << 48, 1e9
"""The largest integer that an option takes, and the longest time in seconds."""
MAY_BE_ZERO = ("loops_ahead", "max_resident")
"""The options with an integer that may be 0."""


class Field(NamedTuple):
    """A field that is an option: the nested dataclass that it is in (or an empty text), its name, type and help."""

    table: str
    name: str
    type: type
    help: str

    @property
    def option(self) -> str:
        """The name of the command's parameter for the field."""
        return f"{self.table}_{self.name}" if self.table else self.name

    def parameter(self) -> inspect.Parameter:
        """Return the field as a parameter that typer understands."""
        names = ["--" + self.option.replace("_", "-")]
        bounds: dict[str, Any] = {}
        if self.type is bool:
            names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
        elif self.type is int:
            bounds = {"min": int(self.name not in MAY_BE_ZERO), "max": MOST}
        elif self.type is float:
            bounds = {"min": 0.0, "max": LONGEST_S}
        told = typer.Option(*names, help=self.help, rich_help_panel="The engine", **bounds)
        annotation: Any = Annotated[self.type | None, told]
        return inspect.Parameter(self.option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def fields_of(record: type[Any], without: tuple[str, ...] = (), table: str = "") -> list[Field]:
    """Return the fields of a dataclass, and of dataclasses nested in it; all have defaults.

    Leave out the fields whose options have a name in ``without``.
    """
    found, types, helps = [], get_type_hints(record), helps_of(record)
    for field in dataclasses.fields(record):
        kind: Any = types[field.name]
        if dataclasses.is_dataclass(kind):
            found += fields_of(kind, without, field.name)  # type: ignore[arg-type]
            continue
        if isinstance(kind, UnionType):
            kind = next(each for each in get_args(kind) if each is not type(None))
        default = "" if field.default is None else f" By default {field.default}."
        made = Field(table, field.name, kind, f"{helps[field.name]}{default}")
        if made.option not in without:
            found.append(made)
    return found


def helps_of(record: type[Any]) -> dict[str, str]:
    """Return the help of each attribute from a class's docstring: its text up to the first full stop or semicolon."""
    _, _, told = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")
    helps = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n      +.*)*)", told, re.MULTILINE):
        text = re.sub(r"\s+", " ", text).replace("``", "")
        for name in names.split(", "):
            helps[name] = re.split(r"[.;](?= |$)", text[:1].upper() + text[1:])[0] + "."
    return helps


def made_of(record: type[Any], given: Mapping[str, Any], table: str = "") -> Any:
    """Return a record made of options by name; None or no option: the default. Raise the errors of the record."""
    parts = {}
    for name, kind in get_type_hints(record).items():
        option = f"{table}_{name}" if table else name
        if dataclasses.is_dataclass(kind):
            parts[name] = made_of(kind, given, name)  # type: ignore[arg-type]
        elif given.get(option) is not None:
            parts[name] = given[option]
    return record(**parts)


def with_fields(fields: list[Field], name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take fields as options; it gets a dict of them all in its argument ``name``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        parameters = [each for each in own.parameters.values() if each.name != name]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            of_fields = {field.option: given.pop(field.option) for field in fields}
            command(**given, **{name: of_fields})

        del run.__wrapped__
        made = [field.parameter() for field in fields]
        run.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters] + made
        )
        run.__annotations__ = {each.name: each.annotation for each in [*parameters, *made]}
        return run

    return decorate
