"""Ranks that were started one by one find each other, and say with typed errors what keeps them from it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from typing import TypeVar

import pytest
import torch
from attrs import evolve
from torch._C._distributed_c10d import PrefixStore

from paged_sdk import ConfigError, EngineDeadError, ModelLoadError
from paged_sdk.config.launch import Launch
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.lifelines import TOKEN_BYTES, Lifelines, attach, listen, welcome
from paged_sdk.parallel.rendezvous import Rendezvous
from rank_threads import free_port

_T = TypeVar("_T")

SAME = {"dtype": "torch.float32", "isq": "None"}


def nothing() -> None:
    """Go on."""


def meet(size: int, run: Callable[[Rendezvous], _T], *, seconds: float = 20.0) -> list[_T]:
    """Run a function on every rank of a launch."""
    port = free_port()

    def rank(number: int) -> _T:
        launch = Launch(rank=number, size=size, address="localhost", port=port)
        rendezvous = Rendezvous(launch, nothing, seconds=seconds)
        try:
            return run(rendezvous)
        finally:
            rendezvous.close()

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(rank, number) for number in range(size)]]


def test_what_is_not_the_same_is_an_error_on_all_ranks() -> None:
    def run(rendezvous: Rendezvous) -> str:
        other = {"isq": "Q4K"} if rendezvous.launch.rank == 2 else {}
        with pytest.raises((ConfigError, ModelLoadError)) as raised, rendezvous.failing():
            rendezvous.compare(SAME | other, nothing)
        return str(raised.value)

    said = "isq of rank 2 = 'Q4K' is not allowed: expected None, which rank 0 has"
    assert all(said in text for text in meet(3, run))


def test_a_rank_that_cannot_load_its_part_ends_the_loading_of_all() -> None:
    def load(rendezvous: Rendezvous) -> None:
        if rendezvous.launch.rank == 2:
            raise ModelLoadError("a file is damaged")
        rendezvous.wait(nothing)

    def run(rendezvous: Rendezvous) -> str:
        rendezvous.compare(SAME, nothing)
        with pytest.raises(ModelLoadError) as raised, rendezvous.failing():
            load(rendezvous)
        return str(raised.value)

    expected = "the model cannot be loaded: rank 2 of 3 has ended: ModelLoadError: a file is damaged"
    assert meet(3, run) == [expected, expected, "a file is damaged"]


def test_a_rank_that_is_lost_ends_what_waits_for_it() -> None:
    all_do = threading.Barrier(3)

    def run(rendezvous: Rendezvous) -> str:
        rendezvous.compare(SAME, nothing)
        rendezvous.wait(nothing)
        group = Group(rendezvous.launch.rank, 3, rendezvous.explain)
        group.join(PrefixStore("gloo", rendezvous.store), address=rendezvous.address)
        assert group.sum_(torch.ones(2, dtype=torch.bfloat16)).tolist() == [3.0, 3.0]
        all_do.wait()
        said = ""
        if rendezvous.launch.rank == 1:
            rendezvous.close()  # gloo's connections stay
        else:
            rendezvous.on_loss(group.end)
            with pytest.raises(EngineDeadError) as raised:
                group.sum_(torch.ones(2))
            said = str(raised.value)
        all_do.wait()
        group.leave()
        return said

    lost = "rank 1 of 3 was lost: its process has ended, or its machine cannot be reached any more"
    assert meet(3, run) == [lost, "", lost]


def test_the_port_is_free_once_all_have_ended() -> None:
    def run(rendezvous: Rendezvous) -> int:
        rendezvous.wait(nothing)
        if rendezvous.launch.rank == 0:
            rendezvous.end(5.0)
        return rendezvous.launch.port

    first, second = meet(2, run)
    assert first == second
    with socket.create_server(("", first)):
        pass


def test_a_launch_has_one_model() -> None:
    def run(rendezvous: Rendezvous) -> None:
        with pytest.raises(ConfigError, match=r"with_tensor_parallel = 2 .* one model"):
            Rendezvous(evolve(rendezvous.launch, has_agent=True), nothing)  # so that it takes no port of its own
        rendezvous.wait(nothing)

    meet(2, run)


def test_nobody_listens() -> None:
    launch = Launch(rank=1, size=2, address="localhost", port=free_port())
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = 'localhost' .* has not answered within 0 s"):
        Rendezvous(launch, nothing, seconds=0.0)


def test_a_long_wait_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("paged_sdk.parallel.rendezvous._SILENT_SECONDS", 0.0)
    looks = count()

    def check_cancelled() -> None:
        if next(looks) == 3:
            raise ModelLoadError("long enough")

    launch = Launch(rank=1, size=2, address="localhost", port=free_port())
    with caplog.at_level("INFO", logger="paged_sdk"), pytest.raises(ModelLoadError, match="long enough"):
        Rendezvous(launch, check_cancelled)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"waiting for rank 0 at localhost, port {launch.port} (")
    assert said.endswith(" s more")


def test_the_others_do_not_come() -> None:
    launch = Launch(rank=0, size=2, address="localhost", port=free_port())
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 2 .* rank 1 has not come within 0 s"):
        Rendezvous(launch, nothing, seconds=0.0)


def test_the_port_is_taken() -> None:
    with socket.create_server(("", 0)) as listener:
        launch = Launch(rank=0, size=2, address="localhost", port=listener.getsockname()[1])
        with pytest.raises(ConfigError, match=r"MASTER_PORT = .* free on this machine .another program has it"):
            Rendezvous(launch, nothing)


def test_waiting_ends_when_the_loading_is_cancelled() -> None:
    def check_cancelled() -> None:
        raise ModelLoadError("the loading was cancelled")

    for rank in (0, 1):
        with pytest.raises(ModelLoadError, match="cancelled"):
            Rendezvous(Launch(rank=rank, size=2, address="localhost", port=free_port()), check_cancelled)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(listen("127.0.0.1")) as listener:
        yield listener


def welcomed(listener: socket.socket, token: bytes) -> tuple[int, socket.socket]:
    while (come := welcome(listener, token)) is None:
        pass
    return come


def test_strangers_are_not_let_in(listener: socket.socket) -> None:
    token = b"x" * TOKEN_BYTES
    assert welcome(listener, token) is None
    port = listener.getsockname()[1]
    for greeting in (b"", b"GET / HTTP/1.1\r\n", b"y" * TOKEN_BYTES + b"\0\0\0\1"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            assert welcome(listener, token) is None
    with closing(attach("127.0.0.1", port, token, 7)):
        rank, connection = welcomed(listener, token)
        connection.close()
    assert rank == 7


def test_a_machine_that_is_gone_breaks_the_connection(listener: socket.socket) -> None:
    """What notices it is the system, within four seconds: there is no second machine here to switch off."""
    token = b"x" * TOKEN_BYTES
    far = attach("127.0.0.1", listener.getsockname()[1], token, 1)
    broken: list[int] = []
    seen = threading.Event()

    def lose(rank: int) -> None:
        broken.append(rank)
        seen.set()

    rank, connection = welcomed(listener, token)
    lines = Lifelines({rank: connection}, lose)
    options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    found = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options]
    assert found[0] + found[1] * found[2] == 4
    far.close()
    assert seen.wait(60)
    assert broken == [1]
    lines.close()
