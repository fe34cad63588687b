"""When a process counts as hung: by rounds, and by no clock."""

from __future__ import annotations

import pytest

from paged_sdk import ConfigError, HangLimits
from paged_sdk.remote.hang_detector import HangDetector


def rounds_until_hung(detector: HangDetector) -> tuple[int, str]:
    for number in range(1, 10_000):
        reason = detector.next_round()
        if reason is not None:
            return number, reason
    raise AssertionError("it never hangs")


def test_a_process_that_says_nothing_has_hung_after_its_limit() -> None:
    detector = HangDetector(HangLimits(silent_seconds=30))
    assert detector.round_seconds == 3
    for _ in range(100):
        assert detector.next_round() is None
        detector.note()
    assert rounds_until_hung(detector) == (11, "it has hung: nothing was heard of it for 30 s")
    detector.note()
    assert detector.next_round() is None


def test_an_engine_in_one_step_for_too_long_has_hung() -> None:
    detector = HangDetector(HangLimits(silent_seconds=10, step_seconds=25))

    def round_of(step: int | None) -> str | None:
        detector.note()
        detector.note_step(step)
        return detector.next_round()

    for step in [None, *range(100), *[100] * 25, 101, None, *[102] * 25, None, None]:
        assert round_of(step) is None
    assert [round_of(103) for _ in range(26)] == [None] * 25 + ["it has hung: a step of its engine has taken 25 s"]


@pytest.mark.parametrize(
    ("limits", "round_seconds"),
    [
        (HangLimits(), 6.0),
        (HangLimits(step_seconds=1), 0.1),
        (HangLimits(silent_seconds=None), 60.0),
        (HangLimits(silent_seconds=None, step_seconds=None), None),
    ],
)
def test_the_shorter_limit_is_ten_rounds(limits: HangLimits, round_seconds: float | None) -> None:
    assert HangDetector(limits).round_seconds == round_seconds


def test_without_limits_nothing_hangs() -> None:
    detector = HangDetector(HangLimits(silent_seconds=None, step_seconds=None))
    detector.note_step(1)
    assert {detector.next_round() for _ in range(1000)} == {None}
    detector = HangDetector(HangLimits(silent_seconds=None, step_seconds=3))
    assert {detector.next_round() for _ in range(1000)} == {None}


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "60", True])
@pytest.mark.parametrize("name", ["silent_seconds", "step_seconds"])
def test_a_limit_is_a_number_of_seconds(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        HangLimits(**{name: value})  # type: ignore[arg-type]
