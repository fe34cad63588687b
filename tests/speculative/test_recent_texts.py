"""What is kept of texts that have ended."""

from __future__ import annotations

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.speculative.recent_texts import MOST, MOST_OF_ONE, MOST_OF_TEXT, RecentTexts
from paged_sdk.speculative.token_index import context_keys

SALT = (CacheKey(b"salt:a"),)


def test_texts_are_found_by_those_with_the_same_keys_alone() -> None:
    recent = RecentTexts()
    recent.add(SALT, [1, 2, 3, 4])
    recent.add(SALT, [5, 6, 7])
    recent.add((), [8, 9])
    index = recent.of(SALT)
    assert index is not None
    assert index.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert index.places(2, context_keys([5, 6])[2]) == [6]
    assert recent.of((CacheKey(b"salt:b"),)) is None
    others = recent.of(())
    assert others is not None
    assert others.token_ids == [8, 9]


def test_memory_is_bounded_whatever_is_said() -> None:
    recent = RecentTexts()
    recent.add(SALT, [])
    assert recent.num_tokens == 0
    for count in range(30):
        recent.add(SALT, [count] * (MOST_OF_TEXT + 5))
        kept = recent.of(SALT)
        assert kept is not None
        assert recent.num_tokens == len(kept.token_ids) <= MOST_OF_ONE
        assert kept.token_ids[-1] == count
    for caller in range(40):
        recent.add((CacheKey(b"%d" % caller),), [caller] * MOST_OF_TEXT)
        assert recent.num_tokens <= MOST
    assert recent.of(SALT) is None
    assert recent.num_tokens == MOST  # what was dropped counts no more
