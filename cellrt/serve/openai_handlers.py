"""OpenAI's protocol over HTTP: completions, chats and embeddings of language models.

Requests come as text and are answered as text: the front end has a model's tokenizer and template, and none of its
weights.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cellrt.engine.due import Due, due
from cellrt.errors import CellrtError, RequestError, UnknownModelError
from cellrt.language.answers import Answer, Piece, Steps, TextStream
from cellrt.language.beams import SearchedBeams, searched
from cellrt.language.branches import Branches, are_worth_it
from cellrt.language.conversation import Conversation
from cellrt.language.language import Language
from cellrt.language.masks import MaskedSteps
from cellrt.language.options import Options
from cellrt.serve import openai_messages as messages
from cellrt.serve.described import Described, language_in
from cellrt.serve.http import EventStream, error_answer, gone, json_response, read_body
from cellrt.serve.inference import SEEN, InferenceService, unless_gone
from cellrt.serve.oip import DEFAULT_PRIORITY, encode
from cellrt.serve.openai_answers import ChatForm, CompletionForm, Form, model_entry, usage_of
from cellrt.serve.openai_conversations import Conversations

T = TypeVar("T")
Handler = Callable[..., Awaitable[Response]]
DONE = b"[DONE]"
_completions = msgspec.json.Decoder(messages.CompletionRequest)
_chats = msgspec.json.Decoder(messages.ChatRequest)
_embeddings = msgspec.json.Decoder(messages.EmbeddingRequest)


def _telling(handler: Handler) -> Handler:
    """Return a handler that answers errors in the form of this protocol."""

    @wraps(handler)
    async def handle(self: OpenAIHandlers, request: Request) -> Response:
        try:
            return await handler(self, request)
        except CellrtError as error:
            return error_answer(error, messages.error_json)

    return handle


class Asked(NamedTuple):
    """A parsed request for answers.

    Attributes:
        request: the message.
        described, language: those of the model.
        prompts: the tokens of each prompt.
        options: the options of the answers.
        sessions: a conversation or a branch of each answer to each prompt, if any.
        due: the deadlines of all answers.
    """

    request: messages.HowAnswered
    described: Described
    language: Language
    prompts: Sequence[Sequence[int]]
    options: Options
    sessions: Sequence[Sequence[Conversation | None]]
    due: Due


class OpenAIHandlers:
    """The handlers. ``service``: submits requests."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._backend = service, service.backend
        self._limits = service.backend.settings.limits
        self._conversations = Conversations(service.backend)

    def routes(self) -> list[BaseRoute]:
        """Return the routes of all handlers but ``/v1/models``, which is among the native ones."""
        return [
            Route("/health", self.health),
            Route("/v1/models/{model}", self.model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        """Return whether requests are taken, at the path where other servers of this protocol have it."""
        return json_response({"ready": self._backend.is_ready}, 200 if self._backend.is_ready else 503)

    @_telling
    async def model(self, request: Request) -> Response:
        """Return one model."""
        name = request.path_params["model"]
        if name not in {entry["name"] for entry in await self._backend.call("models") if entry["is_loaded"]}:
            raise UnknownModelError(f"there is no model {name!r:.80}")
        return json_response(model_entry(name))

    @_telling
    async def complete(self, request: Request) -> Response:
        """Return the completions of texts."""
        asked: messages.CompletionRequest = await self._read(request, _completions)
        messages.check_known(asked)
        described, language = await self._language(asked.model)
        prompts = messages.prompts_of(asked.prompt, "prompt")
        tokens = await asyncio.to_thread(lambda: [language.tokens_of(prompt) for prompt in prompts])
        options = messages.options_of(asked, asked.max_tokens or messages.COMPLETION_TOKENS, asked.logprobs or 0)
        form = CompletionForm(language, has_logprobs=asked.logprobs is not None)
        return await self._answer(request, form, asked, described, language, tokens, options)

    @_telling
    async def chat(self, request: Request) -> Response:
        """Return an assistant's next message."""
        asked: messages.ChatRequest = await self._read(request, _chats)
        messages.check_known(asked)
        if asked.top_logprobs and not asked.logprobs:
            raise messages.WrongFieldError("top_logprobs", "expected logprobs to be true, too")
        described, language = await self._language(asked.model)
        said, more = messages.as_template_has(asked.messages), asked.chat_template_kwargs or {}
        tokens = await asyncio.to_thread(lambda: language.tokens_of_chat(said, **more))
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        options = messages.options_of(asked, most, asked.top_logprobs or 0)
        form = ChatForm(language, has_logprobs=bool(asked.logprobs))
        return await self._answer(request, form, asked, described, language, [tokens], options)

    @_telling
    async def embed(self, request: Request) -> Response:
        """Return embeddings of texts."""
        asked: messages.EmbeddingRequest = await self._read(request, _embeddings)
        described, language = await self._language(asked.model)
        texts = messages.prompts_of(asked.input, "input", messages.MOST_INPUTS)
        tokens = await asyncio.to_thread(lambda: [language.sentence(text) for text in texts])
        how = _how(asked)
        client = self._backend.client
        with self._service.counted(described.name):
            together = _all_of(client.infer(described.name, each, **how) for each in tokens)
            results = await unless_gone(asyncio.ensure_future(together), gone(request))
        rows = [result["embedding"] for result in results]
        if asked.dimensions not in (None, len(rows[0])):
            raise messages.WrongFieldError("dimensions", f"embeddings of this model have {len(rows[0])}")
        written = [
            base64.b64encode(row.numpy().tobytes()).decode() if asked.encoding_format == "base64" else row.tolist()
            for row in rows
        ]
        data = [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(written)]
        count = sum(map(len, tokens))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"object": "list", "data": data, "model": described.name, "usage": usage})

    async def _read(self, request: Request, decoder: msgspec.json.Decoder[Any]) -> Any:
        return messages.read(await read_body(request, self._limits.max_body_bytes), decoder, self._limits)

    async def _language(self, name: str) -> tuple[Described, Language]:
        """Return a model. Raise UnknownModelError, and RequestError for one that is no language model."""
        described = await self._backend.model(name)
        language = language_in(described)
        if language is None:
            raise RequestError(f"model {name!r} is no language model: its requests go to /v1/models/{name}/infer")
        return described, language

    async def _answer(
        self,
        request: Request,
        form: Form,
        how: messages.HowAnswered,
        described: Described,
        language: Language,
        prompts: Sequence[Sequence[int]],
        options: Options,
    ) -> Response:
        """Return the answers to prompts, ``n`` to each, or a stream of events with them."""
        count = how.n or 1
        if len(prompts) * max(count, how.best_of or 0) > messages.MOST_ANSWERS:
            raise messages.WrongFieldError("n", f"expected at most {messages.MOST_ANSWERS} answers to all prompts")
        if how.use_beam_search:
            searching = asyncio.ensure_future(self._searched(how, described, language, prompts, options))
            found = await unless_gone(searching, gone(request))
            num_made = sum(answer.num_tokens for answer in found)
            return _whole(form, found, usage_of(sum(map(len, prompts)), num_made, 0))
        if options.response_format is not None:
            options = await asyncio.to_thread(_prepared, options, language)
        sessions: list[Sequence[Conversation | None]] = [[None] * count for _ in prompts]
        if how.session_id is not None and language.kind == "decoder" and len(prompts) * count == 1:
            sessions = [[await self._conversations.of(described, how.session_id)]]
        when = due(how.deadline_s, how.schedule_by_s)
        asked = Asked(how, described, language, prompts, options, sessions, when)
        streams: dict[int, TextStream] = {}
        if how.stream:
            events = self._events(form, asked, streams)
            return EventStream(events, self._limits.write_timeout_s, {}, messages.error_json)
        collecting = asyncio.ensure_future(self._collected(asked, streams))
        made = await unless_gone(collecting, gone(request))
        answers = [streams[number].answer(each) for number, each in enumerate(made)]
        return _whole(form, answers, _usage(asked, streams))

    async def _searched(
        self,
        how: messages.HowAnswered,
        described: Described,
        language: Language,
        prompts: Sequence[Sequence[int]],
        options: Options,
    ) -> list[Answer]:
        """Return the best answers that a search finds to each prompt; cancelling it gives all of them up."""
        opened, given = partial(self._backend.client.session, described.name), messages.how_searched(how)
        when: Any = {"due": due(how.deadline_s, how.schedule_by_s), "priority": _how(how)["priority"]}
        try:  # what is wrong with one is said before any begins
            note = self._service.note
            searches = [searched(opened, language, prompt, options, given, **when, note=note) for prompt in prompts]
        except RequestError as error:
            raise messages.of_search(how, error) from error

        async def search(one: SearchedBeams) -> list[Answer]:
            with self._service.counted(described.name), self._service.place_of_stream():
                return await one.arun()

        return [answer for found in await _all_of(map(search, searches)) for answer in found]

    @asynccontextmanager
    async def _sources(
        self, asked: Asked, streams: dict[int, TextStream]
    ) -> AsyncGenerator[Sequence[AsyncGenerator[Piece]]]:
        """Provide the pieces of each answer. A long prompt is read once for all of its answers before."""
        count, priority = asked.request.n or 1, _how(asked.request)["priority"]
        for prompt in asked.prompts:  # before any is read
            asked.options.request(asked.language, prompt, asked.language.room_for(prompt))
        opened = partial(self._backend.client.session, asked.described.name)
        found, reading = (
            list(asked.sessions),
            {
                place: Branches(opened, prompt, count, asked.due, priority)
                for place, prompt in enumerate(asked.prompts)
                if are_worth_it(asked.language, prompt, count)
            },
        )

        async def read(place: int) -> None:
            branches = await reading[place].aread()
            for branch in branches or ():  # also one that no answer uses
                stack.callback(branch.session.leave)
            found[place] = branches or found[place]

        with ExitStack() as stack:
            await _all_of(map(read, reading))
            left = next(iter(reading.values())).due if reading else asked.due
            asked = asked._replace(sessions=found, due=left)
            yield [self._pieces(asked, number, streams) for number in range(count * len(asked.prompts))]

    async def _collected(self, asked: Asked, streams: dict[int, TextStream]) -> list[list[Piece]]:
        async with self._sources(asked, streams) as pieces:
            return await _collected(pieces)

    async def _pieces(self, asked: Asked, number: int, streams: dict[int, TextStream]) -> AsyncGenerator[Piece]:
        """Yield the pieces of one answer, by its number among all; closing the generator cancels it."""
        count = asked.request.n or 1
        prompt, session = asked.prompts[number // count], asked.sessions[number // count][number % count]
        room, name = asked.language.room_for(prompt), asked.described.name
        note_first = self._service.measures.first_result_of(name)

        def start(rest: Sequence[int], within: Conversation | None) -> Steps:
            how = {**_how(asked.request), "max_unread": self._limits.max_unread}
            how["deadline"], how["schedule_by"] = asked.due
            given = asked.options.request(asked.language, rest, room, number % count)
            client = self._backend.client
            if (mask := asked.options.new_mask()) is not None:
                return MaskedSteps(
                    partial(client.session, name),
                    None if within is None else within.session,
                    given,
                    mask,
                    asked.language,
                    due=asked.due,
                    priority=how["priority"],
                    note=self._service.note,
                )
            stream = (partial(client.stream, name) if within is None else within.session.stream)(given, **how)
            self._service.note(stream.future)
            return stream

        with self._service.counted(name), self._service.place_of_stream():
            made = TextStream(start, asked.language, asked.options, prompt, session)
            streams[number] = made
            with made:
                async for piece in made:
                    note_first()
                    yield piece

    async def _events(self, form: Form, asked: Asked, streams: dict[int, TextStream]) -> AsyncGenerator[bytes]:
        options = asked.request.stream_options
        counts = bool(options is not None and options.include_usage)
        more: dict[str, Any] = {"usage": None} if counts else {}
        begun: set[int] = set()
        async with self._sources(asked, streams) as pieces, aclosing(_merged(pieces)) as merged:
            async for number, piece in merged:
                for choice in form.choices(number, piece, is_first=number not in begun):
                    yield encode(form.piece([choice], **more))
                begun.add(number)
        if counts:
            yield encode(form.piece([], usage=_usage(asked, streams)))
        yield DONE


def _whole(form: Form, answers: Sequence[Answer], usage: dict[str, Any]) -> Response:
    """Return answers to a request that is not streamed."""
    seen = SEEN.get() or [""]
    return json_response(form.whole(answers, usage), request_id=seen[-1])


def _usage(asked: Asked, streams: dict[int, TextStream]) -> dict[str, Any]:
    """Return the counts of tokens of all prompts, each once, and of all answers."""
    made = sum(stream.num_tokens for stream in streams.values())
    cached = sum(stream.num_cached_tokens for stream in streams.values())
    return usage_of(sum(map(len, asked.prompts)), made, cached)


def _prepared(options: Options, language: Language) -> Options:
    """Return options whose grammar is compiled. Raise WrongFieldError."""
    try:
        return options.prepared(language)
    except RequestError as error:
        raise messages.WrongFieldError("response_format", str(error).removeprefix("response_format: ")) from error


def _how(asked: messages.HowAnswered | messages.EmbeddingRequest) -> dict[str, Any]:
    """Return the options with which a request is submitted."""
    priority = DEFAULT_PRIORITY if asked.priority is None else asked.priority
    return {"deadline": asked.deadline_s, "schedule_by": asked.schedule_by_s, "priority": priority}


async def _all_of(parts: Iterable[Awaitable[T]]) -> list[T]:
    """Return what all of them give. An error of one, or cancelling this, gives the others up."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collected(sources: Sequence[AsyncGenerator[T]]) -> list[list[T]]:
    """Return all items of each source."""
    made: list[list[T]] = [[] for _ in sources]
    async with aclosing(_merged(sources)) as merged:
        async for number, item in merged:
            made[number].append(item)
    return made


async def _merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all sources as they come, each with the source's number.

    Leaving, or an error, ends all sources.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(len(sources))

    async def pump(number: int, source: AsyncGenerator[T]) -> None:
        ended: BaseException | None = StopAsyncIteration()
        try:
            async for item in source:
                await queue.put((number, item, None))
        except Exception as error:
            ended = error
        await queue.put((number, None, ended))

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            number, item, ended = await queue.get()
            if ended is None:
                yield number, item
            elif isinstance(ended, StopAsyncIteration):
                left -= 1
            else:
                raise ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
