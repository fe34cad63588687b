"""Let ranks that were started one by one find each other, and hear what becomes of the others."""

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

from paged_sdk.config.env import MASTER_ADDR, MASTER_PORT, WORLD_SIZE, Launch
from paged_sdk.errors import ConfigError, EngineDeadError, ModelLoadError
from paged_sdk.logs import get_logger
from paged_sdk.parallel.lifelines import TOKEN_BYTES, Lifelines, attach, listen, welcome
from paged_sdk.parallel.shard import SETTING

__all__ = ["Meeting"]

_log = get_logger(__name__)

_COME_SECONDS: Final = 300.0
"""How long ranks wait for others to be started, as torch's own do."""
_LOOK_SECONDS: Final = 0.05
_SILENT_SECONDS: Final = 5.0
"""For how long ranks wait without a word: those of a script are there by then, those started by hand may not be."""
# What is asked of the store is answered at once, unless its machine is gone. A first connection may take longer: a
# machine that loads several models may not run the thread that accepts it for seconds.
_ANSWER_SECONDS: Final = 3.0
_CONNECT_SECONDS: Final = 30.0
_SEEN_SECONDS: Final = 2.0

_READY: Final = "ready"
_FAILED: Final = "failed: "
_GONE: Final = "its process has ended, or its machine cannot be reached any more"

GoOn = Callable[[], None]


class Meeting:
    """Holds what the ranks of a launch know of each other.

    What each of them says lies in a store of torch.distributed's, in the memory of the first one or of torchrun. From
    the first one to every other there is a connection that breaks when one of them ends.

    Whoever makes one waits until all have come.

    :param seconds: for how long at most
    :raises ConfigError: the first rank cannot be reached or cannot listen, not all come in time, or there was a model
        already
    :ivar store: for other parts of a model to meet in
    :ivar address: by which other ranks reach this one
    """

    def __init__(self, launch: Launch, go_on: GoOn, *, seconds: float = _COME_SECONDS) -> None:
        self.launch = launch
        self._start = time.monotonic()
        self._seconds = seconds
        self._waited_for: set[str] = set()
        self._server = _serve(launch) if launch.rank == 0 and not launch.has_agent else None
        self.address: str = self._reach(go_on)
        self.store: Store = PrefixStore(f"paged-sdk/{launch.attempt}", _ask(launch))
        self._lifelines: Lifelines | None = None
        self._on_loss: Callable[[], None] = lambda: None
        self._why: str | None = None
        self._is_lost = threading.Event()
        if self.store.add(f"models/{launch.rank}", 1) > 1:
            raise ConfigError.of(SETTING, launch.size, "one model for all processes that were started together")
        self._gather(go_on)

    def compare(self, about: Mapping[str, str], go_on: GoOn) -> None:
        """Wait until all know what they are about to load, and compare it.

        :raises ConfigError: it is not the same
        :raises ModelLoadError: another rank has ended
        """
        self.store.set(f"about/{self.launch.rank}", json.dumps(dict(about)))
        first: dict[str, str] = {}
        for rank in range(self.launch.size):
            while not (text := self._answer(f"about/{rank}")):
                self.check()
                time.sleep(_LOOK_SECONDS)
                go_on()
            other: dict[str, str] = json.loads(text)
            first = first or other
            for name, value in other.items():
                if value != first.get(name):
                    allowed = f"{first.get(name)}, which rank 0 has: all processes are started with the same settings"
                    raise ConfigError.of(f"{name} of rank {rank}", value, allowed)

    def on_loss(self, do: Callable[[], None]) -> None:
        """Have something done when another rank is lost, at once if one is already."""
        self._on_loss = do
        if self._is_lost.is_set():
            do()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Tell the others what ends this rank, if something does within the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others what ends this rank."""
        if not self._is_lost.is_set():  # else it was said
            self._say(f"{_FAILED}{type(error).__name__}: {error}")

    def check(self) -> None:
        """Look whether another rank has ended while this one loads its part.

        :raises ModelLoadError: one has
        """
        if self._is_lost.is_set():
            raise ModelLoadError(f"the model cannot be loaded: {self._why}")

    def wait(self, go_on: GoOn) -> None:
        """Wait until all ranks have loaded their parts.

        :raises ModelLoadError: one of them cannot load its part
        """
        self._say(_READY)
        waiting = set(range(self.launch.size))
        while waiting:
            self.check()
            waiting = {rank for rank in waiting if self._said(rank) != _READY}
            time.sleep(_LOOK_SECONDS)
            go_on()

    def explain(self, error: RuntimeError) -> Exception:
        """Make the error for a connection that has failed: name the rank that has ended."""
        self._is_lost.wait(_SEEN_SECONDS)
        return EngineDeadError(self._why or f"the connection between ranks broke: {error}")

    def close(self, seconds: float = 0.0) -> None:
        """Let go of the other ranks, which still hear why; a second call does nothing.

        :param seconds: how long they may take to let go first
        """
        if self._lifelines is not None:
            self._lifelines.close(seconds)

    def end(self, seconds: float) -> None:
        """Let go of the other ranks, and of the port.

        :param seconds: how long they may take to let go first
        """
        self.close(seconds)
        self._server = None

    def _gather(self, go_on: GoOn) -> None:
        """Wait until all have come, and watch over them from now on.

        :raises ConfigError: not all of them have come in time
        """
        self.store.set(f"address/{self.launch.rank}", self.address)
        addresses = [self._read(f"address/{rank}", rank, go_on) for rank in range(self.launch.size)]
        self.address = _reachable(self.address, addresses)
        self._lifelines = Lifelines(self._connected(go_on), self._lose)

    def _lose(self, rank: int) -> None:
        """Note that a rank has ended, tell the others, and have nothing wait for it any more."""
        said = self._said(rank) or ""
        if said.startswith(_FAILED):
            why = said.removeprefix(_FAILED)
            # The first rank says it of another one that it has lost itself.
            self._why = why if why.startswith("rank ") else f"rank {rank} of {self.launch.size} has ended: {why}"
        else:
            self._why = f"rank {rank} of {self.launch.size} was lost: {_GONE}"
        self._say(f"{_FAILED}{self._why}")
        self._is_lost.set()
        self._on_loss()
        self.close()

    def _connected(self, go_on: GoOn) -> dict[int, socket.socket]:
        """Return the connections between the first rank and the others: one, but on the first."""
        if self.launch.rank > 0:
            address, port, token = json.loads(self._read("lifelines", 0, go_on))
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
                    self._pause(min(missing), go_on)
            left.pop_all()  # they stay open
        return found

    def _read(self, key: str, rank: int, go_on: GoOn) -> str:
        """Wait until a rank has written something, and return it.

        :raises ConfigError: it has not in time
        """
        try:
            while not self.store.check([key]):
                self._pause(rank, go_on)
            return self.store.get(key).decode()
        except RuntimeError as error:
            raise ModelLoadError(f"rank 0 has ended before rank {rank} has come ({_first_line(error)})") from None

    def _pause(self, rank: int, go_on: GoOn) -> None:
        if not self._may_wait(f"rank {rank} of {self.launch.size}"):
            allowed = f"as many processes as are started: rank {rank} has not come within {self._seconds:.0f} s"
            raise ConfigError.of(WORLD_SIZE, self.launch.size, allowed)
        time.sleep(_LOOK_SECONDS)
        go_on()

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # those that would hear it find nobody there, either
            self.store.set(f"said/{self.launch.rank}", text)

    def _said(self, rank: int) -> str | None:
        """Return what a rank has said last; None: nothing, or nobody answers."""
        return self._answer(f"said/{rank}")

    def _answer(self, key: str) -> str | None:
        """Return what lies in the store; None: nothing, or nobody answers."""
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None

    def _reach(self, go_on: GoOn) -> str:
        """Wait until someone listens where ranks meet. Return the address by which this machine is seen from there."""
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
            go_on()

    def _may_wait(self, other: str) -> bool:
        """Tell whether there is time to wait for another rank, and log once that this is waited for."""
        waited = time.monotonic() - self._start
        if waited > _SILENT_SECONDS and other not in self._waited_for:
            self._waited_for.add(other)
            _log.info("waiting for %s; at most %.0f s more", other, max(0.0, self._seconds - waited))
        return waited <= self._seconds


def _serve(launch: Launch) -> Store:
    """Listen where ranks meet.

    :raises ConfigError: the port cannot be had
    """
    try:
        return _store("localhost", launch.port, is_server=True)
    except RuntimeError as error:
        why = "another program has it" if "EADDRINUSE" in str(error) else _first_line(error)
        raise ConfigError.of(MASTER_PORT, launch.port, f"a port that is free on this machine ({why})") from None


def _ask(launch: Launch) -> Store:
    """Connect to what listens where ranks meet.

    :raises ConfigError: it is something else
    """
    try:
        return _store(launch.address, launch.port, is_server=False)
    except RuntimeError as error:
        allowed = f"rank 0's port: what listens there is something else ({_first_line(error)})"
        raise ConfigError.of(MASTER_PORT, launch.port, allowed) from None


def _store(address: str, port: int, *, is_server: bool) -> Store:
    """Return a store that is connected.

    :raises RuntimeError: it cannot be had there
    """
    store = TCPStore(address, port, None, is_server, timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
    return store


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _reachable(own: str, addresses: list[str]) -> str:
    """Return by which address the others reach this machine, whose name may stand for its loopback interface here.

    :param addresses: those that the others have found for themselves
    """
    other = next((each for each in addresses if not _is_loopback(each)), None)
    if other is None or not _is_loopback(own):
        return own
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as towards:
        towards.connect((other, 9))  # which sends nothing
        return str(towards.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
