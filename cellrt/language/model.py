"""Language models in Python: completion of texts, conversations, embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from os import PathLike, fspath
from typing import Any, Self

import torch

from cellrt.engine.due import due
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError, RequestError
from cellrt.language.answers import Answer, Steps, TextStream
from cellrt.language.beams import HowSearched, SearchedBeams, searched
from cellrt.language.branches import Branch, Branches, are_worth_it
from cellrt.language.conversation import Conversation
from cellrt.language.language import Language
from cellrt.language.masks import MaskedSteps
from cellrt.language.options import Options
from cellrt.language.served import LanguageUnfolder, dtype_of
from cellrt.language.served import load as load_checkpoint
from cellrt.numbers import as_integer
from cellrt.process.client import Client

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
OF_REQUEST = ("session", "deadline", "schedule_by", "priority", "max_unread")
"""Options of the request, not of the answer."""
DEFAULT_TOKENS = 256
"""The most tokens of an answer of ``generate`` by default."""


def load(
    path: str | PathLike[str],
    *,
    name: str | None = None,
    dtype: torch.dtype | str | None = None,
    engine: Engine | Client | None = None,
    **options: Any,
) -> LanguageModel:
    """Return the language model of a checkpoint: a folder in the format of Hugging Face, or a GGUF file.

    Args:
        path: the path of the folder or file.
        name: the name of the model in the engine; default: that of the folder or file.
        dtype: in which it computes: float32, bfloat16, float16, or int8 for the weights of linear layers; also as a
            text. None: that of the environment's ``CELLRT_DTYPE``, or float32.
        engine: that serves it, beside others; a client's reads the checkpoint there. Default: one of its own, which
            ends with the model.
        options: see ``Engine``, for one of its own.

    Raise DefinitionError for a path that is no checkpoint, and for an unknown architecture.
    """
    if engine is not None and options:
        raise DefinitionError(f"load: {sorted(options)} are options of an engine of its own, but there is engine=")
    if isinstance(engine, Client):
        if dtype is not None:
            raise DefinitionError("load: the process of the engine chooses the dtype: CELLRT_DTYPE in its environment")
        from cellrt.process.model_names import source_of

        source = source_of(fspath(path) if name is None else f"{fspath(path)}:{name}")
        engine.register(source)
        return LanguageModel(_unfolder_of(engine, source.rpartition(":")[2]), engine, is_registered=True)
    made = load_checkpoint(fspath(path), name, dtype_of(dtype, "dtype") if isinstance(dtype, str) else dtype)
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
        engine: the engine that serves it; None: one of its own, which is closed with the model.
        is_registered: whether the engine has it already.
        options: see ``Engine``, for one of its own.

    Attributes:
        engine: where requests go.
        language: tokenizer, template and sizes.

    Options of answers are those of ``Options``: ``max_tokens``, ``stop``, ``temperature``, ``top_k``, ``top_p``,
    ``seed`` and others. Concurrent requests of this model are batched, from any number of clients.
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
        """The model's name in the engine."""
        return self.language.name

    def close(self) -> None:
        """Close the engine if it is the model's own; another engine keeps the model."""
        if self._is_own:
            self.engine.close()

    def conversation(self) -> Conversation:
        """Return a cache of what the model has read, for prompts that begin with the turns before.

        It changes no answer, only what it costs. Close it, or use ``with``. Raise OverloadError, and RequestError for a
        model
        that keeps no state.
        """
        return Conversation(lambda: self.engine.session(self.name))

    def stream(self, prompt: Prompt, **options: Any) -> TextStream:
        """Submit a prompt; return the answer as it is generated, for ``for`` or ``async for``.

        Args:
            prompt: a text, or its tokens.
            options: those of ``Options``, where ``max_tokens`` is 256 unless it is given; ``deadline``,
                ``schedule_by``, ``priority`` and ``max_unread`` of ``Engine.stream``; and ``session``: a conversation
                (from ``conversation``) that may have read the beginning of the prompt.

        Raise RequestError for an invalid prompt or option, and what ``Engine.stream`` raises.
        """
        return self._stream(self.language.tokens_of(prompt), 0, **options)

    def generate(self, prompt: Prompt, *, num_beams: int = 1, **options: Any) -> Answer:
        """Return the answer to a prompt: the text that follows it. ``stream`` describes the options.

        Args:
            prompt: a text, or its tokens.
            num_beams: more than 1: the likeliest answer that a beam search of this width finds, equal to
                ``transformers`` with ``do_sample=False``.
            options: those of ``stream``. With beams the only options of an answer are ``max_tokens``, ``stop_tokens``
                and ``ignore_eos``. There are two more: ``length_penalty`` (1.0) prefers longer answers above 0 and
                shorter ones below; ``early_stopping`` (False) says whether to end with the first ``num_beams`` answers
                that end.

        Raise RequestError also for beams of a model that is no decoder.
        """
        if num_beams != 1:
            return self._beams(self.language.tokens_of(prompt), 1, num_beams, options).run()[0]
        with self.stream(prompt, **options) as stream:
            return stream.answer(stream)

    async def agenerate(self, prompt: Prompt, *, num_beams: int = 1, **options: Any) -> Answer:
        """Return the answer to a prompt, like ``generate``. Cancelling the task cancels the answer."""
        if num_beams != 1:
            tokens = await asyncio.to_thread(self._tokens_of, prompt)
            return (await self._beams(tokens, 1, num_beams, options).arun())[0]
        tokens, options = await asyncio.to_thread(self._prepared, prompt, options)
        with self.stream(tokens, **options) as stream:
            return stream.answer([piece async for piece in stream])

    def stream_chat(self, messages: Messages, **options: Any) -> TextStream:
        """Submit a conversation; return the assistant's answer as it is generated.

        Args:
            messages: dicts of ``role`` and ``content``: all turns so far.
            options: see ``stream``; without ``max_tokens`` an answer may fill the context. And ``template``: a dict
                of the template's variables beside the messages, such as ``enable_thinking``.
        """
        tokens = self.language.tokens_of_chat(messages, **options.pop("template", {}))
        return self.stream(tokens, **{"max_tokens": None, **options})

    def chat(self, messages: Messages, **options: Any) -> Answer:
        """Return the assistant's answer to a conversation. ``stream_chat`` describes the options."""
        with self.stream_chat(messages, **options) as stream:
            return stream.answer(stream)

    async def achat(self, messages: Messages, **options: Any) -> Answer:
        """Return the assistant's answer, like ``chat``. Cancelling the task cancels the answer."""
        template = options.pop("template", {})
        tokens = await asyncio.to_thread(lambda: self.language.tokens_of_chat(messages, **template))
        return await self.agenerate(tokens, **{"max_tokens": None, **options})

    def samples(self, prompt: Prompt | Messages, n: int, *, num_beams: int = 1, **options: Any) -> list[Answer]:
        """Return ``n`` answers to one prompt or conversation, which are generated together; the options of ``stream``.

        With a ``seed`` answer k has ``seed + k``. A long prompt is read once for all of them. With ``num_beams``
        above 1 they are the ``n`` best that a search finds, the best first: see ``generate``, which has the options.
        """
        if num_beams != 1:
            return self._beams(self._tokens_of(prompt), n, num_beams, options).run()
        tokens, options = self._prepared(prompt, options)
        branching = self._branching(tokens, n, options)
        branches = None if branching is None else branching.read()
        with ExitStack() as stack:
            streams = self._streams(tokens, n, options, stack, branching, branches)
            if all(options.get(name) is None for name in ("mask", "response_format")):
                return [stream.answer(stream) for stream in streams]
            with ThreadPoolExecutor(n) as readers:  # their tokens are asked for one by one
                return list(readers.map(lambda stream: stream.answer(stream), streams))

    async def asamples(self, prompt: Prompt | Messages, n: int, *, num_beams: int = 1, **options: Any) -> list[Answer]:
        """Return ``n`` answers, like ``samples``. Cancelling the task cancels the answers."""
        if num_beams != 1:
            return await self._beams(await asyncio.to_thread(self._tokens_of, prompt), n, num_beams, options).arun()
        tokens, options = await asyncio.to_thread(self._prepared, prompt, options)

        async def read(stream: TextStream) -> Answer:
            return stream.answer([piece async for piece in stream])

        branching = self._branching(tokens, n, options)
        branches = None if branching is None else await branching.aread()
        with ExitStack() as stack:
            streams = self._streams(tokens, n, options, stack, branching, branches)
            return list(await asyncio.gather(*map(read, streams)))

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
    ) -> torch.Tensor:
        """Return the embeddings of texts, float32 ``[texts, hidden]``, each of length 1.

        Raise RequestError for a model that makes no embeddings, and for a text of more tokens than its context.
        """
        requests = [self.language.sentence(text) for text in _listed(texts)]
        how: Any = {"deadline": deadline, "schedule_by": schedule_by, "priority": priority}
        results = self.engine.submit_many(self.name, requests, **how).results()
        return torch.stack([result["embedding"] for result in results])

    async def aembed(
        self,
        texts: Sequence[Prompt],
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
    ) -> torch.Tensor:
        """Return the embeddings of texts, like ``embed``."""
        requests = await asyncio.to_thread(lambda: [self.language.sentence(text) for text in _listed(texts)])
        how: Any = {"deadline": deadline, "schedule_by": schedule_by, "priority": priority}
        results = await self.engine.submit_many(self.name, requests, **how)
        return torch.stack([result["embedding"] for result in results])

    def _tokens_of(self, prompt: Prompt | Messages) -> list[int]:
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            return self.language.tokens_of_chat(messages)
        text: Any = prompt
        return self.language.tokens_of(text)

    def _prepared(self, prompt: Prompt | Messages, options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt's tokens, and options whose grammar is compiled."""
        if options.get("response_format") is None:
            return self._tokens_of(prompt), options
        of_answer = {name: value for name, value in options.items() if name not in OF_REQUEST}
        grammar = options_of(of_answer).prepared(self.language).mask
        return self._tokens_of(prompt), {**options, "response_format": None, "mask": grammar}

    def _beams(self, tokens: Sequence[int], n: int, num_beams: int, options: dict[str, Any]) -> SearchedBeams:
        """Return the beam search of a prompt. Raise RequestError for options that a search does not support."""
        given, count = dict(options), _checked_count(n)
        when, priority = due(given.pop("deadline", None), given.pop("schedule_by", None)), given.pop("priority", 1)
        how = HowSearched(num_beams, given.pop("length_penalty", 1.0), given.pop("early_stopping", False), count)
        opened = partial(self.engine.session, self.name)
        return searched(opened, self.language, tokens, options_of(given), how, due=when, priority=priority)

    def _branching(self, tokens: list[int], n: int, options: dict[str, Any]) -> Branches | None:
        """Return a reader of the prompt for this many answers; None if that saves nothing. Raise RequestError."""
        _checked_count(n)
        if options.get("session") is not None or not are_worth_it(self.language, tokens, n):
            return None
        of_answer = {name: value for name, value in options.items() if name not in OF_REQUEST}
        options_of(of_answer).request(self.language, tokens, self.language.room_for(tokens))  # or nothing is read
        when = due(options.get("deadline"), options.get("schedule_by"))
        return Branches(partial(self.engine.session, self.name), tokens, n, when, options.get("priority", 1))

    def _streams(
        self,
        tokens: list[int],
        n: int,
        options: dict[str, Any],
        stack: ExitStack,
        branching: Branches | None,
        branches: Sequence[Branch] | None,
    ) -> list[TextStream]:
        """Submit a prompt for this many answers; the stack closes them."""
        if branching is None or branches is None:
            return [stack.enter_context(self._stream(tokens, number, **options)) for number in range(n)]
        for branch in branches:  # also where not all are submitted
            stack.callback(branch.session.leave)
        options = {**options, "deadline": branching.due.done_s, "schedule_by": None}
        return [
            stack.enter_context(self._stream(tokens, number, **options, session=branch))
            for number, branch in enumerate(branches)
        ]

    def _stream(
        self,
        tokens: list[int],
        number: int,
        /,
        *,
        session: Conversation | None = None,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        max_unread: int | None = None,
        **options: Any,
    ) -> TextStream:
        """Submit a prompt. ``number``: that of the answer among several."""
        chosen, room = options_of(options).prepared(self.language), self.language.room_for(tokens)

        def start(rest: Sequence[int], within: Conversation | None) -> Steps:
            request = chosen.request(self.language, rest, room, number)
            if (mask := chosen.new_mask()) is not None:
                session = None if within is None else within.session
                when = due(deadline, schedule_by)
                opened = partial(self.engine.session, self.name)
                return MaskedSteps(opened, session, request, mask, self.language, due=when, priority=priority)
            how: Any = {"deadline": deadline, "schedule_by": schedule_by, "priority": priority}
            how["max_unread"] = max_unread
            if within is not None:
                steps: Steps = within.session.stream(request, **how)
                return steps
            return self.engine.stream(self.name, request, **how)

        return TextStream(start, self.language, chosen, tokens, session)


def options_of(given: dict[str, Any]) -> Options:
    """Return options of an answer. Raise RequestError for an unknown one."""
    known = Options.__dataclass_fields__
    if unknown := sorted(given.keys() - known):
        raise RequestError(f"unknown are {unknown}; options of an answer are {sorted(known)}")
    return Options(**{"max_tokens": DEFAULT_TOKENS, **given})


def _checked_count(n: object) -> int:
    """Return how many answers are wanted. Raises RequestError for what is no such number."""
    count = as_integer(n)
    if count is None or count < 1:
        raise RequestError(f"n: expected a number of answers, got {n!r:.80}")
    return count


def _listed(texts: Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(texts, str):
        raise RequestError("embed: expected a list of texts, got one text")
    return texts
