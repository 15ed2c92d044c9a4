"""A language model in Python: texts that go on, conversations, embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any, Self, overload

import torch

from cellrt.engine.engine import Engine
from cellrt.engine.stream import Stream
from cellrt.errors import DefinitionError, RequestError
from cellrt.language.answers import Answer, TextStream
from cellrt.language.conversation import Conversation
from cellrt.language.language import Language
from cellrt.language.options import Options
from cellrt.language.served import LanguageUnfolder, load as load_checkpoint
from cellrt.process.client import Client

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
DEFAULT_TOKENS = 256
"""The most tokens of an answer by ``generate``, where nothing is said."""


def load(
    path: str | PathLike[str], *, name: str | None = None, engine: Engine | Client | None = None, **options: Any
) -> LanguageModel:
    """Return the language model of a checkpoint: a folder as Hugging Face has them, or a GGUF file.

    Args:
        path: of the folder or file.
        name: of the model in the engine; default: that of the folder or file.
        engine: that serves it, beside others; a client's reads the checkpoint there. Default: one of its own, which
            ends with the model.
        options: as of ``Engine``, for one of its own.

    Raises DefinitionError for what is no checkpoint, or none of an architecture that is known.
    """
    if engine is not None and options:
        raise DefinitionError(f"load: {sorted(options)} are options of an engine of its own, but there is engine=")
    if isinstance(engine, Client):
        from cellrt.process.named import source_of

        source = source_of(fspath(path) if name is None else f"{fspath(path)}:{name}")
        engine.register(source)
        return LanguageModel(_unfolder_of(engine, source.rpartition(":")[2]), engine, is_registered=True)
    made = load_checkpoint(fspath(path), name)
    return LanguageModel(made, engine, **options)


def _unfolder_of(client: Client, name: str) -> LanguageUnfolder:
    found = client.binding(name).unfolder
    if not isinstance(found, LanguageUnfolder):
        raise DefinitionError(f"model {name!r} is no language model")
    return found


class LanguageModel:
    """A language model that an engine serves. Safe from any thread and from asyncio, as the engine is.

    Args:
        unfolder: as ``cellrt.language.served`` makes it.
        engine: that serves it; None: one of its own, which ends with this.
        is_registered: whether the engine has it already.
        options: as of ``Engine``, for one of its own.

    Attributes:
        engine: where requests go.
        language: tokenizer, template and sizes.

    Options of answers are those of ``Options``: ``max_tokens``, ``stop``, ``temperature``, ``top_k``, ``top_p``,
    ``seed`` and others. Requests of this model that are at work at one time are batched, whoever made them.
    """

    def __init__(
        self,
        unfolder: LanguageUnfolder,
        engine: Engine | Client | None = None,
        *,
        is_registered: bool = False,
        **options: Any,
    ) -> None:
        self._is_own = engine is None
        self.language: Language = unfolder.language
        self.engine = Engine(**options) if engine is None else engine
        try:
            if not is_registered and isinstance(self.engine, Engine):
                self.engine.register(unfolder)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.language.kind})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Of the model in the engine."""
        return self.language.name

    def close(self) -> None:
        """End the engine if it is the model's own; another goes on with the model."""
        if self._is_own:
            self.engine.close()

    def conversation(self) -> Conversation:
        """Return what keeps what the model has read, for prompts that begin with what was said before.

        It changes no answer, only what it costs. Close it, or leave it by ``with``. Raises RequestError for a model that
        keeps nothing, OverloadError.
        """
        return Conversation(lambda: self.engine.session(self.name))

    def stream(
        self,
        prompt: Prompt,
        *,
        session: Conversation | None = None,
        deadline: float | None = None,
        priority: int = 1,
        max_unread: int | None = None,
        **options: Any,
    ) -> TextStream:
        """Submit a prompt; return the answer as it is made, for ``for`` or ``async for``.

        Args:
            prompt: a text, or its tokens.
            session: a conversation that has read the beginning of the prompt, perhaps: see ``conversation``.
            deadline, priority, max_unread: as of ``Engine.stream``.
            options: see the class.

        Raises RequestError for what cannot be answered so, and what ``Engine.stream`` raises.
        """
        tokens, how = self.language.tokens_of(prompt), options_of(options, DEFAULT_TOKENS)
        return self._stream(tokens, how, 0, session, deadline, priority, max_unread)

    @overload
    def generate(self, prompt: Prompt, *, n: None = None, **options: Any) -> Answer: ...

    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Any) -> list[Answer]: ...

    def generate(self, prompt: Prompt, *, n: int | None = None, **options: Any) -> Answer | list[Answer]:
        """Return the answer to a prompt: what follows the text. With ``n`` a list of so many.

        As ``stream``; not in a future's callback.
        """
        return _whole(self._streams(self.language.tokens_of(prompt), n, DEFAULT_TOKENS, options), n)

    async def agenerate(self, prompt: Prompt, *, n: int | None = None, **options: Any) -> Answer | list[Answer]:
        """As ``generate``; cancelling the task gives the answers up."""
        tokens = await asyncio.to_thread(self.language.tokens_of, prompt)
        return await _whole_async(self._streams(tokens, n, DEFAULT_TOKENS, options), n)

    def stream_chat(
        self, messages: Messages, *, template: Mapping[str, Any] | None = None, **options: Any
    ) -> TextStream:
        """Submit a conversation; return the assistant's answer as it is made.

        Args:
            messages: dicts of ``role`` and ``content``, all that was said so far.
            template: what the checkpoint's template knows beside them, such as ``enable_thinking``.
            options: as of ``stream``; without ``max_tokens`` an answer may fill the context.
        """
        tokens = self.language.tokens_of_chat(messages, **(template or {}))
        return self.stream(tokens, **{"max_tokens": None, **options})

    def chat(
        self, messages: Messages, *, n: int | None = None, template: Mapping[str, Any] | None = None, **options: Any
    ) -> Answer | list[Answer]:
        """Return the assistant's answer to a conversation: as ``stream_chat`` and ``generate``."""
        tokens = self.language.tokens_of_chat(messages, **(template or {}))
        return _whole(self._streams(tokens, n, None, options), n)

    async def achat(
        self, messages: Messages, *, n: int | None = None, template: Mapping[str, Any] | None = None, **options: Any
    ) -> Answer | list[Answer]:
        """As ``chat``; cancelling the task gives the answers up."""
        tokens = await asyncio.to_thread(self.language.tokens_of_chat, messages, **(template or {}))
        return await _whole_async(self._streams(tokens, n, None, options), n)

    def embed(self, texts: Sequence[Prompt], *, deadline: float | None = None, priority: int = 1) -> torch.Tensor:
        """Return the embeddings of texts, float32 ``[texts, hidden]``, each of length 1.

        Raises RequestError for a model that makes none, and for a text of more tokens than its context.
        """
        requests = [self.language.sentence(text) for text in _listed(texts)]
        results = self.engine.submit_many(self.name, requests, deadline=deadline, priority=priority).results()
        return torch.stack([result["embedding"] for result in results])

    async def aembed(
        self, texts: Sequence[Prompt], *, deadline: float | None = None, priority: int = 1
    ) -> torch.Tensor:
        """As ``embed``."""
        requests = await asyncio.to_thread(lambda: [self.language.sentence(text) for text in _listed(texts)])
        results = await self.engine.submit_many(self.name, requests, deadline=deadline, priority=priority)
        return torch.stack([result["embedding"] for result in results])

    def _streams(
        self, tokens: Sequence[int], n: int | None, default: int | None, options: dict[str, Any]
    ) -> list[TextStream]:
        """Submit a prompt for so many answers."""
        if n is not None and (not isinstance(n, int) or n < 1):
            raise RequestError(f"n: expected a number of answers, got {n!r}")
        rest = dict(options)
        how = [rest.pop(name, usual) for name, usual in HOW.items()]
        chosen = options_of(rest, default)
        made: list[TextStream] = []
        try:
            for number in range(n or 1):
                made.append(self._stream(tokens, chosen, number, *how, None))
        except BaseException:
            for stream in made:
                stream.close()
            raise
        return made

    def _stream(
        self,
        tokens: Sequence[int],
        options: Options,
        number: int,
        conversation: Conversation | None,
        deadline: float | None,
        priority: int,
        max_unread: int | None,
    ) -> TextStream:
        room = self.language.room_for(tokens)

        def start(rest: Sequence[int], within: Conversation | None) -> Stream:
            request = options.request(self.language, rest, room, number)
            how: Any = {"deadline": deadline, "priority": priority, "max_unread": max_unread}
            if within is not None:
                stream: Stream = within.session.stream(request, **how)
                return stream
            return self.engine.stream(self.name, request, **how)

        return TextStream(start, self.language, options, tokens, conversation)


HOW: Mapping[str, Any] = {"session": None, "deadline": None, "priority": 1}
"""What is said of an answer beside its ``Options``, and what holds otherwise."""


def options_of(given: dict[str, Any], default: int | None) -> Options:
    """Return options of an answer, of so many tokens by default. Raises RequestError for one that is none."""
    try:
        return Options(**{"max_tokens": default, **given})
    except TypeError:
        known = sorted(Options.__dataclass_fields__)
        raise RequestError(f"unknown are {sorted(given.keys() - set(known))}; options of an answer are {known}") from None


def _listed(texts: Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(texts, str):
        raise RequestError("embed: expected a list of texts, got one text")
    return texts


def _whole(streams: Sequence[TextStream], n: int | None) -> Any:
    """Return the answers of streams, or the one."""
    try:
        answers = [stream.answer(stream) for stream in streams]
    finally:
        for stream in streams:
            stream.close()
    return answers[0] if n is None else answers


async def _whole_async(streams: Sequence[TextStream], n: int | None) -> Any:
    try:
        answers = [stream.answer([piece async for piece in stream]) for stream in streams]
    finally:
        for stream in streams:
            stream.close()
    return answers[0] if n is None else answers
