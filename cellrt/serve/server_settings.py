"""The settings of a server: one record, the same for the supervising process and for its front ends."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from cellrt.core.state.settings import POLICY_NAMES, SchedulerSettings
from cellrt.engine.option_checks import check_choice
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import DefinitionError

MOST_DEPTH = 1_000
"""The deepest nesting of JSON: its readers are recursive, and Python limits recursion."""


@dataclass(frozen=True)
class Limits:
    """The limits of one client.

    Attributes:
        max_body_bytes: the largest body of a request, or message of a websocket, in bytes.
        max_depth: the deepest nesting of lists and objects in JSON, at most ``MOST_DEPTH``.
        max_items: numbers, texts, lists and objects in one request.
        max_steps: the longest sequence: rows of a tensor, items of a list, characters of a text.
        max_streams: requests that one front end answers step by step, and streams of gRPC, at once; beyond, 429.
        max_streams_per_connection: requests of one websocket, or of one gRPC stream, at once; others wait.
        max_unread: steps of a stream that wait to be read; beyond, the stream ends. A run of a chain may make many at
            once, however fast they are read: no less than the steps of the longest request.
        max_sessions: sessions that a front end keeps at hand; it asks the engine anew for others, which stay open.
        read_timeout_s: how long a client may take to send a request over HTTP, from when it connected or began to send.
        write_timeout_s: how long a client may read nothing of what it was sent.
    """

    max_body_bytes: int = 16 << 20
    max_depth: int = 64
    max_items: int = 1_000_000
    max_steps: int = 65_535
    max_streams: int = 4096
    max_streams_per_connection: int = 64
    max_unread: int = 65_535
    max_sessions: int = 16_384
    read_timeout_s: float = 60.0
    write_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise DefinitionError for a depth beyond ``MOST_DEPTH``."""
        if self.max_depth > MOST_DEPTH:
            raise DefinitionError(f"max_depth: expected at most {MOST_DEPTH} (of nested JSON), got {self.max_depth}")


@dataclass(frozen=True)
class EngineSettings:
    """The settings of a server's engine; each is an option of ``cellrt serve``.

    Attributes:
        policy: order of requests: batchmaker, first-come-first-served, shortest-job-first, earliest-deadline-first,
            deadline-aware-utility, or one of your own as module:attribute.
        arena_bytes: memory for the rows of one kind at each worker, the host has four times that; None: as ``Engine``.
        page_bytes: the same for the pages of states that grow.
        freeze: whether the engine's process freezes its heap after each registration: no collection stops it then.
        scheduler: its settings.
        sessions: how many are kept, where, and for how long.

    Raises DefinitionError for a policy that is none of these; its module is imported where the engine is made.
    """

    policy: str = "batchmaker"
    arena_bytes: int | None = None
    page_bytes: int | None = None
    freeze: bool = True
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    sessions: SessionLimits = field(default_factory=SessionLimits)

    def __post_init__(self) -> None:
        """Raise DefinitionError for an unknown policy."""
        if ":" not in self.policy:
            check_choice("policy", self.policy, list(POLICY_NAMES))

    def for_engine(self) -> dict[str, Any]:
        """Return the settings as options of ``Engine``."""
        made: dict[str, Any] = {"freeze": self.freeze, "settings": self.scheduler, "sessions": self.sessions}
        made["policy"] = self.policy
        sizes = {"arena_bytes": self.arena_bytes, "page_bytes": self.page_bytes}
        return {**made, **{name: size for name, size in sizes.items() if size is not None}}


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        models: "module:attribute", or "file.py:attribute", each.
        host, port: where HTTP is taken; port 0: any that is free.
        grpc_port: where gRPC is taken, by all front ends; None: nowhere.
        front_ends: processes that parse and answer.
        workers: number of CPU workers, or devices; None: a CPU worker for each core that the front ends leave.
        max_queued_requests: requests of all models that may be unfinished.
        max_queued_per_model: requests of one model that may be; None: as many as of all.
        max_queued_rows, max_queued_rows_per_model: the same of the rows of all their nodes; None: any number.
        api_keys: one of them must come with each request, unless there are none.
        allowed_origins: other servers' origins, whose pages may change state and read answers; "null" for pages from
            files and sandboxes.
        keep_alive_s: how long a connection over HTTP may be idle.
        ping_timeout_s: how long the client of a websocket may take to answer a ping; 0: no pings are sent.
        drain_s: how long requests may take to end when the server is told to.
        timeline: tasks and requests that are remembered for ``/debug``; 0: none, and no such pages.
        spans: "requests": OpenTelemetry's spans of the requests that ask for them; "tasks": with their tasks; "off".
        compile: see ``Engine``.
        max_batch: most rows of a task by cell name, of each model in the order of ``models``: of a profile.
        limits: the limits of each client.
        engine: settings of the engine.
        address: where the engine's process listens for front ends; chosen at the start.
    """

    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    front_ends: int = 1
    workers: int | tuple[str, ...] | None = None
    max_queued_requests: int = 4096
    max_queued_per_model: int | None = None
    max_queued_rows: int | None = None
    max_queued_rows_per_model: int | None = None
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    keep_alive_s: float = 75.0
    ping_timeout_s: float = 30.0
    drain_s: float = 20.0
    timeline: int = 2000
    spans: str = "off"
    compile: str = "background"
    max_batch: tuple[dict[str, int], ...] = ()
    limits: Limits = Limits()
    engine: EngineSettings = EngineSettings()
    address: str = ""

    def __post_init__(self) -> None:
        """Write origins in lower case, as browsers do. Raise DefinitionError for invalid ones, as a page's address."""
        origins: Any = self.allowed_origins
        for origin in [origins] if isinstance(origins, str) else origins:
            is_one = isinstance(origin, str) and re.fullmatch(r"null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin.lower())
            if not is_one or isinstance(origins, str):
                told = f"expected an origin, such as https://a.example, got {origin!r:.80}"
                raise DefinitionError(f"allowed origins: {told}{' instead of several' if is_one else ''}")
        object.__setattr__(self, "allowed_origins", tuple(origin.lower() for origin in origins))

    def at(self, port: int) -> str:
        """Return an address of this server, as clients and gRPC write it."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
