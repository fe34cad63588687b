"""What rank 0 tells the others, and how it parts from them, however they were started."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from paged_sdk import EngineDeadError, EngineError, ModelLoadError, OutOfMemoryError
from paged_sdk.build.loading import Loading
from paged_sdk.build.ranks import child_ranks, launched
from paged_sdk.build.ranks.child_ranks import ChildRanks
from paged_sdk.build.ranks.followers import Followers
from paged_sdk.build.ranks.launched import follow_launch
from paged_sdk.build.ranks.ranks import RankPlacement
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.env import Environment
from paged_sdk.config.launch import Launch
from paged_sdk.parallel.group import Group, Message
from paged_sdk.parallel.rendezvous import Rendezvous
from rank_threads import free_port, run_ranks


def loading(path: Path, settings: BuildSettings) -> Loading:
    return Loading(path=path, settings=settings, environment=Environment(), devices=(torch.device("cpu"),))


class Started:
    """Stands for ranks that are there already."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ended: list[tuple[bool, BaseException | None]] = []
        self.error: Exception | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def join(self, check_cancelled: Any) -> None:
        check_cancelled()

    def end(self, seconds: float, error: BaseException | None) -> None:
        self.ended.append((seconds > 0, error))


def test_the_others_hear_that_it_is_over_unless_something_went_wrong() -> None:
    def run(group: Group) -> list[Message] | list[tuple[bool, BaseException | None]]:
        if group.rank:
            return [group.receive_message()]
        ranks = Started(group)
        followers = Followers(ranks)
        followers.close()
        followers.close()
        return ranks.ended

    assert run_ranks(2, run) == [[(True, None)], [("end",)]]
    ranks, error = Started(Group(0, 2)), ValueError("a tensor is missing")
    Followers(ranks).close(error)
    assert ranks.ended == [(False, error)]


def test_loading_ends_with_that_of_another_rank_and_setting_up_with_its_engine() -> None:
    calls = []

    def run(group: Group) -> None:
        ranks = Started(group)
        watched = Followers(ranks).watched(lambda: calls.append(group.rank))
        watched()
        ranks.error = ModelLoadError("never to be asked again")
        if group.rank == 0:
            group.end()
            with pytest.raises(EngineDeadError):
                watched()

    run_ranks(2, run)
    assert sorted(calls) == [0, 1]
    ranks = Started(Group(0, 2))
    ranks.error = ModelLoadError("rank 1 cannot load its part")
    with pytest.raises(ModelLoadError):
        Followers(ranks).watched(lambda: None)()


def failing_child(*_: str, stdin: int, stdout: int, **__: Any) -> subprocess.Popen[bytes]:
    program = "import sys; print('a file is damaged', flush=True); sys.exit(1)"
    return subprocess.Popen([sys.executable, "-c", program], stdin=stdin, stdout=stdout, bufsize=0)


def test_a_child_that_cannot_load_its_part_is_seen_while_rank_0_loads_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_ranks, "start_program", failing_child)
    placements = [RankPlacement(num_threads=1)] * 2
    settings = BuildSettings(device="cpu", tensor_parallel=2)
    followers = Followers(ChildRanks(loading(tmp_path, settings), placements))
    going_on = followers.watched(lambda: time.sleep(0.01))
    with pytest.raises(
        ModelLoadError, match=r"rank 1 of 2 has ended: process \d+ .* status 1: a file is damaged"
    ) as raised:
        _forever(going_on)
    followers.close(raised.value)


def test_a_child_is_heard_in_a_process_with_many_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """select() takes no file descriptors above 1023."""

    def start(*args: str, **options: Any) -> subprocess.Popen[bytes]:
        process = failing_child(*args, **options)
        assert process.stdout is not None
        number = fcntl.fcntl(process.stdout, fcntl.F_DUPFD_CLOEXEC, 1024)
        process.stdout.close()
        process.stdout = os.fdopen(number, "rb", buffering=0)
        return process

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
    monkeypatch.setattr(child_ranks, "start_program", start)
    try:
        ranks = ChildRanks(
            loading(tmp_path, BuildSettings(device="cpu", tensor_parallel=2)), [RankPlacement(num_threads=1)] * 2
        )
        with pytest.raises(ModelLoadError, match="rank 1 of 2 has ended"):
            ranks.join(lambda: None)
        ranks.end(0.0, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_where_no_directory_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(EngineError, match=r"temporary file, and none can be made: .*missing.*; TMPDIR names"):
        ChildRanks(
            loading(tmp_path, BuildSettings(device="cpu", tensor_parallel=2)), [RankPlacement(num_threads=1)] * 2
        )


def _forever(do: Callable[[], None]) -> NoReturn:
    while True:
        do()


def test_a_launched_rank_without_memory_for_a_step_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Part:
        @classmethod
        def load(cls, *_: Any) -> Part:
            return cls()

        def follow(self, group: Group) -> None:
            raise MemoryError("no 64 bytes")

    monkeypatch.setattr(launched, "ModelPart", Part)
    monkeypatch.setattr(launched, "_about", lambda *_: {})
    port = free_port()
    said: list[str] = []

    def first() -> None:
        rendezvous = Rendezvous(Launch(rank=0, size=2, address="localhost", port=port), lambda: None)
        rendezvous.compare({}, lambda: None)
        group = Group(0, 2, rendezvous.explain)
        launched._join(rendezvous, group, torch.device("cpu"), lambda: None)
        said.append(str(rendezvous.explain(RuntimeError("broken"))))
        group.leave()
        rendezvous.close()

    thread = threading.Thread(target=first)
    thread.start()
    rendezvous = Rendezvous(Launch(rank=1, size=2, address="localhost", port=port), lambda: None)
    with pytest.raises(OutOfMemoryError, match=r"compute rank 1's part of .*: no 64 bytes"), rendezvous.failing():
        follow_launch(rendezvous, loading(tmp_path, BuildSettings(device="cpu")))
    thread.join()
    assert "rank 1 of 2 has ended: OutOfMemoryError" in said[0]
