"""A CUDA device that is the CPU in disguise and fails when told to: for tests of what is let go of after that.

torch ends the process where pinned memory that has been used is freed after its device has failed: it would record an
event, which the device refuses. Here that is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from paged_sdk.kernels.transfer import HostCopies

__all__ = ["CUDA", "FailingDevice"]

CUDA: Final = torch.device("cuda", 0)


class _Pinned(bytearray):
    """Is pinned memory: what torch frees of a tensor's."""

    on_free: Callable[[], None]

    def __del__(self) -> None:
        self.on_free()


class _OnDevice(Tensor):
    """Is a tensor of the CPU that says it is on the device."""

    device = CUDA


class _Stream:
    def __init__(self, owner: FailingDevice) -> None:
        self._owner = owner

    def query(self) -> bool:
        self._owner.check()
        return True


class _Event:
    def __init__(self, owner: FailingDevice) -> None:
        self._owner = owner
        self._is_recorded = False

    def record(self, stream: object) -> None:
        self._owner.check()
        self._is_recorded = True

    def query(self) -> bool:
        if self._is_recorded:  # torch asks the device of no other
            self._owner.check()
        return True

    def synchronize(self) -> None:
        self._owner.num_waits += 1
        self._owner.check()


class FailingDevice:
    """Is used by all that is copied from it while a test runs, and by input that goes to it.

    :ivar has_failed: whether every operation fails from now on
    :ivar failing_wait: at which wait for copies it fails, counted from 1; None: at none
    :ivar num_waits: how often copies have been waited for
    :ivar num_freed: how many pieces of pinned memory have been freed while it was sound
    :ivar freed_late: the sizes of those that were freed after it had failed, which had been used
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_failed = False
        self.failing_wait: int | None = None
        self.num_waits = 0
        self.num_freed = 0
        self.freed_late: list[int] = []
        self._used: set[int] = set()
        empty, copy, to = torch.empty, Tensor.copy_, Tensor.to

        def emptied(*shape: Any, pin_memory: bool = False, **named: Any) -> Tensor:
            return self.pinned(*shape, **named) if pin_memory else empty(*shape, **named)

        def copied(own: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
            if non_blocking:
                self.check()
                self._used |= {own.data_ptr(), other.data_ptr()}
            return copy(own, other)

        def sent(own: Tensor, *args: Any, non_blocking: bool = False, **named: Any) -> Tensor:
            if args != (CUDA,):
                return to(own, *args, **named)
            self.check()
            self._used.add(own.data_ptr())
            return own.clone()

        monkeypatch.setattr(torch, "empty", emptied)
        monkeypatch.setattr(Tensor, "copy_", copied)
        monkeypatch.setattr(Tensor, "to", sent)
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream(self))

    def check(self) -> None:
        """Raise what every operation does after a device has failed."""
        self.has_failed = self.has_failed or self.num_waits == self.failing_wait
        if self.has_failed:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def pinned(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a tensor in pinned memory."""
        size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        memory = _Pinned(max(1, size.numel()) * dtype.itemsize)
        tensor = torch.frombuffer(memory, dtype=dtype)[: size.numel()].view(size)
        memory.on_free = self._freeing(tensor.data_ptr(), len(memory))
        return tensor

    def _freeing(self, address: int, num_bytes: int) -> Callable[[], None]:
        def freed() -> None:
            is_used = address in self._used
            self._used.discard(address)
            if not self.has_failed:
                self.num_freed += 1
            elif is_used:
                self.freed_late.append(num_bytes)

        return freed

    def holds(self, tensor: Tensor) -> Tensor:
        """Return the same values on the device."""
        return tensor.as_subclass(_OnDevice)

    def let_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have everything copied from it that a step copies to the host."""
        begin = HostCopies.__init__

        def init(own: HostCopies, *tensors: Tensor) -> None:
            begin(own, *map(self.holds, tensors))

        monkeypatch.setattr(HostCopies, "__init__", init)
