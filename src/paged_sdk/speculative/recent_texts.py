"""Keeps what a model has said last, for texts that repeat it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.speculative.token_index import TokenIndex

__all__ = ["RecentTexts"]

MOST_OF_ONE: Final = 16_384
"""Of what one caller's texts were, so many tokens are kept."""
MOST: Final = 65_536
"""Of what all callers' texts were, so many tokens are kept: 25 MB."""
MOST_OF_TEXT: Final = 4_096
"""Of one text so many tokens are taken, its last: 7 ms between two steps."""


class RecentTexts:
    """Keeps the last texts of a model, bounded in all.

    Texts are kept apart by what their requests share no KV across: a cache salt, and whatever else is part of the
    prefix cache's keys. Otherwise the speed of one caller's texts would tell what another's were.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[CacheKey, ...], TokenIndex] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are kept."""
        return sum(len(index.token_ids) for index in self._of.values())

    def of(self, keys: tuple[CacheKey, ...]) -> TokenIndex | None:
        """Return the texts of requests with these keys. What is returned may grow, or be replaced by the next call."""
        return self._of.get(keys)

    def add(self, keys: tuple[CacheKey, ...], token_ids: Sequence[int]) -> None:
        """Keep a text that has ended."""
        text = list(token_ids[-MOST_OF_TEXT:])
        if not text:
            return
        index = self._of.get(keys)
        if index is None:
            self._of[keys] = TokenIndex(text)
        elif len(index.token_ids) + len(text) > MOST_OF_ONE:
            # Who follows the old texts keeps them until it has lost its place.
            self._of[keys] = TokenIndex(index.token_ids[-MOST_OF_ONE // 2 :] + text)
        else:
            index.token_ids.extend(text)
            index.grow()
        self._of.move_to_end(keys)
        while self.num_tokens > MOST:
            self._of.popitem(last=False)
