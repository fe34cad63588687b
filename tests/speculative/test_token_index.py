"""The index of contexts, against a search of the whole text."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from paged_sdk.speculative.token_index import FEW, LENGTHS, MOST_PLACES, TokenIndex, context_keys

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def naive_places(text: list[int], length: int, start: int = 0) -> list[int]:
    """Return the places whose preceding tokens are the text's last ones, the last place first."""
    context = text[len(text) - length :]
    found = [place for place in range(start + length, len(text)) if text[place - length : place] == context]
    return found[::-1][:MOST_PLACES] if len(context) == length else []


@given(TEXTS, TEXTS)
def test_it_finds_where_the_last_tokens_were_before(prompt: list[int], output: list[int]) -> None:
    index = TokenIndex(text := list(prompt))
    for token in [*output, 0]:
        for level, (length, key) in enumerate(zip(LENGTHS, context_keys(text), strict=True)):
            assert index.places(level, key) == naive_places(text, length)
        text.append(token)
        index.grow()


@given(TEXTS, st.integers(0, 60))
def test_what_lies_before_the_start_is_not_found(text: list[int], start: int) -> None:
    start = min(start, len(text))
    index = TokenIndex(text, start)
    text += [1, 2, 1, 2, 1]
    index.grow()
    for level, (length, key) in enumerate(zip(LENGTHS, context_keys(text), strict=True)):
        assert index.places(level, key) == naive_places(text, length, start)


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=8), st.integers(FEW + 1, 400), st.integers(0, 60))
def test_a_long_text_is_indexed_at_once_as_one_by_one(alphabet: list[int], length: int, start: int) -> None:
    rng = random.Random(length)
    text = [rng.choice(alphabet) for _ in range(length + start)]
    index = TokenIndex(text, start)
    assert all(
        index.places(level, key) == naive_places(text, num, start)
        for level, (num, key) in enumerate(zip(LENGTHS, context_keys(text), strict=True))
    )
    text.append(text[-3])
    index.grow()
    for level, (num, key) in enumerate(zip(LENGTHS, context_keys(text), strict=True)):
        assert index.places(level, key) == naive_places(text, num, start)


def test_keys_of_large_vocabularies_differ() -> None:
    texts = [[first, second] for first in range(250_000, 250_050) for second in range(262_000, 262_050)]
    assert len({context_keys(text) for text in texts}) == len(texts)
