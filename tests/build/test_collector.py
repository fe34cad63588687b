"""The collector rests while a block runs, and only then."""

from __future__ import annotations

import gc

import pytest

from paged_sdk.build import collector
from paged_sdk.build.collector import _make_old, collector_paused


@pytest.fixture(autouse=True)
def _frozen_objects_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what the test session does without."""
    monkeypatch.setattr(collector, "_make_old", _make_old)


def test_it_rests_and_goes_on_after_an_error_too() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_an_application_that_collects_nothing_is_left_alone() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_block_made_is_old_afterwards() -> None:
    gc.unfreeze()  # what the test session froze
    try:
        with collector_paused():
            made: list[list[object]] = [[]]
        assert any(each is made for each in gc.get_objects(generation=2))
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_what_an_application_froze_stays_frozen() -> None:
    made: list[list[object]] = [[]]
    gc.freeze()
    with collector_paused():
        pass
    assert not any(each is made for each in gc.get_objects())  # which leaves out what is frozen
