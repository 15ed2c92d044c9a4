"""A load generator over HTTP: requests at given times whatever the server does (open loop), or a fixed number at once.

In the words of other serving benchmarks: TTFT is the time to the first result of a stream, ITL the time between two of
its results, E2EL a request's latency from when it was due.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from cellrt.errors import DefinitionError

MOST_SAID = 500
REACH_S = 10.0
"""The time that a server may take to answer at all, before a load is sent."""
REFUSALS = (401, 404, 500)
"""Answers after which each request of a load would be refused: no key, no such model, one that cannot be served."""
MS = 1e3


@dataclass
class Load:
    """The requests to send, and how.

    Attributes:
        url: where each request goes.
        bodies: one for each request.
        due_s: when each is sent, from the start; empty: as soon as there is room.
        max_concurrency: requests at once; None: any number.
        is_stream: whether the answers are events.
        headers: the headers of each request.
        timeout_s: the timeout of each request.
    """

    url: str
    bodies: Sequence[bytes]
    due_s: Sequence[float] = ()
    max_concurrency: int | None = None
    is_stream: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0


@dataclass
class Answers:
    """The outcome of a load. Times are in seconds and cover the requests answered with status 200."""

    latency_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    said: str = ""
    """The beginning of what the first that was refused was told, or of what kept it from the server."""
    late_s: list[float] = field(default_factory=list)
    """The delay with which each request was sent: large where this client was the bottleneck."""
    duration_s: float = 0.0

    def summary(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """Return the figures by name, for people and JSON."""
        found: dict[str, Any] = {
            "successful_requests": len(self.latency_s),
            "failed_requests": sum(self.failures.values()),
            "failures": dict(self.failures),
            "duration_s": self.duration_s,
            "request_throughput": len(self.latency_s) / max(self.duration_s, 1e-9),
        }
        for name, values in (
            ("e2el", self.latency_s),
            ("ttft", self.first_s),
            ("itl", self.between_s),
            ("sent_late", self.late_s),
        ):
            if values:
                found[f"mean_{name}_ms"] = MS * float(np.mean(values))
                for percentile in percentiles:
                    found[f"p{percentile:g}_{name}_ms"] = MS * float(np.percentile(values, percentile))
        return found


def arrival_times(rate: float, count: int, burstiness: float, seed: int) -> list[float]:
    """Return the times at which requests are due, with gaps drawn from a gamma distribution.

    ``burstiness`` is its shape: 1 is a Poisson process, less than 1 is burstier.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times: list[float] = gaps.cumsum().tolist()
    return times


async def check_served(url: str, headers: dict[str, str]) -> None:
    """Ask once before a load is sent, and raise what is wrong; ``url``: of the model's metadata, or of the load itself.

    Raise DefinitionError, with the address, if nothing there answers HTTP, or if it answers in our words why it does
    not serve that. What other servers answer to it says nothing of the load.
    """
    timeout = aiohttp.ClientTimeout(total=REACH_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(url) as response,
        ):
            content = await response.read() if response.status in REFUSALS else b""
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        said = str(error) or f"no answer within {REACH_S:g} s"
        raise DefinitionError(f"cannot reach {url}: {type(error).__name__}: {said}") from None
    if said := _refusal(content):
        raise DefinitionError(f"nothing was sent: {url}: {said}")


def _refusal(content: bytes) -> str:
    """Return the message of an error response in cellrt's JSON format; empty for any other response."""
    try:
        told = json.loads(content)
    except ValueError:
        return ""
    is_ours = isinstance(told, dict) and isinstance(told.get("error"), str) and "type" in told
    return told["error"] if is_ours else ""


async def send(load: Load, progress: Callable[[int], None]) -> Answers:
    """Send a load and wait for all answers; ``progress`` hears of each."""
    answers = Answers()
    room = asyncio.Semaphore(load.max_concurrency or len(load.bodies) + 1)
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout, headers=load.headers) as session:
        begin_s = time.perf_counter()

        async def one(number: int) -> None:
            due_s = begin_s + load.due_s[number] if load.due_s else time.perf_counter()
            try:
                sent_s = time.perf_counter()
                answers.late_s.append(sent_s - due_s)
                await _one(session, load, load.bodies[number], due_s, answers)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                answers.said = answers.said or f"{load.url}: {error}"[:MOST_SAID]
                answers.failures[type(error).__name__] += 1
            finally:
                room.release()
                progress(1)

        tasks = []
        for number in range(len(load.bodies)):
            if load.due_s:
                await asyncio.sleep(max(0.0, begin_s + load.due_s[number] - time.perf_counter()))
            await room.acquire()
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)
        answers.duration_s = time.perf_counter() - begin_s
    return answers


async def _one(session: aiohttp.ClientSession, load: Load, body: bytes, due_s: float, answers: Answers) -> None:
    """Send one request and record its outcome."""
    async with session.post(load.url, data=body) as response:
        if response.status != 200:
            answers.said = answers.said or (await response.text(errors="replace"))[:MOST_SAID].strip()
            answers.failures[str(response.status)] += 1
            return
        if not load.is_stream:
            await response.read()
        else:
            last_s = None
            async for line in response.content:
                if line.startswith(b'data: {"error"'):
                    answers.failures["error in a stream"] += 1
                    return
                if not line.startswith(b"data: ") or line.startswith(b'data: {"done"'):
                    continue
                now_s = time.perf_counter()
                (answers.first_s if last_s is None else answers.between_s).append(now_s - (last_s or due_s))
                last_s = now_s
    answers.latency_s.append(time.perf_counter() - due_s)
