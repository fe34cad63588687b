from __future__ import annotations

import time

import pytest
from chat_data import pieces_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged_sdk.chat.stop_strings import StopStrings

_letters = st.text(alphabet="ab\n", max_size=40)
_stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)
_sizes = st.lists(st.integers(0, 5), max_size=20)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the stop string that is complete first; the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def naive_held(text: str, stops: list[str]) -> str:
    """Return the longest end of a text that begins a stop string."""
    for start in range(len(text) + 1):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[start:]
    return ""


@settings(deadline=None, derandomize=True)
@given(_letters, _stops, _sizes)
@example("abab", ["abab", "ba"], [1, 1, 1])
@example("aab", ["ab"], [2])
def test_same_as_searching_the_whole_text(text: str, stops: list[str], sizes: list[int]) -> None:
    finder = StopStrings(stops)
    shown = ""
    seen = ""
    matched = False
    for piece in map("".join, pieces_of(text, sizes)):
        seen += piece
        safe, now_matched = finder.push(piece)
        assert not (matched and (safe or not now_matched))
        matched = now_matched
        shown += safe
        if not matched:
            assert shown + naive_held(seen, stops) == seen
    shown += finder.flush()
    assert (shown, matched) == naive(text, stops)
    assert (finder.found is not None) == matched
    assert text.startswith(shown + (finder.found or ""))


def test_a_stop_string_across_pieces() -> None:
    finder = StopStrings(["</answer>", "\n\n"])
    assert finder.push("forty-two <") == ("forty-two ", False)
    assert finder.push("/ans") == ("", False)
    assert finder.push("wer > \n") == ("</answer > ", False)
    assert finder.push("\nmore") == ("", True)
    assert finder.found == "\n\n"
    assert finder.push("even more") == ("", True)
    assert finder.flush() == ""


def test_without_stop_strings_nothing_is_held() -> None:
    finder = StopStrings([])
    assert finder.push("text") == ("text", False)
    assert finder.flush() == ""


def test_what_was_held_is_flushed_once() -> None:
    finder = StopStrings(["END"])
    assert finder.push("the EN") == ("the ", False)
    assert finder.flush() == "EN"
    assert finder.flush() == ""


@pytest.mark.parametrize("stop", ["a" * 5000 + "b", "ab" * 2500 + "c"])
def test_time_is_linear_for_stop_strings_that_almost_match(stop: str) -> None:
    finder = StopStrings([stop])
    start = time.thread_time()
    for _ in range(50_000):
        finder.push(stop[:2])
    assert time.thread_time() - start < 20
