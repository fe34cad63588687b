"""Keeps a model's most recent outputs, as a source of drafts for outputs that repeat them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.speculative.token_index import TokenIndex

__all__ = ["RecentTexts"]

MOST_OF_ONE: Final = 16_384
"""Most tokens kept for one set of cache keys."""
MOST: Final = 65_536
"""Most tokens kept in all: 25 MB."""
MOST_OF_TEXT: Final = 4_096
"""Most tokens kept of one output, its last ones: 7 ms between two steps."""


class RecentTexts:
    """Keeps the most recent outputs of a model, up to a total number of tokens.

    Outputs are kept apart by the keys of the prefix cache, such as the cache salt. Otherwise one caller could infer
    another's output from the speed of its own.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[CacheKey, ...], TokenIndex] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens kept."""
        return self._num_tokens

    def of(self, keys: tuple[CacheKey, ...]) -> TokenIndex | None:
        """Return the outputs of requests with these keys. The index may grow, and :meth:`add` may replace it."""
        return self._of.get(keys)

    def add(self, keys: tuple[CacheKey, ...], token_ids: Sequence[int]) -> None:
        """Keep the output of a sequence that has ended."""
        text = list(token_ids[-MOST_OF_TEXT:])
        if not text:
            return
        index = self._of.get(keys)
        num_before = 0 if index is None else len(index.token_ids)
        if index is None:
            self._of[keys] = TokenIndex(text)
        elif num_before + len(text) > MOST_OF_ONE:
            # Followers of the old index keep it until their sequences end.
            self._of[keys] = TokenIndex(index.token_ids[-MOST_OF_ONE // 2 :] + text)
        else:
            index.token_ids.extend(text)
            index.grow()
        self._of.move_to_end(keys)
        self._num_tokens += len(self._of[keys].token_ids) - num_before
        while self._num_tokens > MOST:
            _, oldest = self._of.popitem(last=False)
            self._num_tokens -= len(oldest.token_ids)
