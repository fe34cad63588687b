"""What drafts are worth on recorded texts, with the times that steps of a real model take."""

from __future__ import annotations

import functools
from statistics import mean, median

import pytest
from benchmarks.draft_replay import DISTURBED, EVEN, QUIET, Noise, Replay, read_recorded, replay_sessions

replay = functools.cache(replay_sessions)


@pytest.mark.parametrize("num_sessions", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("noise", [EVEN, QUIET, DISTURBED], ids=["even", "quiet", "disturbed"])
def test_edits_gain_and_prose_loses_next_to_nothing(noise: Noise, num_sessions: int) -> None:
    """The long form takes means over more of the noise."""
    sessions = [replay(noise, seed) for seed in range(num_sessions)]
    found = {what: [rate for session in sessions for rate in session[what]] for what in sessions[0]}
    for what in ("prose after edits", "prose alone", "prose in turns with edits"):
        assert min(found[what]) > 0.97
        assert mean(found[what]) > 1
    # The first knows edits alone before it. While texts shared one chance, and a step might lose three at once, it was
    # at 0.97 to 0.98.
    assert mean(session["prose after edits"][0] for session in sessions) > 0.985
    assert mean(found["4 of prose after edits"]) > 0.975
    for what in ("edits", "edits after prose", "edits, predicted"):
        assert median(found[what]) > 3
    assert mean(found["4 edits"]) > 1.2


def test_a_replay_gives_what_was_recorded_and_is_the_same_again() -> None:
    assert replay_sessions(DISTURBED, 0) == replay(DISTURBED, 0)
    recorded = read_recorded()
    assert {text.kind for text in recorded} == {"edits", "prose"}
    assert all(bool(text.prediction) == (text.kind == "edits") for text in recorded)


def test_without_speculation_nothing_is_gained_or_lost() -> None:
    text = read_recorded()[0]
    assert Replay(looks_back=False).run([text]) == pytest.approx(1, abs=0.005)
