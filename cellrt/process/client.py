"""The client of an engine in another process, for users."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from cellrt.engine.awaited import Awaited
from cellrt.engine.due import Due, check_seconds
from cellrt.engine.explanation import HAS_ENDED
from cellrt.engine.frozen import HEAP
from cellrt.engine.future import RequestFuture
from cellrt.engine.interrupts import interruptible
from cellrt.engine.serving import CLOSE_S, Serving, check_registration, check_timeout
from cellrt.engine.serving_session import state_bytes
from cellrt.engine.stream import Channel
from cellrt.engine.submission import check_priority
from cellrt.errors import EngineClosedError, RequestError
from cellrt.graph.known import Alike, record_at
from cellrt.graph.unfolder import Unfolder
from cellrt.process import address as addresses
from cellrt.process.bindings import Bindings, check_name
from cellrt.process.link import Link
from cellrt.process.model_binding import Binding
from cellrt.process.pending import RemoteFuture, Tell, when_accepted
from cellrt.process.remote_session import RemoteSession, parts_of
from cellrt.process.source import source_of
from cellrt.process.wire import welcomed

CONNECT_S = 30.0
NO_DUE = Due(None, None)
T = TypeVar("T")


def connect(address: str, *, timeout: float = CONNECT_S, freeze: bool = False) -> Client:
    """Return a client of the engine whose process listens at an address (see ``EngineProcess.address``).

    ``freeze``: see ``Engine``, for this process, whenever it has imported a model, until its last such client closes.

    Raise DeviceError if none listens within ``timeout`` seconds, DefinitionError for an invalid address.
    """
    return Client(address, timeout=timeout, freeze=freeze)


class Client(Serving):
    """A client of an engine in another process of this machine, with the methods and errors of ``Engine``.

    Requests are unfolded here, in the caller's thread; programs, tensors and results cross through shared memory.
    Errors
    that only the engine can find come from the future, unless ``submit`` is told to ``wait``: OverloadError,
    SessionError,
    and RequestTooLargeError for requests that do not fit in its tables.

    Safe from any thread, not for use across a fork. Futures' callbacks run in a thread of the client. When the engine's
    process is gone, everything ends with DeviceError; when this client is closed, dropped or killed, its requests are
    cancelled, and sessions that it opened without an id are closed.
    """

    def __init__(self, address: str, *, timeout: float = CONNECT_S, freeze: bool = False) -> None:
        self.address = addresses.check_address(address)
        wire, told, fds = welcomed(addresses.connect(address, (timeout := check_seconds("timeout", timeout))), timeout)
        self._has_timeline = bool(told["has_timeline"])
        self._link = Link(wire, fds, told.get("workers", 0))
        self._bindings = Bindings()
        self._bind_lock = threading.Lock()
        self._number: int | None = None
        self._link.on_rebind = self._bindings.change
        if freeze:
            self._bindings.unfolders.on_import = partial(HEAP.freeze, id(self))
        weakref.finalize(self, self._link.leave).atexit = False
        weakref.finalize(self, HEAP.release, id(self)).atexit = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    @property
    def is_lost(self) -> bool:
        """True once the connection has ended: the engine's process is gone, or this client is closed."""
        return self._link.lost is not None

    def register(
        self,
        model: str | Unfolder,
        *,
        priorities: dict[str, int] | None = None,
        warm_up: bool = True,
        max_queue: int | None = None,
        max_queue_rows: int | None = None,
        max_batch: dict[str, int] | None = None,
        replace: bool = False,
    ) -> None:
        """Register a model for all clients, like ``Engine.register``.

        Args:
            model: where both processes find it: "module:attribute" or "file.py:attribute", of what ``cellrt.unfold``
                makes or of a function that returns it; or a model that is an attribute of an imported module.
            priorities, warm_up, max_queue, max_queue_rows, max_batch, replace: see ``Engine.register``.

        Raise DefinitionError, also if the engine's process cannot import the model; EngineClosedError, DeviceError. A
        client imports it when it first submits: only then is it said if it cannot.
        """
        source = source_of(model)
        how = check_registration(priorities, warm_up, max_queue, max_queue_rows, max_batch, replace)
        self._link.call(
            "register",
            source=source.text,
            warm_up=warm_up,
            replace=replace,
            **how._asdict(),
        )

    def unregister(self, model: str) -> None:
        """Remove a model for all clients, like ``Engine.unregister``."""
        self._link.call("unregister", model=check_name(model))

    def models(self) -> list[dict[str, Any]]:
        """Return the registered models: ``name``, ``source``, ``version`` (how often), and whether it ``is_loaded``
        now.
        """
        entries: list[dict[str, Any]] = self._link.call("models").value
        return entries

    def load(self, model: str) -> None:
        """Register a model anew from where it came, to serve its present version: like ``register`` with ``replace``.

        A file that has changed is imported again, and a function that makes the model is called again. The objects that
        a
        module made when it was imported stay as they are, whatever files it read then.

        Raise UnknownModelError if none of that name was ever registered, and what ``register`` raises.
        """
        self._link.call("load", model=check_name(model))

    def binding(self, model: str) -> Binding:
        """Return a model's binding; get it from the engine's process, and import the model here, if it is new here.

        Raise UnknownModelError, DefinitionError.
        """
        return (self._bindings.by_name.get(check_name(model)) or self._bind(model)).imported()

    def has_binding(self, model: str) -> bool:
        """Return whether ``binding`` and ``submit`` need neither wait for the engine's process nor import the model."""
        binding = self._bindings.by_name.get(model)
        return binding is not None and binding.is_imported

    def number(self) -> int:
        """Return the client's number, with which the ids of its requests begin; the engine's process is asked once."""
        if self._number is None:
            self._number = int(self._link.call("number").value)
        return self._number

    def trace_id(self, future: RequestFuture) -> str:
        """Return the id in ``timeline_events`` of a request that this client or one of its sessions submitted."""
        return f"{self.number()}-{future.id}" if isinstance(future, RemoteFuture) else ""

    def timeline_events(self, *, request: str | None = None, count: int = 1000) -> bytes:
        """Return the last ``count`` requests and their tasks as a Chrome trace, JSON; or one request and its tasks.

        ``request``: as ``trace_id`` returns it. Raise DefinitionError unless the engine has ``trace``, RequestError if
        it
        knows no such request (any more).
        """
        return self._link.call("timeline", request=request, count=count).blob

    def session(
        self, model: str, id: str | None = None, *, state: bytes | None = None, must_be_open: bool = False
    ) -> RemoteSession:
        """Return the open session of a model with that id, or a new one, like ``Engine.session``.

        One without an id belongs to this client and ends with it; others are open to every client that knows the id.
        ``must_be_open``: raise SessionError instead of opening a new one.
        """
        return self._open(check_name(model), id, state, must_be_open)

    def statistics(self) -> dict[str, Any]:
        """Return counts so far, of all clients, like ``Engine.statistics``; ``clients`` is the number of clients."""
        counts: dict[str, Any] = self._link.call("statistics").value
        return counts | {"workers": {int(location): its for location, its in counts["workers"].items()}}

    @property
    def has_timeline(self) -> bool:
        """True if the engine was made with ``trace``."""
        return self._has_timeline

    def has_workers(self) -> bool:
        """Return whether the engine has a worker that can run tasks; False in a forked process."""
        return not self._link.is_parents and bool(self._link.call("has_workers").value)

    def explain(self, future: RequestFuture) -> str:
        """Return in words what a request waits for, like ``Engine.explain``.

        Raise RequestError for a future that is not of this client, EngineClosedError.
        """
        if future.done():
            return HAS_ENDED
        if not isinstance(future, RemoteFuture):
            raise RequestError(f"explain: expected a future of this client, got {future!r}")
        told: str = self._link.call("explain", id=future.id).value
        return told

    def check(self) -> None:
        """Check every invariant of the scheduler's state; raise InternalError naming the broken ones."""
        self._link.call("check")

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every request of this client has ended; return False after ``timeout`` seconds.

        In a forked process it waits for nothing. Raise RequestError in a future's callback.
        """
        if self._link.is_parents:
            return self._link.drain(0)
        self._link.refuse_in_callback()
        self._collector.flush()
        return self._link.drain(None if timeout is None else check_timeout(timeout))

    def close(self, timeout: float = CLOSE_S) -> None:
        """Close the connection: requests that are not done end with EngineClosedError. The engine goes on.

        May be called twice. It waits at most ``timeout`` seconds for a callback that runs. In a forked process nothing
        ends.
        """
        if self._link.is_parents:
            return
        self._link.refuse_in_callback()
        timeout = check_timeout(timeout)
        self._link.close(EngineClosedError("the client is closed"), timeout)
        HEAP.release(id(self))

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Cancel a request, if it has not ended; for futures."""
        self._link.cancel(future)

    def have_told(self) -> None:
        """Do nothing: the engine's process sends each result as soon as it is there."""

    def refuse_in_callback(self) -> None:
        """Raise RequestError in a future's callback; for futures."""
        self._link.refuse_in_callback()

    @interruptible
    def _submit(
        self,
        model: str,
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
        channel: Channel | None = None,
    ) -> Sequence[RequestFuture]:
        return self._bound(
            check_name(model),
            lambda binding: self._submit_for(binding, requests, (), due, priority, wait, channel),
        )

    def _submit_collected(
        self, model: str, requests: Sequence[Any], sessions: Sequence[Any] | None, due: Due, priority: int
    ) -> Sequence[RequestFuture]:
        if sessions is not None:
            return super()._submit_collected(model, requests, sessions, due, priority)
        self._refuse_in_callback()
        return self._bound(
            check_name(model),
            lambda binding: self._hand_in(binding, requests, due, priority, None, (), None, is_together=False),
        )

    @interruptible
    def _submit_in(
        self,
        model: str,
        sessions: Sequence[Any],
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
    ) -> Sequence[RequestFuture]:
        self.binding(model)
        known = parts_of(sessions, self._link, model)
        priority = self._check(priority)
        if not known:
            return []
        asked: list[tuple[Binding, Alike]] = []
        for binding in dict.fromkeys(binding for binding, _ in known):  # one, unless the model was replaced meanwhile
            indices = [index for index, (its, _) in enumerate(known) if its is binding]
            for alike in record_at(partial(binding.known.record, binding), requests, indices):
                asked.append((binding, alike._replace(indices=[indices[index] for index in alike.indices])))
        accepted, numbers = Awaited() if wait else None, [number for _, number in known]
        futures = self._link.submit(self, asked, due, priority, None, numbers, accepted)
        if accepted is not None:
            self._await_places(accepted, futures)
        return futures

    @interruptible
    def _submit_for(
        self,
        binding: Binding,
        requests: Sequence[Any],
        sessions: Sequence[int],
        due: Due,
        priority: int,
        wait: bool,
        channel: Channel | None,
    ) -> Sequence[RequestFuture]:
        """Submit requests for a binding that is in use, each of a session, or of none."""
        accepted = Awaited() if wait else None
        futures = self._hand_in(binding, requests, due, priority, channel, sessions, accepted)
        if accepted is not None and requests:
            self._await_places(accepted, futures)
        return futures

    def _refuse_in_callback(self) -> None:
        self._link.refuse_in_callback()

    async def _submit_when_room(
        self, model: str, requests: Sequence[Any], due: Due, priority: int
    ) -> Sequence[RequestFuture]:
        self._link.refuse_in_callback()
        return await when_accepted(
            lambda accepted: self._bound(
                check_name(model),
                lambda binding: self._hand_in(binding, requests, due, priority, None, (), accepted),
            )
        )

    def _hand_in(
        self,
        binding: Binding,
        requests: Sequence[Any],
        due: Due,
        priority: int,
        channel: Channel | None,
        sessions: Sequence[int],
        accepted: Awaited | None,
        *,
        is_together: bool = True,
    ) -> Sequence[RequestFuture]:
        """Unfold requests and hand them in, without waiting for room in the queue.

        ``is_together``: all are refused if one is; of coroutines each is.
        """
        priority = self._check(priority)
        if not requests:
            return []
        asked = [(binding, alike) for alike in binding.known.record(binding, requests)]
        if not (channel or accepted) and due == NO_DUE and (len(requests) == 1 or not is_together):
            futures = self._link.submit_by_region(self, asked, priority, sessions)
            if futures:
                return futures
        return self._link.submit(self, asked, due, priority, channel, sessions, accepted)

    def _hand_in_each(
        self,
        binding: Binding,
        requests: Sequence[Any],
        sessions: Sequence[int],
        due: Due,
        priority: int,
        tell: Tell | None = None,
    ) -> Sequence[RemoteFuture]:
        """Submit a request of each of several sessions; the engine refuses each by itself.

        Raise if one cannot be unfolded, and then submit none. ``tell``: see ``SentRequests``.
        """
        priority = self._check(priority)
        asked = [(binding, alike) for alike in binding.known.record(binding, requests)]
        if due == NO_DUE and (futures := self._link.submit_by_region(self, asked, priority, sessions, tell)):
            return futures
        return self._link.submit(self, asked, due, priority, None, sessions, None, is_each=True, tell=tell)

    def _check(self, priority: int) -> int:
        """Return the priority. Raise the error that ended the connection, and RequestError for an invalid priority."""
        self._link.refuse_if_lost()
        return check_priority(priority)

    def _await_places(self, accepted: Awaited, futures: Sequence[RequestFuture]) -> None:
        """Wait until requests have room in the queue; if they do not get it, raise why."""
        try:
            self._link.refuse_in_callback()
            accepted.wait()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        if accepted.error is not None:
            raise accepted.error

    def _bound(self, model: str, use: Callable[[Binding], T]) -> T:
        """Call a function with a model's binding, which is not released meanwhile."""
        user = object()
        while True:
            binding = self._bindings.by_name.get(model) or self._bind(model)
            try:
                if self._link.begin(binding, user):
                    return use(binding)
            finally:
                binding.users.discard(user)  # here: before the first step of a function an interrupt may come
                self._link.send_news()
            self._bindings.forget(binding)

    def _bind(self, model: str) -> Binding:
        """Request the binding of a model. Raise UnknownModelError."""
        self._link.refuse_in_callback()  # before the lock: its holder waits for an answer that this thread hears
        bindings, tried = self._bindings, list[Binding]()
        with self._bind_lock:
            while (found := bindings.by_name.get(model)) is None:
                num_changes, known = bindings.num_changes, bindings.all()
                binding = bindings.binding_of(self._link.call("bind", model=model, known=list(known)).value)
                bindings.is_named(model, binding, num_changes)
                tried.append(binding)
        for binding in tried:
            if binding is not found:
                self._link.give_up(binding)
        return found

    def _open(self, model: str, id: str | None, state: bytes | None, must_be_open: bool) -> RemoteSession:
        """Open a session, which uses the binding of its model."""
        if id is not None and not isinstance(id, str):
            raise RequestError(f"session of model {model!r}: expected a str as id, got {id!r}")
        bindings = self._bindings
        while True:
            is_named, num_changes, known = False, bindings.num_changes, bindings.all()
            value = self._link.call(
                "open",
                b"" if state is None else state_bytes(state),
                model=model,
                id=id,
                has_state=state is not None,
                undo=self._undo_open if id is None else None,
                must_be_open=bool(must_be_open),
                known=list(known),
            ).value
            binding, user = bindings.binding_of(value), object()
            try:
                binding.imported()  # now: later its file may be another
                is_named = value["is_current"] and bindings.is_named(model, binding, num_changes)
                if self._link.begin(binding, user):
                    its = value["session"], value["id"], binding
                    return RemoteSession(self._submit_for, self._hand_in, self._link, *its)
            except BaseException:  # the caller does not get this session
                if id is None:
                    self._link.tell("close", session=value["session"])
                raise
            finally:
                binding.users.discard(user)
                if not is_named and bindings.by_name.get(model) is not binding:
                    self._link.give_up(binding)  # no news of another model will name it
            id = value["id"]  # a binding that was given up meanwhile: it is described anew

    def _undo_open(self, answer: Awaited) -> None:
        """Close a session whose opening call was interrupted before it had the answer."""
        if answer.error is None:
            self._link.tell("close", session=answer.value["session"])
