"""The values that a front and a replica exchange: HTTP requests and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cellrt.errors import EngineClosedError, RequestError
from cellrt.serve.oip import HEADER_LENGTH

Headers = Sequence[tuple[bytes, bytes]]


class Call(NamedTuple):
    """A request. Names of headers are in lower case. ``id`` stays the same when the request is tried again."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    id: str = ""

    @property
    def is_inference(self) -> bool:
        """True if the call asks for a model's results."""
        return self.method == "POST" and self.path.rpartition("/")[2] in _INFERENCE_VERBS

    @property
    def is_stream(self) -> bool:
        """True if the answer is a stream, whose parts are sent one by one."""
        if self.path.endswith("/generate_stream"):
            return True
        return self.path.startswith("/v1/") and self.is_inference and self._peek().stream is True

    @property
    def changes_models(self) -> bool:
        """True if the call loads or unloads a model."""
        return self.path.startswith("/v2/repository/models/")

    @property
    def session(self) -> str:
        """The key of the request's session (``key_of``); empty if it has none.

        The key decides which replica is asked. A request that cannot be decoded has no session; the replica then
        reports what is wrong. Raise RecursionError if the body is nested deeper than Python can decode.
        """
        if not self.is_inference:
            return ""
        peek = self._peek()
        id = peek.session if self.path.startswith("/v1/") else peek.parameters.get("sequence_id")
        return key_of(self.path.split("/")[3], str(id)) if id not in (None, 0, "") else ""

    def _peek(self) -> _Peek:
        size = dict(self.headers).get(HEADER_LENGTH.encode(), b"")
        body = self.body[: int(size)] if size.isdigit() else self.body
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _Peek()


NOT_BEGUN = b"x-cellrt-not-begun", b"1"
"""A header of answers: the replica has done nothing for the request, as it has no engine now or is about to leave."""
UNAVAILABLE = 503


class Answer(NamedTuple):
    """An answer, or only its head if the body follows in parts."""

    status: int
    headers: Headers
    body: bytes = b""

    @property
    def is_begun(self) -> bool:
        """True if the replica may have run some of the request."""
        return NOT_BEGUN not in self.headers

    @property
    def is_death(self) -> bool:
        """True if a worker or an engine's process died with the request; False if the replica only refused it."""
        if self.status != UNAVAILABLE or not self.is_begun:
            return False
        try:
            return msgspec.json.decode(self.body, type=_Error).type != EngineClosedError.__name__
        except (msgspec.DecodeError, UnicodeDecodeError):
            return True


class _Error(msgspec.Struct):
    type: str = ""


class _Peek(msgspec.Struct):
    session: Any = None
    stream: Any = False
    parameters: dict[str, Any] = {}


_INFERENCE_VERBS = ("infer", "generate", "generate_stream")
_decoder = msgspec.json.Decoder(_Peek)


def key_of(model: str, id: str) -> str:
    """Return the key of a session, which is the same at all replicas."""
    return f"{model}/{id}"


def parts_of(key: str) -> tuple[str, str]:
    """Return the model and id of a session. Raise RequestError if it is not the key of one."""
    model, slash, id = key.partition("/")
    if not slash:
        raise RequestError(f"expected model/id, got {key!r:.80}")
    return model, id
