"""The CUDA device keeps what ``Device`` promises."""

from __future__ import annotations

import pytest
import torch

from tests.engine.helpers import WAIT_S
from tests.waiting import until

pytestmark = pytest.mark.gpu
LARGE = 4 << 20


@pytest.fixture(params=["signal", "copy", "event"])
def device(request):
    from cellrt.worker.device.cuda import CudaDevice

    device = CudaDevice("cuda:0", request.param)
    with device.entered():
        yield device
        device.synchronize()


def wait(device, count):
    until(lambda: device.num_completed() >= count, "the device counts", WAIT_S)


def test_tasks_are_counted_in_order_with_and_without_downloads(device):
    pinned = [device.pinned(LARGE) for _ in range(20)]
    values = torch.zeros(LARGE, dtype=torch.uint8, device="cuda:0")
    sources = [torch.zeros_like(values) for _ in range(20)]  # they live as long as the downloads

    def task(k):
        values.fill_(k)
        if k % 3 == 0:
            device.download(pinned[k], sources[k].copy_(values))

    for k in range(20):
        device.submit(lambda k=k: task(k), k % 3 == 0)
    for k in range(20):
        wait(device, k + 1)
        if k % 3 == 0:
            assert (pinned[k] == k).all()


@pytest.mark.parametrize("num_bytes", [256, LARGE])
def test_compute_waits_for_its_upload(device, num_bytes):
    source, target = device.pinned(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    results = [device.pinned(num_bytes) for _ in range(10)]
    for k, result in enumerate(results):
        source.fill_(k)

        def work(result=result):
            device.upload(target, source)
            device.download(result, target + 1)

        device.submit(work, True)
        wait(device, k + 1)
        assert (result == k + 1).all()


def test_a_captured_program_repeats_what_it_did(device):
    values = torch.ones(1000, device="cuda:0")

    def program():
        values.mul_(2)

    device.submit(program, False)
    replays = []
    device.submit(lambda: replays.append(device.capture(program).replay), False)  # it runs once, to be looked at
    wait(device, 2)
    device.synchronize()
    values.fill_(1)
    device.submit(replays[0], False)
    device.submit(replays[0], False)
    wait(device, 4)
    device.synchronize()
    assert (values == 4).all()


def test_what_cannot_be_captured_does_no_harm(device):
    values = torch.ones(1000, device="cuda:0")

    def looks():
        if bool((values > 0).all()):
            values.add_(1)

    device.submit(looks, False)
    with pytest.raises(Exception):  # noqa: B017 - torch has several for this
        device.capture(looks)
    device.check()
    device.submit(lambda: values.add_(1), False)
    wait(device, 2)
    device.synchronize()
    assert (values == 3).all()


def test_errors_of_a_cell_are_told_from_those_of_the_device(device):
    with pytest.raises(RuntimeError) as wrong:
        torch.ones(2, device="cuda:0") @ torch.ones(3, device="cuda:0")
    assert not device.is_fatal(wrong.value)
    with pytest.raises(torch.OutOfMemoryError) as full:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda:0")
    assert device.is_fatal(full.value)
