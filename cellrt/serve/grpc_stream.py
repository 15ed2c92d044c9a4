"""One ``ModelStreamInfer``: its requests run side by side, those of one sequence one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

import grpc
from tritonclient.grpc import service_pb2

from cellrt.errors import EngineClosedError
from cellrt.serve.door import Door
from cellrt.serve.grpc_guard import Context, Message, status_of

Answer = Callable[[Message], AsyncGenerator[Message, None]]
"""Makes the responses to a request."""
FINAL = "triton_final_response"
"""The parameter that says whether a response is the last of its request, as Triton has it."""


def value_of(parameter: Message) -> Any:
    """What a parameter says; None: nothing."""
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


class _ClientGoneError(Exception):
    """Nobody is there to be answered; gRPC cancels the handler only behind that."""


class GrpcStream:
    """See the module. ``name``: what its answers are counted as."""

    def __init__(self, door: Door, answer: Answer, name: str, context: Context) -> None:
        self._door, self._answer, self._name, self._context = door, answer, name, context
        self._places = asyncio.Semaphore(door.backend.settings.limits.max_streams_per_connection)
        self._under_way: set[asyncio.Task[None]] = set()
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By sequence: held by the request whose turn it is."""
        self._writing = asyncio.Lock()

    async def run(self, requests: AsyncIterator[Message]) -> None:
        """Serves until the client has had enough; raises EngineClosedError when the server ends before, after what
        was asked is answered."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(requests, tasks))
            draining = tasks.create_task(self._door.draining.wait())
            await asyncio.wait([reading, draining], return_when=asyncio.FIRST_COMPLETED)
            while self._under_way:
                await asyncio.wait(self._under_way)
            is_over = reading.done()
            reading.cancel()
            draining.cancel()
        if not is_over:
            raise EngineClosedError("the server is about to end")

    async def _read(self, requests: AsyncIterator[Message], tasks: asyncio.TaskGroup) -> None:
        """Begins what comes, as far as there are places."""
        async for request in requests:
            await self._places.acquire()
            task = tasks.create_task(self._serve(request, time.perf_counter()))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _serve(self, request: Message, begin_s: float) -> None:
        """Answers a request; an error is an answer too."""
        code = grpc.StatusCode.OK
        try:
            async with self._turn(request), aclosing(self._answer(request)) as responses:
                async for response in responses:
                    await self._say(service_pb2.ModelStreamInferResponse(infer_response=response))
        except _ClientGoneError:
            code = grpc.StatusCode.CANCELLED
        except Exception as error:
            code, words = status_of(error)
            told = service_pb2.ModelStreamInferResponse(error_message=words)
            told.infer_response.model_name, told.infer_response.model_version = (
                request.model_name,
                request.model_version,
            )
            told.infer_response.id = request.id
            told.infer_response.parameters[FINAL].bool_param = True
            with suppress(_ClientGoneError):
                await self._say(told)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._places.release()
            self._door.measures.count_call(self._name, code.name, time.perf_counter() - begin_s)

    def _turn(self, request: Message) -> AbstractAsyncContextManager[None]:
        """The turn of a request in its sequence, in the order in which they came."""
        given = request.parameters
        id = value_of(given["sequence_id"]) if "sequence_id" in given else None
        return self._turns.setdefault((request.model_name, str(id)), asyncio.Lock()) if id else nullcontext()

    async def _say(self, response: Message) -> None:
        """Raises _ClientGoneError."""
        async with self._writing:
            try:
                await self._context.write(response)
            except grpc.aio.BaseError as error:
                raise _ClientGoneError from error
