"""Let separately launched ranks find each other and report their state: ready, failed or lost."""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paged_sdk.config.env import MASTER_ADDR, MASTER_PORT, WORLD_SIZE
from paged_sdk.config.launch import Launch
from paged_sdk.errors import ConfigError, EngineDeadError, ModelLoadError
from paged_sdk.logs import get_logger
from paged_sdk.parallel.lifelines import TOKEN_BYTES, Lifelines, attach, listen, welcome
from paged_sdk.parallel.shard import SETTING

__all__ = ["CheckCancelled", "Rendezvous"]

_log = get_logger(__name__)

_COME_SECONDS: Final = 300.0
"""How long ranks wait for the others to start; torch's default too."""
_LOOK_SECONDS: Final = 0.05
_SILENT_SECONDS: Final = 5.0
"""How long ranks wait without a log line: ranks started by a script are there by then."""
# The store answers at once unless its machine is gone. The first connection may take longer: on a machine that loads
# several models, the accepting thread may not run for seconds.
_ANSWER_SECONDS: Final = 3.0
_CONNECT_SECONDS: Final = 30.0
_SEEN_SECONDS: Final = 2.0

_READY: Final = "ready"
_FAILED: Final = "failed: "
_GONE: Final = "its process has ended, or its machine cannot be reached any more"

CheckCancelled = Callable[[], None]
"""Is called while something else is waited for or done, and raises to end that."""


class Rendezvous:
    """Connects the ranks of a launch before and beside their :class:`~paged_sdk.parallel.group.Group`.

    Ranks publish their state in a TCPStore of torch.distributed, in the process of rank 0 or of torchrun's agent. Every
    other rank has a connection to rank 0, which breaks when either process ends. The constructor blocks until all ranks
    are there.

    :param check_cancelled: called while waiting; an exception from it ends the wait
    :param seconds: how long to wait for all ranks
    :raises ConfigError: rank 0 cannot be reached or cannot listen, a rank is missing after that time, or this process
        has already built a model
    :ivar store: the store, for use by other parts of the model
    :ivar address: address under which the other ranks reach this one
    """

    def __init__(self, launch: Launch, check_cancelled: CheckCancelled, *, seconds: float = _COME_SECONDS) -> None:
        self.launch = launch
        self._start = time.monotonic()
        self._seconds = seconds
        self._waited_for: set[str] = set()
        self._server = _serve(launch) if launch.rank == 0 and not launch.has_agent else None
        self.address: str = self._reach(check_cancelled)
        self.store: Store = PrefixStore(f"paged-sdk/{launch.attempt}", _ask(launch))
        self._lifelines: Lifelines | None = None
        self._on_loss: Callable[[], None] = lambda: None
        self._why: str | None = None
        self._is_lost = threading.Event()
        if self.store.add(f"models/{launch.rank}", 1) > 1:
            raise ConfigError.of(SETTING, launch.size, "one model for all processes that were started together")
        self._gather(check_cancelled)

    def compare(self, about: Mapping[str, str], check_cancelled: CheckCancelled) -> None:
        """Compare settings with all other ranks; blocks until each has published its own.

        :param about: settings by name
        :raises ConfigError: a rank has other settings than rank 0
        :raises ModelLoadError: another rank has ended
        """
        self.store.set(f"about/{self.launch.rank}", json.dumps(dict(about)))
        first: dict[str, str] = {}
        for rank in range(self.launch.size):
            while not (text := self._answer(f"about/{rank}")):
                self.check()
                time.sleep(_LOOK_SECONDS)
                check_cancelled()
            other: dict[str, str] = json.loads(text)
            first = first or other
            for name, value in other.items():
                if value != first.get(name):
                    allowed = f"{first.get(name)}, which rank 0 has: all processes are started with the same settings"
                    raise ConfigError.of(f"{name} of rank {rank}", value, allowed)

    def on_loss(self, do: Callable[[], None]) -> None:
        """Register a callback for the loss of another rank; called at once if one is lost already."""
        self._on_loss = do
        if self._is_lost.is_set():
            do()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Report an exception of the ``with`` block to the other ranks, and close."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Report the error that ends this rank to the other ranks."""
        if not self._is_lost.is_set():  # else _lose has reported the cause
            self._say(f"{_FAILED}{type(error).__name__}: {error}")

    def check(self) -> None:
        """Check that no other rank has ended; called while this rank loads its part.

        :raises ModelLoadError: another rank has ended
        """
        if self._is_lost.is_set():
            raise ModelLoadError(f"the model cannot be loaded: {self._why}")

    def wait(self, check_cancelled: CheckCancelled) -> None:
        """Wait until all ranks have loaded their parts.

        :raises ModelLoadError: a rank cannot load its part
        """
        self._say(_READY)
        waiting = set(range(self.launch.size))
        while waiting:
            self.check()
            waiting = {rank for rank in waiting if self._said(rank) != _READY}
            time.sleep(_LOOK_SECONDS)
            check_cancelled()

    def explain(self, error: RuntimeError) -> Exception:
        """Return the error for a failed collective; it names the rank that has ended."""
        self._is_lost.wait(_SEEN_SECONDS)
        return EngineDeadError(self._why or f"the connection between ranks broke: {error}")

    def close(self, seconds: float = 0.0) -> None:
        """Close the connections to other ranks, but keep the store, where they read why; a second call does nothing.

        :param seconds: how long to wait for the other ranks to close theirs first
        """
        if self._lifelines is not None:
            self._lifelines.close(seconds)

    def end(self, seconds: float) -> None:
        """Close the connections to other ranks, and the store's port.

        :param seconds: how long to wait for the other ranks to close theirs first
        """
        self.close(seconds)
        self._server = None

    def _gather(self, check_cancelled: CheckCancelled) -> None:
        """Wait until all ranks are there, and watch them from now on.

        :raises ConfigError: a rank has not come in time
        """
        self.store.set(f"address/{self.launch.rank}", self.address)
        addresses = [self._read(f"address/{rank}", rank, check_cancelled) for rank in range(self.launch.size)]
        self.address = _reachable(self.address, addresses)
        self._lifelines = Lifelines(self._connected(check_cancelled), self._lose)

    def _lose(self, rank: int) -> None:
        """Record why a rank was lost, report it to the other ranks, and end all waits for it."""
        said = self._said(rank) or ""
        if said.startswith(_FAILED):
            why = said.removeprefix(_FAILED)
            # Rank 0 passes on the loss of a third rank in these words.
            self._why = why if why.startswith("rank ") else f"rank {rank} of {self.launch.size} has ended: {why}"
        else:
            self._why = f"rank {rank} of {self.launch.size} was lost: {_GONE}"
        self._say(f"{_FAILED}{self._why}")
        self._is_lost.set()
        self._on_loss()
        self.close()

    def _connected(self, check_cancelled: CheckCancelled) -> dict[int, socket.socket]:
        """Return this rank's connections: on rank 0 one to each other rank, elsewhere one to rank 0."""
        if self.launch.rank > 0:
            address, port, token = json.loads(self._read("lifelines", 0, check_cancelled))
            try:
                return {0: attach(address, port, bytes.fromhex(token), self.launch.rank)}
            except OSError as error:
                why = error.strerror or error
                raise ConfigError.of(MASTER_ADDR, self.launch.address, f"an address of rank 0 ({why})") from None
        token = secrets.token_bytes(TOKEN_BYTES)
        found: dict[int, socket.socket] = {}
        with ExitStack() as left, closing(listen(self.address)) as listener:
            self.store.set("lifelines", json.dumps([*listener.getsockname()[:2], token.hex()]))
            while missing := set(range(1, self.launch.size)) - found.keys():
                if (come := welcome(listener, token)) is not None:
                    found[come[0]] = left.enter_context(come[1])
                else:
                    self._pause(min(missing), check_cancelled)
            left.pop_all()  # the sockets stay open
        return found

    def _read(self, key: str, rank: int, check_cancelled: CheckCancelled) -> str:
        """Wait until a rank has set a key of the store, and return the value.

        :raises ConfigError: the rank has not set it in time
        :raises ModelLoadError: the store is gone
        """
        try:
            while not self.store.check([key]):
                self._pause(rank, check_cancelled)
            return self.store.get(key).decode()
        except RuntimeError as error:
            raise ModelLoadError(f"rank 0 has ended before rank {rank} has come ({_first_line(error)})") from None

    def _pause(self, rank: int, check_cancelled: CheckCancelled) -> None:
        if not self._may_wait(f"rank {rank} of {self.launch.size}"):
            allowed = f"as many processes as are started: rank {rank} has not come within {self._seconds:.0f} s"
            raise ConfigError.of(WORLD_SIZE, self.launch.size, allowed)
        time.sleep(_LOOK_SECONDS)
        check_cancelled()

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # the store is gone, for the other ranks too
            self.store.set(f"said/{self.launch.rank}", text)

    def _said(self, rank: int) -> str | None:
        """Return the state that a rank has reported last; None if it has not, or if the store is gone."""
        return self._answer(f"said/{rank}")

    def _answer(self, key: str) -> str | None:
        """Return a value from the store; None if the key is not set, or if the store is gone."""
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None

    def _reach(self, check_cancelled: CheckCancelled) -> str:
        """Wait until the store's port accepts connections, and return this machine's address on that route."""
        while True:
            try:
                with socket.create_connection((self.launch.address, self.launch.port), _ANSWER_SECONDS) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                why = error.strerror or error
                if not self._may_wait(f"rank 0 at {self.launch.address}, port {self.launch.port} ({why})"):
                    silence = f"port {self.launch.port} has not answered within {self._seconds:.0f} s"
                    allowed = f"an address of rank 0: {silence} ({why})"
                    raise ConfigError.of(MASTER_ADDR, self.launch.address, allowed) from None
            time.sleep(_LOOK_SECONDS)
            check_cancelled()

    def _may_wait(self, other: str) -> bool:
        """Return whether there is time left to wait for another rank, and log once that it is awaited."""
        waited = time.monotonic() - self._start
        if waited > _SILENT_SECONDS and other not in self._waited_for:
            self._waited_for.add(other)
            _log.info("waiting for %s; at most %.0f s more", other, max(0.0, self._seconds - waited))
        return waited <= self._seconds


def _serve(launch: Launch) -> Store:
    """Start the store on this machine.

    :raises ConfigError: the port is not free
    """
    try:
        return _store("localhost", launch.port, is_server=True)
    except RuntimeError as error:
        why = "another program has it" if "EADDRINUSE" in str(error) else _first_line(error)
        raise ConfigError.of(MASTER_PORT, launch.port, f"a port that is free on this machine ({why})") from None


def _ask(launch: Launch) -> Store:
    """Connect to the store.

    :raises ConfigError: something other than the store listens on that port
    """
    try:
        return _store(launch.address, launch.port, is_server=False)
    except RuntimeError as error:
        allowed = f"rank 0's port: what listens there is something else ({_first_line(error)})"
        raise ConfigError.of(MASTER_PORT, launch.port, allowed) from None


def _store(address: str, port: int, *, is_server: bool) -> Store:
    """Return a connected store.

    :raises RuntimeError: the store cannot listen or be reached there
    """
    store = TCPStore(address, port, None, is_server, timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
    return store


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _reachable(own: str, addresses: list[str]) -> str:
    """Return the address under which other ranks reach this machine; its own name may resolve to loopback here.

    :param addresses: the addresses that all ranks have found for themselves
    """
    other = next((each for each in addresses if not _is_loopback(each)), None)
    if other is None or not _is_loopback(own):
        return own
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as towards:
        towards.connect((other, 9))  # for UDP, this selects a route and sends nothing
        return str(towards.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
