"""What a chain of LSTM cells is usually served with: whole-request batching, in several strengths.

Every peer is one server with one LSTM layer: ``submit(x [n, input])`` gives a future of the last hidden state
``[hidden]``. They differ in what they batch and how they fill it up:

============== ====================================================================================
OneAtATime     ``nn.LSTM``, no batching
Padded         ``nn.LSTM``, a batch in order of arrival, padded to its longest sentence
Bucketed       ``nn.LSTM``, only sentences of similar length together, buckets in turn
Packed         ``nn.LSTM`` on a packed sequence: in order of arrival, no padding computed
OnnxPadded     as Padded, with onnxruntime's LSTM
OnnxBucketed   as Bucketed, with onnxruntime's LSTM
============== ====================================================================================

No peer waits for a batch to fill: when a worker is free, it takes what is there, up to ``max_batch``
(BatchMaker 2.7.1, which found this better than any time-out).
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

Runner = Callable[[Sequence[Tensor]], Tensor]
"""Sentences ``[n_i, input]`` -> last hidden states ``[batch, hidden]``, in the same order."""

CellStep = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``x [batch, input], h [batch, hidden], c [batch, hidden]`` -> the next ``h`` and ``c``."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sentence ``[n, input]`` that waits for a batch, and where its answer goes."""

    x: Tensor
    future: Future[Tensor]


class Backlog(Protocol):
    """The sentences that wait, and the order in which batches take them."""

    def __len__(self) -> int: ...

    def add(self, waiting: Waiting) -> None:
        """Put a sentence behind those that wait."""

    def take(self, limit: int) -> list[Waiting]:
        """Remove and return the next batch: at least one where any wait, at most ``limit``."""


class InOrder:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: Waiting) -> None:
        """Put a sentence behind those that wait."""
        self._queue.append(waiting)

    def take(self, limit: int) -> list[Waiting]:
        """The sentences that wait longest."""
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]


class Buckets:
    """A queue for each range of lengths, in turn; bucket ``i`` holds ``(width * i, width * i + width]``.

    The number of buckets is not bounded: one exists while something waits in it.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._queues: dict[int, deque[Waiting]] = {}
        self._last_served = -1
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, waiting: Waiting) -> None:
        """Put a sentence into the bucket of its length."""
        bucket = (len(waiting.x) - 1) // self._width
        self._queues.setdefault(bucket, deque()).append(waiting)
        self._num_waiting += 1

    def take(self, limit: int) -> list[Waiting]:
        """A batch from the first bucket after the one served last that is not empty."""
        if not self._queues:
            return []
        later = [bucket for bucket in self._queues if bucket > self._last_served]
        bucket = min(later or self._queues)
        queue = self._queues[bucket]
        batch = [queue.popleft() for _ in range(min(limit, len(queue)))]
        if not queue:
            del self._queues[bucket]
        self._last_served = bucket
        self._num_waiting -= len(batch)
        return batch


class Peer(ABC):
    """A server: one backlog, and worker threads that each run one batch after another.

    The cores (``threads``, all of the machine by default) are divided among ``workers``; by default there
    is one worker a core, which was measured to be the stronger form under load. ``submit`` and ``close``
    may be called by any thread. Each worker sets torch's thread count for itself; torch also gives that
    count to threads that first use it later.
    """

    max_batch_default: ClassVar[int] = 512

    def __init__(
        self,
        lstm: nn.LSTM,
        *,
        max_batch: int | None = None,
        threads: int | None = None,
        workers: int | None = None,
    ) -> None:
        """Start the workers; raises ValueError for an LSTM or a number that cannot be served with."""
        _check_lstm(lstm)
        threads = threads or os.cpu_count() or 1
        workers = workers or threads
        self._max_batch = max_batch or self.max_batch_default
        if min(threads, workers, self._max_batch) < 1:
            raise ValueError("max_batch, threads and workers must be positive")
        self._input_size = lstm.input_size
        self._backlog = self._new_backlog()
        self._changed = threading.Condition()
        self._num_idle = 0
        self._is_closed = False
        threads_each = max(1, threads // workers)
        runners = [self._new_runner(lstm, threads_each) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(runner, threads_each), daemon=True) for runner in runners
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, x: Tensor) -> Future[Tensor]:
        """Queue a float32 sentence ``[n, input]``, n >= 1; the result is its last hidden state ``[hidden]``.

        Raises ValueError for another shape and RuntimeError after ``close``.
        """
        if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != self._input_size:
            raise ValueError(f"a sentence must be [n, {self._input_size}] with n >= 1, not {list(x.shape)}")
        future: Future[Tensor] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the server is closed")
            self._backlog.add(Waiting(x, future))
            self._changed.notify()
        return future

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what waits, let running batches finish and end the workers; may be called twice.

        Raises TimeoutError where a worker has not ended after ``timeout_s``.
        """
        with self._changed:
            self._is_closed = True
            cancelled = [self._backlog.take(1)[0] for _ in range(len(self._backlog))]
            self._changed.notify_all()
        for waiting in cancelled:
            waiting.future.cancel()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"a worker is still busy after {timeout_s} s")

    def _new_backlog(self) -> Backlog:
        return InOrder()

    @abstractmethod
    def _new_runner(self, lstm: nn.LSTM, threads: int) -> Runner:
        """What one worker runs its batches with."""

    def _work(self, run: Runner, threads: int) -> None:
        """Run batches until the server is closed."""
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while batch := self._next_batch():
                _answer(run, batch)

    def _next_batch(self) -> list[Waiting]:
        """Wait for sentences and take this worker's share of them; empty once the server is closed."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: len(self._backlog) > 0 or self._is_closed)
            share = math.ceil(len(self._backlog) / self._num_idle)
            self._num_idle -= 1
            return self._backlog.take(min(self._max_batch, share)) if not self._is_closed else []


class OneAtATime(Peer):
    """``nn.LSTM`` on one sentence after another."""

    max_batch_default = 1

    def _new_runner(self, lstm: nn.LSTM, threads: int) -> Runner:
        return lambda sentences: torch.cat([lstm(x)[1][0] for x in sentences])


class Padded(Peer):
    """``nn.LSTM`` on batches in order of arrival, padded to the longest sentence of each.

    Small batches by default: with sentences of very different lengths, a large one is mostly padding.
    """

    max_batch_default = 16

    def _new_runner(self, lstm: nn.LSTM, threads: int) -> Runner:
        def run(sentences: Sequence[Tensor]) -> Tensor:
            outputs: Tensor = lstm(pad_sequence(list(sentences)))[0]
            last = torch.tensor([len(x) - 1 for x in sentences])
            return outputs[last, torch.arange(len(sentences))]

        return run


class Bucketed(Padded):
    """``nn.LSTM`` on batches of similar length (the paper's baseline), buckets of width 10 taken in turn.

    A batch is padded to its longest sentence, which is never more than the bucket's upper end that the
    paper pads to.
    """

    max_batch_default = 512

    def _new_backlog(self) -> Backlog:
        return Buckets(width=10)


class Packed(Peer):
    """``nn.LSTM`` on packed sequences: batches in order of arrival, no step past a sentence's end."""

    def _new_runner(self, lstm: nn.LSTM, threads: int) -> Runner:
        def run(sentences: Sequence[Tensor]) -> Tensor:
            last: Tensor = lstm(pack_sequence(list(sentences), enforce_sorted=False))[1][0]
            return last[0]

        return run


class OnnxPadded(Peer):
    """onnxruntime's LSTM on batches in order of arrival, padded to the longest sentence of each."""

    max_batch_default = 16

    def _new_runner(self, lstm: nn.LSTM, threads: int) -> Runner:
        session = _new_session(lstm_to_onnx(lstm), threads)

        def run(sentences: Sequence[Tensor]) -> Tensor:
            feeds = {
                "x": pad_sequence(list(sentences)).numpy(),
                "lengths": np.array([len(x) for x in sentences], dtype=np.int32),
            }
            return torch.from_numpy(session.run(None, feeds)[0])[0]

        return run


class OnnxBucketed(OnnxPadded):
    """onnxruntime's LSTM on batches of similar length, buckets of width 10 taken in turn."""

    max_batch_default = 512

    def _new_backlog(self) -> Backlog:
        return Buckets(width=10)


def lstm_to_onnx(lstm: nn.LSTM) -> bytes:
    """The ONNX model of a one-layer LSTM.

    Inputs ``x [steps, batch, input]`` and ``lengths [batch]`` (int32), output ``h [1, batch, hidden]``.

    ``h`` is the state after each row's own length. torch keeps its gates in the order input, forget, cell,
    output; ONNX wants input, output, forget, cell.
    """
    from onnx import TensorProto, helper, numpy_helper  # a bare machine runs the other peers without it

    def reorder(parameter: Tensor) -> Tensor:
        i, f, c, o = parameter.detach().chunk(4)
        return torch.cat([i, o, f, c])

    parameters = {name.removesuffix("_l0"): reorder(value) for name, value in lstm.named_parameters()}
    biases = torch.cat([parameters["bias_ih"], parameters["bias_hh"]])
    weights = {"W": parameters["weight_ih"], "R": parameters["weight_hh"], "B": biases}
    node = helper.make_node("LSTM", ["x", "W", "R", "B", "lengths"], ["", "h"], hidden_size=lstm.hidden_size)
    real = TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "lstm",
        inputs=[
            helper.make_tensor_value_info("x", real, ["steps", "batch", lstm.input_size]),
            helper.make_tensor_value_info("lengths", TensorProto.INT32, ["batch"]),
        ],
        outputs=[helper.make_tensor_value_info("h", real, [1, "batch", lstm.hidden_size])],
        initializer=[numpy_helper.from_array(value[None].numpy(), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    serialized: bytes = model.SerializeToString()
    return serialized


def ideal(cell_step: CellStep, batch: int, steps: int, *, input_size: int, hidden_size: int, repeats: int = 5) -> float:
    """Requests of ``steps`` cells per second in a bare loop at full batch, on this thread's torch threads.

    Nothing is scheduled, gathered or padded: the best that batches of this size allow (BatchMaker 2.7.3
    reckons the same from its step time). The median of ``repeats`` loops.
    """
    x = torch.randn(batch, input_size)
    seconds: list[float] = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            h, c = torch.zeros(batch, hidden_size), torch.zeros(batch, hidden_size)
            start = time.perf_counter()
            for _ in range(steps):
                h, c = cell_step(x, h, c)
            seconds.append(time.perf_counter() - start)
    return batch / float(np.median(seconds[1:]))


def _check_lstm(lstm: nn.LSTM) -> None:
    plain = lstm.num_layers == 1 and not lstm.bidirectional and lstm.bias and lstm.proj_size == 0
    if not plain or lstm.batch_first:
        raise ValueError(f"a peer serves one plain LSTM layer with biases, steps first; this is {lstm}")


def _answer(run: Runner, batch: list[Waiting]) -> None:
    """Run a batch and complete its futures, with their result or with the error that the batch raised."""
    running = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
    if not running:
        return
    try:
        rows = run([waiting.x for waiting in running]).unbind()
    except Exception as error:
        for waiting in running:
            waiting.future.set_exception(error)
        return
    for waiting, row in zip(running, rows, strict=True):
        waiting.future.set_result(row)


def _new_session(model: bytes, threads: int) -> Any:
    """An onnxruntime session that computes with ``threads`` threads, the calling one among them."""
    import onnxruntime  # a bare machine runs the other peers without it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
