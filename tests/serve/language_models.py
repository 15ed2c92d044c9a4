"""Language models without sense, for the doors of OpenAI's protocol."""

from __future__ import annotations

from cellrt.language.served import LanguageUnfolder, served
from tests.language import tiny


def decoder() -> LanguageUnfolder:
    return served(tiny.checkpoint())


def recurrent() -> LanguageUnfolder:
    return served(tiny.recurrent())


def encoder() -> LanguageUnfolder:
    return served(tiny.embedder())
