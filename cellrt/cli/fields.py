"""Options of a command that come from the fields of records: their names, types, bounds and help are said once, there.

A field ``page_bytes`` is the option ``--page-bytes``; a field of a record within, as ``max_wait_s`` of ``scheduler``,
``--scheduler-max-wait-s``. The environment and a TOML file have the same names; the file may have a table for a record
within, ``[scheduler]``. What is not given is as the record has it.
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
"""The largest numbers that are taken, and the longest times."""
MAY_BE_ZERO = ("loops_ahead", "max_resident")
"""Numbers that mean something as 0."""


class Field(NamedTuple):
    """A field that is an option: the record that it is in, empty for the outermost, its name, type and help."""

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
    """Return the fields of a dataclass whose fields have defaults, and of those within, but for some by the names of
    their options.
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
    """Return the record, with what is given by names of options; None: as it has it. Raises what the record raises."""
    parts = {}
    for name, kind in get_type_hints(record).items():
        option = f"{table}_{name}" if table else name
        if dataclasses.is_dataclass(kind):
            parts[name] = made_of(kind, given, name)  # type: ignore[arg-type]
        elif given.get(option) is not None:
            parts[name] = given[option]
    return record(**parts)


def with_fields(fields: list[Field], name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take options of fields; it gets them all in the argument of that name."""

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
