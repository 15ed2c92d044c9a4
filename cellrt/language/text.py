"""Conversion between text and tokens. A stream of tokens becomes text in whole characters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

from cellrt.errors import DefinitionError, RequestError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder writes for bytes that are no character, or only the beginning of one."""
MOST_HELD = 24
"""The most tokens that are held back to wait for the rest of a character.

A character has at most four bytes, so it never takes more tokens. If it is not whole after so many, its bytes are
invalid and are shown as REPLACEMENT.
"""
UNSURE = 3
"""The number of REPLACEMENT characters at the end of a text that are held back, as the next token may change them."""
LONG = 1 << 16
"""The number of characters above which a text is long."""
NEEDED = "language models need more packages: in a clone pip install '.[lm]' ({})"


@contextmanager
def _request_errors(what: str) -> Iterator[None]:
    """Raise RequestError for any error of the library, which has no error class of its own.

    It panics if a checkpoint's regular expression backtracks for too long.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"{what}: the tokenizer gives up: {error}") from None


class Tokenizer:
    """A tokenizer of the library ``tokenizers``; safe from any thread.

    Args:
        content: the content of a tokenizer.json.

    Raises DefinitionError for invalid content, or where the library is not installed.
    """

    def __init__(self, content: bytes) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DefinitionError(NEEDED.format(error)) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library has no error class of its own
            raise DefinitionError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()  # a text that is too long is refused, not cut
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, what in added.items() if what.special)
        self._long_text_lock = threading.Lock()

    @cached_property
    def longest(self) -> int:
        """The length of the longest token, in bytes."""
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def is_text(self, token: int) -> bool:
        """Return whether a token is text: not a special token, nor a number that only the model has."""
        return token not in self._special and self._tokenizer.id_to_token(token) is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text.

        ``add_special_tokens``: with the special tokens that begin and end a text; False if the text has them already.

        Long texts are encoded one at a time, as the library takes hundreds of bytes of memory for each character.

        Raises RequestError if the text cannot be encoded in UTF-8, because of half a surrogate pair, or if the
        tokenizer gives up.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"text: expected whole characters, got {error.object[error.start]!r}") from None
        with self._long_text_lock if len(text) > LONG else nullcontext(), _request_errors("text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens. Raise RequestError if the tokenizer gives up."""
        with _request_errors("tokens"):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def name_of(self, token: int) -> tuple[str, bool]:
        """Return the text of a single token, and True.

        If the token is only a part of a character, return its name in the tokenizer, and False.
        """
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        if text and REPLACEMENT not in text:
            return text, True
        return self._tokenizer.id_to_token(token) or f"token_id:{token}", False


class Detokenizer:
    """A decoder of tokens that come one by one. All pieces together are the text of all tokens.

    If several tokens make one character, it comes with the last of them. The text of a token may depend on the token
    before it, as a space between words does. So the tokens of the last piece are decoded again with those of the next.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """The tokens of the last piece, and those that are held back."""
        self._held = 0
        self._sent = 0
        """The number of characters of the window's text that have been returned."""

    def feed(self, token: int) -> str:
        """Take a token; return the characters that it completes."""
        if not self._tokenizer.is_text(token):
            return ""
        self._window.append(token)
        self._held += 1
        text, unsure = self._tokenizer.decode(self._window), 0
        if text.endswith(REPLACEMENT):
            if self._held < MOST_HELD:
                return ""
            unsure = UNSURE
        piece = text[self._sent : max(self._sent, len(text) - unsure)]
        if piece:
            self._window, self._held = self._window[-self._held :], 0
            self._sent = len(self._tokenizer.decode(self._window)) - unsure
        return piece

    def end(self) -> str:
        """Return the text that was held back, whole or not."""
        text = self._tokenizer.decode(self._window)[self._sent :]
        self._window, self._held, self._sent = [], 0, 0
        return text
