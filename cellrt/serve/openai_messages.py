"""The messages of OpenAI's protocol: parsing of requests, writing of answers and errors.

This module uses no socket and no engine. Unknown fields are ignored, as clients of other servers send them. Known ones
of a wrong type, and unsupported ones that would change an answer, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from cellrt.errors import RequestError, UnknownModelError, http_status
from cellrt.language.beams import HowSearched
from cellrt.language.options import Options
from cellrt.serve import oip
from cellrt.serve.server_settings import Limits

MOST_ANSWERS = 128
"""To one request: of all its prompts."""
MOST_INPUTS = 2048
"""Texts that one request has embedded, as OpenAI has it."""
MOST_LIKELIEST = 20
COMPLETION_TOKENS = 16
"""The most tokens of a completion by default; a chat's answer may fill the context."""

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)]
Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Priority = Annotated[int, msgspec.Meta(ge=0, le=3)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=oip.LONGEST_ID)]
Likeliest = Annotated[int, msgspec.Meta(ge=0, le=MOST_LIKELIEST)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
TokenNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer. ``include_usage``: whether a last piece has the counts of tokens."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The format of an answer: text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class HowAnswered(msgspec.Struct, kw_only=True):
    """The fields that completions and chats have in common."""

    model: str
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Length | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Probability | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Seed | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenNumber] | None = None
    priority: Priority | None = None
    """A priority from 0, the lowest, to 3, the highest."""
    deadline_s: Seconds | None = None
    """The seconds from now within which it must be done."""
    schedule_by_s: Seconds | None = None
    """The seconds from now within which it must have begun."""
    session_id: Name | None = None
    """The conversation, whose repeated prompts are not read again."""
    use_beam_search: bool | None = None
    """True: the ``n`` answers are the best that a search finds."""
    best_of: Count | None = None
    """The width of a search; by default ``n``."""
    length_penalty: float | None = None
    early_stopping: bool | None = None


class CompletionRequest(HowAnswered, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | TokenNumber | list[TokenNumber]]
    logprobs: Likeliest | None = None
    echo: bool | None = None
    suffix: str | None = None


class Message(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ChatRequest(HowAnswered, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of ``/v1/embeddings``."""

    model: str
    input: str | list[str | TokenNumber | list[TokenNumber]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: Priority | None = None
    deadline_s: Seconds | None = None
    schedule_by_s: Seconds | None = None


class WrongFieldError(RequestError):
    """A field of a request is wrong. ``param``: its name."""

    def __init__(self, param: str, what: str) -> None:
        super().__init__(f"{param}: {what}")
        self.param = param


_FIELD = re.compile(r" - at `\$\.(\w+)")


def read(body: bytes, decoder: msgspec.json.Decoder[Any], limits: Limits) -> Any:
    """Return a parsed request. Raise RequestError."""
    try:
        return oip.decode(body, decoder, limits)
    except RequestError as error:
        if found := _FIELD.search(str(error)):
            raise WrongFieldError(found[1], str(error)) from None
        raise


def check_known(request: HowAnswered) -> None:
    """Raise WrongFieldError for unsupported fields that would change an answer."""
    if getattr(request, "tools", None):
        raise WrongFieldError("tools", "not supported: answers are text")
    if getattr(request, "echo", None):
        raise WrongFieldError("echo", "not supported: a completion is what follows the prompt")
    if getattr(request, "suffix", None):
        raise WrongFieldError("suffix", "not supported: a completion follows the prompt")
    if request.use_beam_search:
        if request.stream:
            raise WrongFieldError("stream", "not supported with use_beam_search: the best answer is known at its end")
    elif request.best_of not in (None, request.n or 1):
        raise WrongFieldError("best_of", "not supported without use_beam_search: n answers are made, and all are given")


def options_of(request: HowAnswered, max_tokens: int | None, likeliest: int) -> Options:
    """Return the options of the answers to a request. Raise WrongFieldError."""
    stop = request.stop or ()
    return Options(
        max_tokens=max_tokens,
        stop=[stop] if isinstance(stop, str) else stop,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_bias_of(request.logit_bias),
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_tokens=request.stop_token_ids or [],
        seed=request.seed,
        logprobs=likeliest,
        response_format=None if request.response_format is None else msgspec.to_builtins(request.response_format),
    )


def how_searched(request: HowAnswered) -> HowSearched:
    """Return how the answers of a request with ``use_beam_search`` are searched for."""
    count = request.n or 1
    return HowSearched(
        count if request.best_of is None else request.best_of,
        1.0 if request.length_penalty is None else request.length_penalty,
        bool(request.early_stopping),
        count,
    )


def of_search(request: HowAnswered, error: RequestError) -> RequestError:
    """Return an error of a search, under the name that the field has here."""
    field, _, what = str(error).partition(": ")
    if field == "num_beams":
        is_number = what.startswith("expected at ")
        name = "use_beam_search" if not is_number else "n" if request.best_of is None else "best_of"
        return WrongFieldError(name, what)
    return WrongFieldError(field, what) if field in ("length_penalty", "response_format") else error


def _bias_of(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if not all(token.isdecimal() and len(token) <= oip.MOST_DIGITS for token in given):
        raise WrongFieldError("logit_bias", f"expected tokens by their numbers, got {list(given)!r:.80}")
    return {int(token): bias for token, bias in given.items()}


def prompts_of(given: Any, field: str, most: int = MOST_ANSWERS) -> list[str | list[int]]:
    """Return the prompts, or inputs, of a request: one or several texts, or lists of tokens. Raises WrongFieldError."""
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return [given]
    if len(kinds) != 1 or len(given) > most:
        raise WrongFieldError(
            field, f"expected a text, tokens, or a list of 1 to {most} texts or of as many lists of tokens"
        )
    return list(given)


def as_template_has(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, with parts of text joined. Raise WrongFieldError."""
    return [
        {
            "role": message.role,
            "content": _text_of(message.content),
            **({} if message.name is None else {"name": message.name}),
        }
        for message in messages
    ]


def _text_of(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise WrongFieldError("messages", "expected content as a text, or as parts of type text")
    return "".join(map(str, texts))


def error_json(error: BaseException) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    status = http_status(error)
    kind, code = "invalid_request_error", None
    if isinstance(error, UnknownModelError):
        code = "model_not_found"
    elif status == 429:
        kind = code = "rate_limit_exceeded"
    elif status >= 499:
        kind = "server_error"
    param = error.param if isinstance(error, WrongFieldError) else None
    message = str(error) or type(error).__name__
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
