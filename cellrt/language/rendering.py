"""The process that renders a chat template: a template of a checkpoint is code, and may loop for ever.

    python -c "from cellrt.language.rendering import main; main()" DESCRIPTOR

The environment is that of ``transformers``: a sandbox without Python's internals, with ``raise_exception``, ``tojson``
and ``strftime_now``. Memory is bounded here, time by the process that asks.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cellrt.language.chat_template import receive, send
from cellrt.worker.python_process import end_with

MEMORY_BYTES = 1 << 29
"""The limit of this process's address space."""
LONGEST = 1 << 24
"""The most characters of a rendered text."""


class Generation(Extension):
    """The block ``{% generation %}``, which marks an assistant's words for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as its base has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes of the block's content, as ``jinja2`` requires."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates of checkpoints are written for."""
    extensions: list[str | type[Extension]] = [Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _tojson
    made.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return made


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """Return JSON for a model, not for a page: jinja2's own filter escapes ``<``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class Renderer:
    """A template with the given ``source``, which is compiled when it is first rendered."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._template: jinja2.Template | None = None

    def render(self, variables: dict[str, Any]) -> dict[str, str]:
        """Return the ``text`` that the template makes, or the ``error`` that it raises."""
        try:
            if self._template is None:
                self._template = make_environment().from_string(self._source)
            parts, size = [], 0
            for part in self._template.generate(variables):
                parts.append(part)
                if (size := size + len(part)) > LONGEST:
                    return {"error": f"it writes more than {LONGEST} characters"}
            return {"text": "".join(parts)}
        except MemoryError:
            return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except Exception as error:  # it is code, and may raise anything
            return {"error": f"{type(error).__name__}: {error}"[:1000]}


def main() -> None:
    """Serve renderings: send a message when ready, receive the template, then the variables of each text to render."""
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent process handles it
    end_with(lifeline)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(EOFError, BrokenPipeError):  # the parent is gone
        send(lifeline, None)
        renderer = Renderer(receive(lifeline))
        while True:
            send(lifeline, renderer.render(receive(lifeline)))
