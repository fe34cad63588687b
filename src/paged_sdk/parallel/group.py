"""Let the processes that compute a model together add up, gather and pass on tensors, through torch.distributed."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from paged_sdk.errors import EngineDeadError
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.ranks import SharedSum

__all__ = ["Group", "Message"]

Message = tuple[Any, ...]
"""Plain values: numbers, texts, bytes, lists and tuples of them."""

# Most messages fit the first frame: a step of 30 texts, or the hidden states of two.
_FRAME: Final = 16 * 1024
_LENGTH_BYTES: Final = 8
# A rank that has nothing to do waits for the next message: how long is up to whoever uses the model.
_FOREVER: Final = timedelta(days=3650)
# What is added up in float32.
_NARROW: Final = (torch.float32, torch.bfloat16, torch.float16)
_LOOPBACK: Final = "127.0.0.1"


class Group:
    """Holds one rank's connections to the others. Every rank has to make the same calls in the same order.

    It is no default group of torch's, of which a process has one: several models may live in a process.

    :param rank: this process's number
    :param size: how many there are
    :param explain: makes the error for a call that has failed, which means that another rank has ended
    :ivar shared: adds up float32 of ranks on one machine; None: they share no memory
    """

    def __init__(self, rank: int, size: int, explain: Callable[[RuntimeError], Exception] | None = None) -> None:
        self.rank = rank
        self.size = size
        self._explain = explain or _lost
        self._ranks: Any = None
        self.shared: SharedSum | None = None
        self._pipes: Sequence[int] = ()
        self._frame = torch.zeros(_FRAME, dtype=torch.uint8)

    def join(self, store: Store, *, one_host: bool) -> None:
        """Wait until every rank has come, and connect to them.

        :param store: where ranks say how they are found
        :param one_host: whether all ranks are on this machine, and nobody else is to reach them
        """
        gloo: Any = dist.ProcessGroupGloo  # whose own description lacks most of it
        options = gloo._Options()
        options._timeout = _FOREVER
        options._devices = [gloo.create_device(hostname=_LOOPBACK) if one_host else gloo.create_default_device()]
        try:
            self._ranks = gloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise self._explain(error) from error
        self.smallest(0)  # the others may still be looking for what is in the store

    @property
    def is_joined(self) -> bool:
        """Say whether the ranks are connected."""
        return self._ranks is not None

    def share(self, library: NativeLibrary, file: int) -> None:
        """Take part in memory that all ranks share.

        :param file: see :func:`~paged_sdk.kernels.native.ranks.make_shared_memory`
        """
        self.shared = SharedSum(library, file, rank=self.rank, size=self.size)

    def talk_through(self, pipes: Sequence[int]) -> None:
        """Have messages go through pipes: on the first rank to each of the others, there from the first.

        A message through gloo wakes two threads on each side, through a pipe one.
        """
        self._pipes = pipes

    def leave(self) -> None:
        """Close the connections; a second call does nothing."""
        self._ranks = None

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up what the ranks have, of one shape and dtype, in place; all get the same bits.

        Where they share memory, it is added up in float32 at least.
        """
        if self.shared is not None and tensor.dtype in _NARROW:
            wide = tensor.to(torch.float32, memory_format=torch.contiguous_format)
            self.shared.add_(wide)
            self.check_shared()
            if wide is not tensor:
                tensor.copy_(wide)
        else:
            self._wait(lambda ranks: ranks.allreduce([tensor]))
        return tensor

    def check_shared(self) -> None:
        """Raise if a sum in shared memory was not whole."""
        if self.shared is not None and self.shared.has_failed:
            raise self._explain(RuntimeError("a sum in shared memory was not whole"))

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers that the ranks have."""
        one = torch.tensor([-number])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(lambda ranks: ranks.allreduce([one], options))
        return -int(one)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Pass a tensor on to one rank, which receives it."""
        self._wait(lambda ranks: ranks.send([tensor.contiguous()], rank, 0))

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Overwrite a contiguous tensor by what one rank sends, of its shape and dtype."""
        self._wait(lambda ranks: ranks.recv([tensor], rank, 0))
        return tensor

    def tell(self, message: Message) -> None:
        """Send a message from rank 0 to all others."""
        content = marshal.dumps(message)
        if self._pipes:
            for pipe in self._pipes:
                self._write(pipe, len(content).to_bytes(_LENGTH_BYTES, "little") + content)
            return
        frame = self._frame.numpy()
        frame[:_LENGTH_BYTES].view(np.int64)[0] = len(content)
        data = np.frombuffer(content, np.uint8)
        room = _FRAME - _LENGTH_BYTES
        if len(data) <= room:
            frame[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        self._pass_on(self._frame)
        if len(data) > room:
            self._pass_on(torch.from_numpy(data.copy()))

    def hear(self) -> Message:
        """Wait for the next message of rank 0."""
        if self._pipes:
            (pipe,) = self._pipes
            return _message(self._read(pipe, int.from_bytes(self._read(pipe, _LENGTH_BYTES), "little")))
        self._pass_on(self._frame)
        frame = self._frame.numpy()
        length = int(frame[:_LENGTH_BYTES].view(np.int64)[0])
        if length <= _FRAME - _LENGTH_BYTES:
            return _message(frame[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
        rest = torch.empty(length, dtype=torch.uint8)
        self._pass_on(rest)
        return _message(rest.numpy().tobytes())

    def _write(self, pipe: int, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(pipe, view) :]
        except OSError as error:
            raise self._explain(RuntimeError(f"a message cannot be sent: {error}")) from error

    def _read(self, pipe: int, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(pipe, size)
            if not part:
                raise self._explain(RuntimeError("no more messages come"))
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _pass_on(self, tensor: Tensor) -> None:
        self._wait(lambda ranks: ranks.broadcast(tensor, 0))

    def _wait(self, start: Callable[[Any], Any]) -> None:
        assert self._ranks is not None, "the group was left, or nobody has joined it"
        try:
            start(self._ranks).wait()
        except RuntimeError as error:
            raise self._explain(error) from error


def _message(content: bytes) -> Message:
    message: Message = marshal.loads(content)
    return message


def _lost(error: RuntimeError) -> Exception:
    return EngineDeadError(f"another rank has ended: {error}")
