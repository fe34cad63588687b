"""Let the processes that compute a model together add up, gather and pass on tensors, through torch.distributed."""

from __future__ import annotations

import json
import marshal
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
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

__all__ = ["Group", "Message"]

Message = tuple[Any, ...]
"""Plain values: numbers, texts, bytes, lists and tuples of them."""

# Most messages fit the first frame: a step of 30 texts, or the hidden states of two.
_FRAME: Final = 16 * 1024
_LENGTH_BYTES: Final = 8
# A rank that has nothing to do waits for the next message: how long is up to whoever uses the model.
_FOREVER: Final = timedelta(days=3650)
_CPU: Final = torch.device("cpu")
# What is added up in float32.
_NARROW: Final = (torch.float32, torch.bfloat16, torch.float16)
_LOOPBACK: Final = "127.0.0.1"
# Until all ranks are connected, which all have said that they are about to do.
_JOIN: Final = timedelta(seconds=60)
_DESCRIPTORS: Final = "/proc/self/fd"


class Group:
    """Holds one rank's connections to the others. Every rank has to make the same calls in the same order.

    It is no default group of torch's, of which a process has one: several models may live in a process.

    :param rank: this process's number
    :param size: how many there are
    :param explain: makes the error for a call that has failed, which means that another rank has ended
    :ivar shared: adds up and joins float32 of ranks on one machine; None: they share no memory
    :ivar is_in_lockstep: whether all ranks run the same code now, none because another has told it to
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
        """Wait until every rank has come, and connect to them.

        :param store: where ranks say how they are found
        :param address: by which other machines reach this one; None: all ranks are on this one
        :param device: this rank's, on which it computes
        """
        gloo: Any = dist.ProcessGroupGloo  # whose own description lacks most of it
        before = _descriptors()
        options = gloo._Options()
        options._timeout = _JOIN
        options._devices = [gloo.create_device(hostname=address or _LOOPBACK)]
        try:
            self._ranks = gloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise self._explain(error) from error
        self._ranks.set_timeout(_FOREVER)
        if address is not None:
            self._connections = _connections(store, _descriptors() - before, rank=self.rank, size=self.size)
        self.smallest(0)  # the others may still be looking for what is in the store
        if device.type != "cpu":
            self._devices = _connect_devices(PrefixStore("devices", store), rank=self.rank, size=self.size)
            # NCCL connects at the first sum, which must not be one that is recorded.
            self.sum_(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)

    @property
    def is_on_devices(self) -> bool:
        """Say whether what ranks have is on devices, each with one of its own, and stays there."""
        return self._devices is not None

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Say that all ranks run the block."""
        self.is_in_lockstep = True
        try:
            yield
        finally:
            self.is_in_lockstep = False

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

    def end(self) -> None:
        """Have whatever waits for another rank fail, on any thread of this process; and then the other rank's, too."""
        self._has_ended = True
        if self.shared is not None:
            self.shared.end()
        _abort(self._devices)  # what is launched ends, with results that mean nothing: see check()
        for connection in self._connections:
            with suppress(OSError):  # it is broken already
                connection.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise if another rank has ended: what has been computed since may not be whole."""
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
        """Add up what the ranks have, of one shape and dtype, in place; all get the same bits.

        On the CPU it is added up in float32 at least, on devices as it is, without the host waiting for it.
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
        """Say whether the ranks can put columns together, so that nothing needs to be added up: in shared memory."""
        return self.shared is not None

    def join_columns(self, own: Tensor, widths: Tensor) -> Tensor:
        """Put the columns of rows together of which each rank has some; it can where :attr:`joins`.

        :param own: this rank's ``[num_rows, width]``, of no more than 32 bits a number
        :param widths: how many columns each rank has, contiguous int32
        """
        assert self.shared is not None
        joined = ColumnJoin(self.shared, widths)(own)
        self.check_shared()
        return joined

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

    def gather(self, own: Tensor, widths: Sequence[int]) -> Tensor:
        """Put the columns of rows together of which each rank has some, on all ranks.

        :param own: ``[num_rows, width]``
        :param widths: how many columns each rank has
        """
        num_rows, widest = len(own), max(widths)
        padded = torch.nn.functional.pad(own, (0, widest - own.shape[1])).contiguous()
        found = own.new_empty(self.size * num_rows, widest)
        self._wait(lambda ranks: ranks._allgather_base(found, padded), own)
        parts = found.view(self.size, num_rows, widest)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], -1)

    def pass_on(self, tensor: Tensor) -> Tensor:
        """Overwrite a contiguous tensor by what the first rank has."""
        self._wait(lambda ranks: ranks.broadcast(tensor, 0), tensor)
        return tensor

    def first_error(self, error: Exception | None) -> Exception | None:
        """Return what has gone wrong here; where nothing has, what has on the first rank where something has; None:
        nothing has on any.
        """
        rank = self.smallest(self.size if error is None else self.rank)
        if rank == self.size:
            return None
        text = "" if error is None else f"{type(error).__name__}: {error}"
        content = text.encode("utf-8", "replace")[:_FRAME]
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        frame[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else frame[:0]
        self._pass_on(frame, rank)
        if error is not None:
            return error
        said = frame.numpy().tobytes().rstrip(b"\0").decode("utf-8", "replace")
        return ModelLoadError(f"rank {rank} of {self.size} could not do its part: {said}")

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

    def _pass_on(self, tensor: Tensor, rank: int = 0) -> None:
        self._wait(lambda ranks: ranks.broadcast(tensor, rank))

    def _wait(self, start: Callable[[Any], Any], on: Tensor | None = None) -> None:
        """Start something, and wait for it; on a device, only what is launched later does.

        :param on: tells by its device which connections are to be used; None: the host's
        """
        ranks = self._ranks if on is None or on.device.type == "cpu" else self._devices
        assert ranks is not None, "the group was left, or nobody has joined it"
        try:
            start(ranks).wait()
        except RuntimeError as error:
            raise self._explain(error) from error


def _abort(devices: Any) -> None:
    """End connections between devices, of which there may be none, and which may have ended."""
    if devices is not None:
        with suppress(RuntimeError):
            devices.abort()


def _connect_devices(store: Store, *, rank: int, size: int) -> Any:
    """Return the connections between the ranks' CUDA devices."""
    nccl: Any = dist.ProcessGroupNCCL
    with nccl_leaves_the_process():
        return nccl(store, rank, size, nccl.Options())


def _descriptors() -> set[str]:
    """Return the numbers of this process's open files; none where the system does not list them."""
    return set(os.listdir(_DESCRIPTORS)) if sys.platform == "linux" else set()


def _connections(store: Store, descriptors: Collection[str], *, rank: int, size: int) -> list[socket.socket]:
    """Return gloo's connections, which it gives up for no other reason than that they break.

    :param store: where ranks say at which port theirs come in
    :param descriptors: files that gloo has opened, and perhaps other threads
    """
    found = [copy for each in descriptors if (copy := _socket(int(each))) is not None]
    listening = {copy for copy in found if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
    store.set(f"ports/{rank}", json.dumps([copy.getsockname()[:2] for copy in listening]))
    ports = [tuple(place) for each in range(size) for place in json.loads(store.get(f"ports/{each}"))]
    own = []
    for copy in found:
        with suppress(OSError):  # not connected
            if copy not in listening and (copy.getsockname()[:2] in ports or copy.getpeername()[:2] in ports):
                own.append(copy)
                continue
        copy.close()
    return own


def _socket(descriptor: int) -> socket.socket | None:
    """Return what a descriptor stands for as another socket of the network; None: it is something else."""
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed by now
        return None
    try:
        made = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if made.family in (socket.AF_INET, socket.AF_INET6) and made.type == socket.SOCK_STREAM:
        return made
    made.close()
    return None


def _message(content: bytes) -> Message:
    message: Message = marshal.loads(content)
    return message


def _lost(error: RuntimeError) -> Exception:
    return EngineDeadError(f"another rank has ended: {error}")
