"""The tokenizer within a GGUF file, converted to a tokenizer.json: byte pairs of GPT-2's kind.

Such a file has the tokens and merges, and the name of how text is split before (llama.cpp's ``tokenizer.ggml.pre``).
Tokenizers of other kinds are left out.
"""

from __future__ import annotations

import json
from typing import Any

from cellrt import DefinitionError

CONTROL, USER_DEFINED = 3, 4
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _split(pattern: str) -> list[dict[str, Any]]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [cut, _bytes(use_regex=False)]


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


CUTS: dict[str, list[dict[str, Any]]] = {
    "default": [_bytes(use_regex=True)],
    "gpt-2": [_bytes(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)],
    "llama-bpe": _split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"),
    "qwen2": _split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"),
}
"""The steps that split a text, by the name of the split."""


def tokenizer_of(where: str, fields: dict[str, Any], vocabulary: int) -> bytes | None:
    """Return a tokenizer.json; None for a tokenizer of another kind.

    Raise DefinitionError for lists that do not fit each other.
    """
    cut = fields.get("tokenizer.ggml.pre", "default")
    if fields.get("tokenizer.ggml.model") != "gpt2" or cut not in CUTS:
        return None
    tokens, merges = _texts(where, fields, "tokens"), _texts(where, fields, "merges")
    kinds = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or len(tokens) > vocabulary:
        raise DefinitionError(f"{where}: expected at most {vocabulary} tokens, each with a type, got {len(tokens)}")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise DefinitionError(f"{where}, tokenizer.ggml.merges: expected pairs")
    added = [
        {"id": number, "content": token, "special": kind == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, (token, kind) in enumerate(zip(tokens, kinds))
        if kind in (CONTROL, USER_DEFINED)
    ]
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": CUTS[cut]},
        "post_processor": _beginning(fields, tokens),
        "decoder": _bytes(use_regex=True),
        "model": _pairs({token: number for number, token in enumerate(tokens)}, pairs, cut == "llama-bpe"),
    }
    return json.dumps(described, ensure_ascii=False).encode()


def _texts(where: str, fields: dict[str, Any], name: str) -> list[str]:
    texts = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DefinitionError(f"{where}, tokenizer.ggml.{name}: expected a list of texts")
    return texts


def _beginning(fields: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Return the post-processor that puts the first token before a text, if the file has one."""
    first = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token") is not True or type(first) is not int or first >= len(tokens):
        return None
    token = {"SpecialToken": {"id": tokens[first], "type_id": 0}}
    pieces = {name: [token, {"Sequence": {"id": name, "type_id": 0}}] for name in "AB"}
    special = {tokens[first]: {"id": tokens[first], "ids": [first], "tokens": [tokens[first]]}}
    return {
        "type": "TemplateProcessing",
        "single": pieces["A"],
        "pair": [*pieces["A"], *pieces["B"]],
        "special_tokens": special,
    }


def _pairs(vocabulary: dict[str, int], pairs: list[list[str]], ignores_merges: bool) -> dict[str, Any]:
    """Return the model of byte pairs.

    With ``ignores_merges`` a piece that is a token stays whole, whatever its merges.
    """
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": ignores_merges}
    none = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return {"type": "BPE", **none, **flags, "vocab": vocabulary, "merges": pairs}
