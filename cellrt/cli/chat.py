"""``cellrt chat``: a conversation with a language model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cellrt.cli.dtypes import DTypeOption
from cellrt.cli.serve import workers_of
from cellrt.cli.shown import failing_well

if TYPE_CHECKING:
    from cellrt.language.conversation import Conversation
    from cellrt.language.model import LanguageModel

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def chat(
    path: Annotated[Path, typer.Argument(help="The checkpoint: a folder as Hugging Face has them, or a GGUF file.")],
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of an answer. Default: what the context has room for.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0: the likeliest tokens; else they are drawn. Default: as the checkpoint says."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same one draws the same tokens.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu:1, or a GPU, such as cuda:0.")] = "cpu:1",
    dtype: DTypeOption = None,
) -> None:
    """Talk with a language model. Answers come as they are made; Ctrl-C stops one, Ctrl-D ends."""
    workers = workers_of(device)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with failing_well():
        import cellrt

        chosen = None if dtype is None else dtype.value
        model = cellrt.load(path, dtype=chosen, workers=list(workers) if isinstance(workers, tuple) else workers)
        keeps = model.language.kind == "decoder"  # else nothing is kept, and all is read each time
        with model, model.conversation() if keeps else nullcontext() as session:
            if model.language.chat_template is None:
                typer.echo("The checkpoint has no chat template, so the model goes on with your text.", err=True)
            said: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
            for text in _typed():
                said.append({"role": "user", "content": text})
                said.append({"role": "assistant", "content": _answer(model, session, said, options)})


def _typed() -> Iterator[str]:
    """Yield the typed lines up to the end of input, without empty ones."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if text.strip():
            yield text


def _answer(
    model: LanguageModel, session: Conversation | None, said: list[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """Show the answer as it is made; return what there is of it. A model without a template goes on with the text."""
    pieces: list[str] = []
    has_template = model.language.chat_template is not None
    start = model.stream_chat(said, session=session, **options) if has_template else None
    with start or model.stream(said[-1]["content"], session=session, **options) as stream:
        try:
            for piece in stream:
                pieces.append(piece.text)
                typer.echo(_shown(piece.text), nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
    typer.echo()
    return "".join(pieces)


def _shown(text: str) -> str:
    """Return a text for a terminal, which would take some characters for commands."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else REPLACEMENT for letter in text)
