"""Answers in JSON: masks of the tokens that may follow, computed by the library ``llguidance``."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.errors import RequestError

NEEDED = "response_format: answers of a form need one more package: in a clone pip install '.[grammar]' ({})"
MOST_KEPT = 64
"""The most compiled grammars of a model that are cached."""
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The separators of ``json.dumps``: a model that may put spaces anywhere may put them for ever."""
KINDS = ("text", "json_object", "json_schema")


def schema_of(response_format: Any) -> Mapping[str, Any] | None:
    """Return the schema of OpenAI's ``response_format``; None if any text is allowed. Raise RequestError."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        given = response_format.get("json_schema")
        schema = given.get("schema") if isinstance(given, Mapping) else None
        if isinstance(schema, Mapping):
            return schema
        raise RequestError(f"response_format: expected a schema in json_schema, got {given!r:.80}")
    raise RequestError(f"response_format: expected a type of {', '.join(KINDS)}, got {response_format!r:.80}")


class Grammar:
    """A compiled grammar. Each answer has a mask of its own, which ``begin`` returns. Safe from any thread."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def begin(self) -> GrammarMask:
        """Return the mask of one answer."""
        return GrammarMask(self._matcher.deep_copy(), self._vocabulary)


class GrammarMask:
    """The tokens that may follow in one answer.

    Raises RequestError where the library gives up, as it bounds its own work.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary, self._read = matcher, vocabulary, 0

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return bool ``[vocabulary]``, given all tokens so far."""
        for token in tokens[self._read :]:
            self._matcher.consume_token(token)
        self._read = len(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestError(f"response_format: {self._matcher.get_error():.400}")
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].view(np.bool_)


class Grammars:
    """The grammars of one model. Safe from any thread.

    Args:
        tokenizer_json: the content of the model's tokenizer.json.
        vocabulary: the vocabulary of the model, which may have more tokens than its tokenizer.
        end_tokens: one of them ends an answer.

    Raises RequestError where the library is not installed, or cannot use the tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, vocabulary: int, end_tokens: Sequence[int]) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise RequestError(NEEDED.format(error)) from error
        if not end_tokens:
            raise RequestError("response_format: the model has no token that ends an answer")
        try:
            slices = LLTokenizer.json_slices()
            self._tokenizer = LLTokenizer(
                tokenizer_json.decode(), n_vocab=vocabulary, eos_token=list(end_tokens), slices=slices
            )
        except Exception as error:  # the library has no class of its own
            raise RequestError(f"response_format: llguidance cannot use the tokenizer: {error}") from error
        self._matcher, self._vocabulary = LLMatcher, vocabulary
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of a JSON schema. Raise RequestError for one that the library does not support."""
        try:
            written = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"response_format: expected a schema as JSON has it: {error}") from error
        with self._lock:
            if written in self._kept:
                self._kept.move_to_end(written)
                return self._kept[written]
        try:
            grammar = self._matcher.grammar_from_json_schema(written, overrides=AS_WRITTEN)
        except ValueError as error:
            raise RequestError(f"response_format: {error}") from error
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"response_format: {matcher.get_error():.400}")
        made = Grammar(matcher, self._vocabulary)
        with self._lock:
            self._kept[written] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made
