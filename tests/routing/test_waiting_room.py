"""Requests that wait for a replica, and threads that meet there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paged_sdk.routing.waiting_room import WaitingRoom


class WaitingRequest:
    """Waits, and notes what it is told."""

    def __init__(self, name: str) -> None:
        self.request: Any = SimpleNamespace(request_id=name)
        self.errors: list[Exception] = []

    def fail_soon(self, error: Exception) -> None:
        self.errors.append(error)


class Meeting(dict[str, WaitingRequest]):
    """Has another thread do something after it was looked up, and before anything is put into it."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def __setitem__(self, key: str, value: WaitingRequest) -> None:
        if key == "late":
            self.act()
        super().__setitem__(key, value)


class Interrupted(dict[str, WaitingRequest]):
    """Has another thread do something before the first is taken out of it."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.acts = [act]

    def popitem(self) -> tuple[str, WaitingRequest]:
        if self.acts:
            self.acts.pop()()
        return super().popitem()


@pytest.mark.parametrize("ends", ["the absence has lasted too long", "the model is closed"])
def test_whoever_comes_while_the_others_are_told_is_told_too(ends: str) -> None:
    later: list[Callable[[], object]] = []
    room = WaitingRoom[WaitingRequest](1.0, lambda seconds, act: later.append(act), limit=4)

    def end() -> None:
        if ends == "the model is closed":
            for waiting in room.empty():
                waiting.fail_soon(RuntimeError("closed"))
        else:
            later[0]()

    room._absence.waiting = Meeting(end)
    early, late = WaitingRequest("early"), WaitingRequest("late")
    assert room.put(early)
    waits = room.put(late)
    assert len(early.errors) == 1
    still_there = [waiting.request.request_id for waiting in room.empty()]
    assert waits == (still_there == ["late"]), "it waits, and nobody knows of it"
    assert not late.errors


def test_they_leave_as_they_came() -> None:
    room = WaitingRoom[WaitingRequest](1.0, lambda seconds, act: None, limit=4)
    requests = [WaitingRequest(name) for name in "abc"]
    assert all(map(room.put, requests))
    assert room.discard("b")
    assert list(room.leave()) == [requests[0], requests[2]]
    assert not room.discard("a")


def test_nobody_ends_with_an_absence_after_which_a_replica_has_come() -> None:
    later: list[Callable[[], object]] = []
    room = WaitingRoom[WaitingRequest](1.0, lambda seconds, act: later.append(act), limit=4)
    first, second = WaitingRequest("first"), WaitingRequest("second")

    def a_replica_comes_and_goes() -> None:
        assert list(room.leave()) == [first]
        assert room.put(second)

    room._absence.waiting = Interrupted(a_replica_comes_and_goes)
    assert room.put(first)
    later[0]()
    assert room.is_open
    assert not second.errors
    assert room.discard("second")
