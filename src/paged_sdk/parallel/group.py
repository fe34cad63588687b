"""Run the collectives of tensor-parallel ranks (all-reduce, all-gather, broadcast, messages), by torch.distributed."""

from __future__ import annotations

import marshal
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from paged_sdk.config.env import nccl_leaves_the_process
from paged_sdk.errors import EngineDeadError, ModelLoadError
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.ranks import ColumnJoin, SharedSum
from paged_sdk.parallel.gloo_sockets import gloo_sockets, open_descriptors

__all__ = ["Group", "Message"]

Message = tuple[Any, ...]
"""A tuple of plain values: numbers, strings, bytes, and lists and tuples of these."""

# Most messages fit into one frame: a step of 30 sequences, or the hidden states of two.
_FRAME: Final = 16 * 1024
_LENGTH_BYTES: Final = 8
# An idle rank waits for the next message, which comes with the next request: there is no timeout.
_FOREVER: Final = timedelta(days=3650)
_CPU: Final = torch.device("cpu")
# Dtypes that are summed in float32 on the CPU.
_NARROW: Final = (torch.float32, torch.bfloat16, torch.float16)
_LOOPBACK: Final = "127.0.0.1"
# Timeout for connecting: every rank has announced by now that it is about to connect.
_JOIN: Final = timedelta(seconds=60)


class Group:
    """Holds one rank's connections to the other ranks. All ranks must make the same calls in the same order.

    torch's default process group is not used: a process has only one, and may hold several models.

    :param rank: this process's rank
    :param size: number of ranks
    :param explain: converts the error of a failed call, which means that another rank has ended
    :ivar shared: sums and gathers float32 in memory shared by ranks on one machine; None: they share no memory
    :ivar is_in_lockstep: whether all ranks run the same code now, so that rank 0 need not send messages to the others
    """

    def __init__(self, rank: int, size: int, explain: Callable[[RuntimeError], Exception] | None = None) -> None:
        self.rank = rank
        self.size = size
        self._explain = explain or _lost
        self._ranks: Any = None
        self._devices: Any = None
        self._has_ended = False
        self.is_in_lockstep: bool = False
        self.shared: SharedSum | None = None
        self._pipes: Sequence[int] = ()
        self._connections: Sequence[socket.socket] = ()
        self._frame = torch.zeros(_FRAME, dtype=torch.uint8)

    def join(self, store: Store, *, address: str | None = None, device: torch.device = _CPU) -> None:
        """Connect to all other ranks; blocks until every rank has called this.

        :param store: the store in which ranks publish their addresses
        :param address: address under which other machines reach this one; None: all ranks are on this machine
        :param device: the device that this rank computes on
        """
        gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks most of its members
        before = open_descriptors()
        options = gloo._Options()
        options._timeout = _JOIN
        options._devices = [gloo.create_device(hostname=address or _LOOPBACK)]
        try:
            self._ranks = gloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise self._explain(error) from error
        self._ranks.set_timeout(_FOREVER)
        if address is not None:
            self._connections = gloo_sockets(store, open_descriptors() - before, rank=self.rank, size=self.size)
        self.smallest(0)  # a barrier: other ranks may still be reading from the store
        if device.type != "cpu":
            self._devices = _connect_devices(PrefixStore("devices", store), rank=self.rank, size=self.size)
            # NCCL connects at the first all-reduce, which must not happen while a graph is captured.
            self.sum_(torch.zeros(1, dtype=torch.float32, device=device))
            torch.cuda.synchronize(device)

    @property
    def is_on_devices(self) -> bool:
        """Return whether each rank has its own GPU, so that collectives of activations run there, by NCCL."""
        return self._devices is not None

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Mark the ``with`` block as run by all ranks."""
        self.is_in_lockstep = True
        try:
            yield
        finally:
            self.is_in_lockstep = False

    @property
    def is_joined(self) -> bool:
        """Return whether the ranks are connected."""
        return self._ranks is not None

    def share(self, library: NativeLibrary, file: int) -> None:
        """Map the memory that all ranks share.

        :param file: see :func:`~paged_sdk.kernels.native.ranks.make_shared_memory`
        """
        self.shared = SharedSum(library, file, rank=self.rank, size=self.size)

    def use_pipes(self, pipes: Sequence[int]) -> None:
        """Send messages through pipes from now on: a pipe wakes one thread per side for a message, gloo two.

        :param pipes: on rank 0, one pipe to each other rank; elsewhere the one pipe from rank 0
        """
        self._pipes = pipes

    def end(self) -> None:
        """Make every wait for another rank fail, on all threads of this process and, in turn, on the other ranks."""
        self._has_ended = True
        if self.shared is not None:
            self.shared.end()
        _abort(self._devices)  # kernels already launched end with meaningless results: see check()
        for connection in self._connections:
            with suppress(OSError):  # already broken
                connection.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise if another rank has ended: results computed since may be invalid."""
        if self._has_ended:
            raise self._explain(RuntimeError("another rank has ended"))

    def leave(self) -> None:
        """Close the connections; a second call does nothing."""
        _abort(self._devices)
        self._ranks = self._devices = None
        for connection in self._connections:
            connection.close()
        self._connections = ()

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce a tensor in place by summation; all ranks get the same bits.

        The CPU sums in float32 or wider. GPUs sum in the tensor's dtype, and the host does not wait.

        :param tensor: of the same shape and dtype on all ranks
        """
        if tensor.device.type != "cpu":
            whole = tensor.contiguous()
            self._wait(lambda ranks: ranks.allreduce([whole]), whole)
            return tensor if whole is tensor else tensor.copy_(whole)
        if self.shared is not None and tensor.dtype in _NARROW:
            wide = tensor.to(torch.float32, memory_format=torch.contiguous_format)
            self.shared.add_(wide)
            self.check_shared()
            if wide is not tensor:
                tensor.copy_(wide)
        else:
            wide = tensor.to(torch.float32) if tensor.dtype in _NARROW else tensor
            self._wait(lambda ranks: ranks.allreduce([wide]))
            if wide is not tensor:
                tensor.copy_(wide)
        return tensor

    @property
    def joins(self) -> bool:
        """Return whether :meth:`join_columns` is available; ranks that share memory need no partial sums."""
        return self.shared is not None

    def join_columns(self, own: Tensor, widths: Tensor) -> Tensor:
        """All-gather columns through shared memory; requires :attr:`joins`.

        :param own: this rank's columns, ``[num_rows, width]``, at most 32 bits per element
        :param widths: number of columns per rank, contiguous int32
        """
        assert self.shared is not None
        joined = ColumnJoin(self.shared, widths)(own)
        self.check_shared()
        return joined

    def check_shared(self) -> None:
        """Raise if a collective in shared memory was left incomplete because a rank ended."""
        if self.shared is not None and self.shared.has_failed:
            raise self._explain(RuntimeError("a sum in shared memory was not whole"))

    def smallest(self, number: int) -> int:
        """All-reduce a number by minimum."""
        one = torch.tensor([-number])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(lambda ranks: ranks.allreduce([one], options))
        return -int(one)

    def gather(self, own: Tensor, widths: Sequence[int]) -> Tensor:
        """All-gather columns.

        :param own: this rank's columns, ``[num_rows, width]``
        :param widths: number of columns per rank
        """
        num_rows, widest = len(own), max(widths)
        padded = torch.nn.functional.pad(own, (0, widest - own.shape[1])).contiguous()
        found = own.new_empty(self.size * num_rows, widest)
        self._wait(lambda ranks: ranks._allgather_base(found, padded), own)
        parts = found.view(self.size, num_rows, widest)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], -1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast rank 0's values into a contiguous tensor."""
        self._wait(lambda ranks: ranks.broadcast(tensor, 0), tensor)
        return tensor

    def first_error(self, error: Exception | None) -> Exception | None:
        """Exchange errors between ranks.

        :param error: this rank's error, or None
        :returns: this rank's error; if it has none, a ModelLoadError with the text of the lowest failing rank; None if
            no rank has failed
        """
        rank = self.smallest(self.size if error is None else self.rank)
        if rank == self.size:
            return None
        text = "" if error is None else f"{type(error).__name__}: {error}"
        content = text.encode("utf-8", "replace")[:_FRAME]
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        frame[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else frame[:0]
        self._broadcast(frame, rank)
        if error is not None:
            return error
        said = frame.numpy().tobytes().rstrip(b"\0").decode("utf-8", "replace")
        return ModelLoadError(f"rank {rank} of {self.size} could not do its part: {said}")

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to one rank, which must call :meth:`receive`."""
        self._wait(lambda ranks: ranks.send([tensor.contiguous()], rank, 0))

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Receive a tensor of the same shape and dtype from one rank into a contiguous tensor."""
        self._wait(lambda ranks: ranks.recv([tensor], rank, 0))
        return tensor

    def send_message(self, message: Message) -> None:
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
        self._broadcast(self._frame)
        if len(data) > room:
            self._broadcast(torch.from_numpy(data.copy()))

    def receive_message(self) -> Message:
        """Wait for the next message from rank 0."""
        if self._pipes:
            (pipe,) = self._pipes
            return _message(self._read(pipe, int.from_bytes(self._read(pipe, _LENGTH_BYTES), "little")))
        self._broadcast(self._frame)
        frame = self._frame.numpy()
        length = int(frame[:_LENGTH_BYTES].view(np.int64)[0])
        if length <= _FRAME - _LENGTH_BYTES:
            return _message(frame[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
        rest = torch.empty(length, dtype=torch.uint8)
        self._broadcast(rest)
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

    def _broadcast(self, tensor: Tensor, rank: int = 0) -> None:
        self._wait(lambda ranks: ranks.broadcast(tensor, rank))

    def _wait(self, start: Callable[[Any], Any], on: Tensor | None = None) -> None:
        """Start a collective and wait for it; on a GPU, only kernels launched later wait.

        :param on: a tensor whose device selects gloo or NCCL; None: gloo
        """
        ranks = self._ranks if on is None or on.device.type == "cpu" else self._devices
        assert ranks is not None, "the ranks are not connected: join() was not called, or leave() was"
        try:
            start(ranks).wait()
        except RuntimeError as error:
            raise self._explain(error) from error


def _abort(devices: Any) -> None:
    """Abort the NCCL connections, if there are any; they may be broken already."""
    if devices is not None:
        with suppress(RuntimeError):
            devices.abort()


def _connect_devices(store: Store, *, rank: int, size: int) -> Any:
    """Return an NCCL process group of the ranks' CUDA devices."""
    nccl: Any = dist.ProcessGroupNCCL
    with nccl_leaves_the_process():
        return nccl(store, rank, size, nccl.Options())


def _message(content: bytes) -> Message:
    message: Message = marshal.loads(content)
    return message


def _lost(error: RuntimeError) -> Exception:
    return EngineDeadError(f"another rank has ended: {error}")
