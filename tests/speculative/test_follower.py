"""How a text is followed along another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.speculative.follower import Follower
from paged_sdk.speculative.token_index import TokenIndex, context_keys

SOURCE = list(range(100, 200))


def follow(source: list[int], text: list[int], *, from_the_start: bool = True) -> tuple[Follower, int]:
    """Follow a text, and return how many of its tokens were guessed."""
    follower = Follower(TokenIndex(source), Acceptance(), is_own=False)
    if from_the_start:
        follower.begin_at(0)
    num_right = 0
    for place, token in enumerate(text):
        num_right += follower.guesses(1) == [token]
        follower.advance(token)
        follower.seek(text[: place + 1][-8:], context_keys(text[: place + 1]))
    return follower, num_right


def test_a_copy_is_guessed_whole() -> None:
    follower, num_right = follow(SOURCE, SOURCE[:60])
    assert num_right == 60
    assert follower.guesses(16) == SOURCE[60:76]
    assert follower.guesses(99) == SOURCE[60:]


def test_a_place_in_the_middle_is_found_by_two_tokens() -> None:
    follower, num_right = follow(SOURCE, SOURCE[40:60], from_the_start=False)
    assert num_right == 18
    assert follower.guesses(3) == [160, 161, 162]


def test_after_a_replaced_token_the_source_goes_on() -> None:
    text = [*SOURCE[:30], 7, *SOURCE[31:60]]
    assert follow(SOURCE, text)[1] == len(text) - 1


def test_after_insertions_and_deletions_one_token_finds_the_place_again() -> None:
    text = [*SOURCE[:20], 7, 8, 9, *SOURCE[20:50], *SOURCE[60:90]]
    # Wrong are the three that were inserted, the first after them, and the first after those that were deleted.
    assert follow(SOURCE, text)[1] == len(text) - 5


def test_of_several_places_the_next_after_the_departure_is_taken() -> None:
    line = [1, 2, 3]
    source = [*line, 50, 51, *line, 60, 61, *line, 70, 71, *line, 80]
    text = [*source[:8], 9, 9, *source[10:14]]
    assert follow(source, text)[0].guesses(2) == source[14:16]


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    text = [5, 6, 7] * 4
    follower = Follower(TokenIndex(text), Acceptance(), is_own=True)
    follower.seek(text[-8:], context_keys(text))
    assert follower.guesses(7) == [5, 6, 7, 5, 6, 7, 5]


def test_the_likeliest_of_several_continuations_is_guessed() -> None:
    source = [1, 2, 30, 9, 1, 2, 40, 9, 1, 2, 30, 8, 1, 2, 50]
    follower, _ = follow(source, [6, 1, 2], from_the_start=False)
    assert follower.guesses(2) == [30, 8]  # twice, where 40 and 50 followed once; last by 8


def test_nothing_is_guessed_after_what_was_never_there() -> None:
    follower, num_right = follow(SOURCE, [1, 2, 3, 4], from_the_start=False)
    assert num_right == 0
    assert follower.chance == 0
    assert follower.guesses(4) == []


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_chances_fall_and_lie_between_0_and_1(source: list[int], text: list[int]) -> None:
    follower, _ = follow(source, text)
    guesses = follower.guesses(16)
    chances = follower.chances(16)
    assert len(chances) <= len(guesses)
    assert sorted(chances, reverse=True) == chances
    assert all(0 < chance < 1 for chance in chances)
    assert (follower.chance > 0) == bool(guesses)
    assert set(guesses) <= set(source)
