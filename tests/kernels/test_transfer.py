"""What becomes of pinned memory when a device has failed: torch ends the process where it is freed after that."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from failing_device import CUDA, FailingDevice
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.guard import clear_frames
from paged_sdk.kernels.transfer import HostCopies, to_device
from paged_sdk.sampling.device_draw import _upload
from paged_sdk.sampling.sequence_settings import SequenceSettings


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FailingDevice:
    return FailingDevice(monkeypatch)


def copies(device: FailingDevice) -> HostCopies:
    return HostCopies(device.holds(torch.arange(6)), device.holds(torch.ones(2, 3)))


def test_copies_are_those_of_the_device(device: FailingDevice) -> None:
    numbers, ones = copies(device).wait()
    assert numbers.tolist() == list(range(6))
    assert ones.tolist() == [[1.0] * 3] * 2
    assert device.num_freed == 2  # though somebody holds what was returned


def test_copies_that_are_never_waited_for_are_freed(device: FailingDevice) -> None:
    copies(device)
    assert device.num_freed == 2


def test_copies_that_several_wait_for(device: FailingDevice) -> None:
    made = copies(device)
    assert made.wait() == made.wait()
    assert device.num_waits == 1


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_what_a_failed_device_was_to_copy_to_is_kept(device: FailingDevice, *, is_waited_for: bool) -> None:
    made = copies(device)
    device.has_failed = True
    if is_waited_for:
        with pytest.raises(torch.AcceleratorError):
            made.wait()
    del made
    assert not device.freed_late
    assert not device.num_freed


def test_a_device_fails_between_two_copies(device: FailingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([False, True])

    def check() -> None:
        device.has_failed = device.has_failed or next(asked)
        if device.has_failed:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, "check", check)
    with pytest.raises(torch.AcceleratorError) as caught:
        copies(device)
    clear_frames(caught.value)
    assert not device.freed_late


def test_what_was_there_before_is_no_pinned_memory(device: FailingDevice) -> None:
    held = copies(device).wait()
    device.has_failed = True
    del held
    assert not device.freed_late


def test_input_is_freed_once_it_is_sent(device: FailingDevice) -> None:
    """And not when whoever has sent it lets go of what arrived."""
    numbers, others = to_device(CUDA, np.arange(5), np.ones(3, np.float32))
    settings = _upload([SequenceSettings(SamplingParams(temperature=0.5, seed=3), 0)], [7], CUDA)
    assert device.num_freed == 2
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    assert others.tolist() == [1.0] * 3
    assert settings.positions.tolist() == [7]
