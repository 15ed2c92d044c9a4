"""A small language model without sense, made as a checkpoint is: a tokenizer of bytes, a template, random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cellrt.cells import Llama, LlamaSizes, StackSizes, TransformerStack, language_model, sentence_encoder
from cellrt.cells.mamba2 import Mamba2, Mamba2Sizes, recurrent_language_model
from cellrt.graph.unfolder import Unfolder
from cellrt.language.checkpoint import Checkpoint
from cellrt.unfolders import complete, embed
from cellrt.unfolders.recurrent_completion import complete_recurrent

CONTEXT = 400
TEMPLATE = """\
{%- for message in messages -%}
<|start|>{{ message.role }}: {{ message.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant:{%- endif -%}
"""
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ã", "©"), ("hell", "o")]
SPECIAL = ["<|end|>", "<|start|>"]


@cache
def tokenizer_json() -> bytes:
    """Every byte is a token, some texts are one more, and two are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *("".join(pair) for pair in MERGES)]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return made.to_str().encode()


def vocabulary() -> int:
    return 256 + len(MERGES) + len(SPECIAL)


END = 256 + len(MERGES)


def checkpoint(name: str = "tiny", **fields: Any) -> Checkpoint:
    """A decoder's."""

    def make(name: str, **options: Any) -> Unfolder:
        torch.manual_seed(5)
        llama = Llama(LlamaSizes(vocabulary=vocabulary(), hidden=32, inner=64, layers=2, heads=4, kv_heads=2))
        return complete(name, language_model(llama, END, sampling=True), **options)

    return _checkpoint(name, "decoder", make, **fields)


def recurrent(name: str = "recurrent") -> Checkpoint:
    """A decoder's with a state of fixed size."""

    def make(name: str, **options: Any) -> Unfolder:
        torch.manual_seed(7)
        sizes = Mamba2Sizes(vocabulary=vocabulary(), hidden=24, layers=2, heads=6, head_dim=8, state=5, groups=2)
        cells = recurrent_language_model(Mamba2(sizes), END, sampling=True)
        return complete_recurrent(name, cells, **options)

    return _checkpoint(name, "decoder", make)


def embedder(name: str = "embedder") -> Checkpoint:
    """An encoder's."""

    def make(name: str) -> Unfolder:
        torch.manual_seed(6)
        sizes = StackSizes(vocabulary=vocabulary(), positions=64, hidden=32, inner=64, layers=2, heads=4)
        return embed(name, sentence_encoder(TransformerStack(sizes)))

    return _checkpoint(name, "encoder", make, context=64)


def _checkpoint(name: str, kind: Any, make: Callable[..., Unfolder], **fields: Any) -> Checkpoint:
    given = {
        "name": name,
        "kind": kind,
        "architecture": "llama",
        "vocabulary": vocabulary(),
        "context": CONTEXT,
        "end_tokens": (END,),
        "start_token": None,
        "make": make,
        "tokenizer": tokenizer_json(),
        "chat_template": TEMPLATE,
        "special_tokens": {"eos_token": "<|end|>"},
        "generation": {},
        "num_bytes": 0,
    }
    return Checkpoint(**{**given, **fields})
