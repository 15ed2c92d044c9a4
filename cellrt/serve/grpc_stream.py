"""One call of ``ModelStreamInfer``: its requests run concurrently, those of one sequence one after the other."""

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
from cellrt.serve.grpc_access import Context, Message, status_of
from cellrt.serve.inference import InferenceService

Answer = Callable[[Message], AsyncGenerator[Message, None]]
"""A function that yields the responses to a request."""
FINAL = "triton_final_response"
"""Triton's parameter that is true for the last response of a request."""


def value_of(parameter: Message) -> Any:
    """Return the value of a parameter; None if it has none."""
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


class _ClientGoneError(Exception):
    """The client of a stream is gone; gRPC cancels the handler only after such a failed write."""


class GrpcStream:
    """A stream of requests and its answers. ``name``: under which the answers are counted."""

    def __init__(self, service: InferenceService, answer: Answer, name: str, context: Context) -> None:
        self._service, self._answer, self._name, self._context = service, answer, name, context
        self._places = asyncio.Semaphore(service.backend.settings.limits.max_streams_per_connection)
        self._under_way: set[asyncio.Task[None]] = set()
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Locks by sequence, held by the request whose turn it is."""
        self._writing = asyncio.Lock()

    async def run(self, requests: AsyncIterator[Message]) -> None:
        """Serve until the client ends the stream.

        Raise EngineClosedError when the server ends before, after the requests so far are answered.
        """
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(requests, tasks))
            draining = tasks.create_task(self._service.draining.wait())
            await asyncio.wait([reading, draining], return_when=asyncio.FIRST_COMPLETED)
            while self._under_way:
                await asyncio.wait(self._under_way)
            is_over = reading.done()
            reading.cancel()
            draining.cancel()
        if not is_over:
            raise EngineClosedError("the server is about to end")

    async def _read(self, requests: AsyncIterator[Message], tasks: asyncio.TaskGroup) -> None:
        """Start the requests that come, within the limit of concurrent ones."""
        async for request in requests:
            await self._places.acquire()
            task = tasks.create_task(self._serve(request, time.perf_counter()))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _serve(self, request: Message, begin_s: float) -> None:
        """Answer a request; an error is an answer too."""
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
            self._service.measures.count_call(self._name, code.name, time.perf_counter() - begin_s)

    def _turn(self, request: Message) -> AbstractAsyncContextManager[None]:
        """Return the lock of a request's sequence, which requests get in the order in which they came."""
        given = request.parameters
        id = value_of(given["sequence_id"]) if "sequence_id" in given else None
        return self._turns.setdefault((request.model_name, str(id)), asyncio.Lock()) if id else nullcontext()

    async def _say(self, response: Message) -> None:
        """Write a response. Raise _ClientGoneError."""
        async with self._writing:
            try:
                await self._context.write(response)
            except grpc.aio.BaseError as error:
                raise _ClientGoneError from error
