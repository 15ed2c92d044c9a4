"""A language model as engines serve it: with weights in the engine's process, without in all others.

An engine's process reads a checkpoint and makes the model of it. Clients and front ends get an outline: the cells'
declarations, the tokenizer and the template. They unfold requests and decode text with that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from cellrt.cells.mamba2 import RecurrentModel
from cellrt.cells.transformer_stack import EncoderDecoder
from cellrt.definition.cell import Cell
from cellrt.definition.outline import cell_of, outline_of
from cellrt.errors import DefinitionError
from cellrt.graph.unfolder import Unfolder
from cellrt.language.bounded import bounded
from cellrt.language.checkpoint import Checkpoint
from cellrt.language.language import Language
from cellrt.language.text import Tokenizer
from cellrt.unfolders import complete, embed, transduce
from cellrt.unfolders.recurrent_completion import complete_recurrent

DTYPE, DTYPES = "CELLRT_DTYPE", ("float32", "bfloat16", "float16", "int8")
"""The environment variable of the dtype in which models of checkpoints compute, and its values."""
MAKER = "cellrt.language.served:from_outline"


@dataclass(frozen=True, repr=False, kw_only=True)
class LanguageUnfolder(Unfolder):
    """A model that engines register. ``language`` is its description without weights."""

    language: Language


def load(path: str, name: str | None = None, dtype: torch.dtype | None = None) -> LanguageUnfolder:
    """Return the model of a checkpoint, a folder or GGUF file, with its weights.

    ``dtype``: see ``read_checkpoint``; None: that of the environment's ``CELLRT_DTYPE``, or float32.

    Raise DefinitionError.
    """
    from cellrt.language.checkpoints import read_checkpoint  # each architecture that is known: not for clients

    return served(read_checkpoint(path, name=name, dtype=dtype_said() if dtype is None else dtype))


def dtype_said() -> torch.dtype | None:
    """Return the dtype that the environment names. Raise DefinitionError for one that no model may have."""
    return dtype_of(os.environ.get(DTYPE, ""), DTYPE)


def dtype_of(said: str, where: str) -> torch.dtype | None:
    """Return the dtype of a name; None for an empty name.

    Raise DefinitionError, naming ``where``, for an unknown one.
    """
    if said and said not in DTYPES:
        raise DefinitionError(f"{where}: expected one of {', '.join(DTYPES)}, got {said!r:.40}")
    return getattr(torch, said) if said else None


def served(checkpoint: Checkpoint) -> LanguageUnfolder:
    """Return the model of a checkpoint that was read. Raise DefinitionError, also for an unreadable tokenizer."""
    language = Language.of(checkpoint)
    if checkpoint.tokenizer is not None:
        Tokenizer(checkpoint.tokenizer)  # an unreadable one is reported now; it is not kept, as front ends have theirs
    made = checkpoint.make(checkpoint.name, **_options(language))
    outline = {"language": language.to_json(), "cells": [outline_of(cell) for cell in made.cells]}
    return _with(made, language, {"maker": MAKER, "value": outline})


def from_outline(value: Mapping[str, Any]) -> LanguageUnfolder:
    """Return the model of an outline: it unfolds requests, and its cells have no weights."""
    language = Language.from_json(value["language"])
    cells = [cell_of(outline) for outline in value["cells"]]
    return _with(_unfolder(language, cells), language, None)


def _unfolder(language: Language, cells: list[Cell]) -> Unfolder:
    options = _options(language)
    if language.kind == "encoder":
        return embed(language.name, *cells)
    if language.kind == "encoder-decoder":
        start = 0 if language.start_token is None else language.start_token
        return transduce(language.name, EncoderDecoder(*cells), start=start, **options)
    if len(cells) == 1:
        return bounded(language.context, complete, language.name, *cells, **options)
    return bounded(language.context, complete_recurrent, language.name, RecurrentModel(*cells), **options)


def _options(language: Language) -> dict[str, Any]:
    """Return the options of ``complete``, ``embed`` or ``transduce``: an answer may be as long as the context."""
    if language.kind == "encoder":
        return {}
    if language.kind == "encoder-decoder":
        return {"max_steps": language.context}
    return {"max_tokens": language.context, "keep": True}


def _with(made: Unfolder, language: Language, outline: Mapping[str, Any] | None) -> LanguageUnfolder:
    given = {each.name: getattr(made, each.name) for each in fields(Unfolder)}
    return LanguageUnfolder(**{**given, "outline": outline}, language=language)
