"""The signal: a count on the device, seen in host memory."""

import time

import pytest
import torch

from cellrt.kernels.signal import Signal, signal
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches


def wait_for(sent: Signal, count: int) -> None:
    deadline = time.monotonic() + 30
    while sent.completed() < count and time.monotonic() < deadline:
        pass


def test_each_signal_counts_one(device: str) -> None:
    sent = Signal(device)
    assert sent.completed() == 0
    for _ in range(3):
        sent.send()
    wait_for(sent, 3)
    assert sent.completed() == 3
    assert sent.count.item() == 3


def test_count_passes_what_4_bytes_hold(device: str) -> None:
    sent = Signal(device)
    sent.count.fill_(2**32 - 1)
    sent.send()
    wait_for(sent, 2**32)
    assert sent.completed() == 2**32


def test_signals_of_two_engines_are_apart(device: str) -> None:
    first, second = Signal(device), Signal(device)
    first.send()
    wait_for(first, 1)
    assert (first.completed(), second.completed()) == (1, 0)


@pytest.mark.gpu
def test_results_are_in_host_memory_before_their_signal() -> None:
    sent = Signal("cuda")
    value, result = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20).pin_memory()
    for task in range(1, 51):
        value += 1
        result.copy_(value, non_blocking=True)
        sent.send()
        wait_for(sent, task)
        assert result[0] == result[-1] == task


@pytest.mark.gpu
def test_captured_signal_counts_at_every_replay() -> None:
    sent = Signal("cuda")
    sent.send()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent.send()
    for _ in range(5):
        graph.replay()
    wait_for(sent, 6)
    assert sent.completed() == 6


@pytest.mark.parametrize(
    ("count", "word", "message"),
    [
        (torch.zeros(1), torch.zeros(1, dtype=torch.int64), "count must be int64"),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "word must be int64"),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device="meta"), "in host memory"),
    ],
)
def test_wrong_words_are_refused(count: torch.Tensor, word: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        signal(count, word)


@needs_compiler
def test_one_write_follows_an_ordered_addition_in_device_memory() -> None:
    from cellrt.kernels.signal import triton as kernel

    with recorded_launches() as launches:
        kernel.signal(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0
        assert compiled.ptx.count("atom.") == compiled.ptx.count("atom.global.sys.acq_rel.add.u64") == 1
        assert compiled.ptx.count("st.global") == compiled.ptx.count("st.global.wt.b64") == 1
        assert compiled.ptx.index("atom.") < compiled.ptx.index("st.global.wt.b64")
