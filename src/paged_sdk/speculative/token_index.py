"""Finds where a text has had its last tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["FEW", "LENGTHS", "MOST_PLACES", "TokenIndex", "context_keys"]

LENGTHS: Final = (8, 4, 2)
"""So many last tokens are looked for, the longest context first. One token alone is followed by anything, and beyond
eight nearly all places agree on what follows."""
MOST_PLACES: Final = 8
"""So many places that had the context are asked, the last ones: what was written last is likelier to be repeated."""

FEW: Final = 256
"""So many tokens are indexed one by one in half a millisecond."""

_BASE: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
_BASE_2: Final = _BASE * _BASE & _MASK
_BASE_4: Final = _BASE_2 * _BASE_2 & _MASK


def context_keys(token_ids: Sequence[int]) -> tuple[int, int, int]:
    """Return the keys of the last 8, 4 and 2 tokens of a text; -1 for those that the text is too short for.

    A key is a polynomial of the tokens modulo 2**64. Should two contexts share one, a guess is wrong and no text.
    """
    num = len(token_ids)
    if num < 2:
        return -1, -1, -1
    two = (token_ids[-2] * _BASE + token_ids[-1]) & _MASK
    if num < 4:
        return -1, -1, two
    four = ((token_ids[-4] * _BASE + token_ids[-3]) * _BASE_2 + two) & _MASK
    if num < 8:
        return -1, four, two
    eight = (
        ((token_ids[-8] * _BASE + token_ids[-7]) * _BASE_2 + token_ids[-6] * _BASE + token_ids[-5]) * _BASE_4 + four
    ) & _MASK
    return eight, four, two


class TokenIndex:
    """Finds the places of a text that follow given tokens, for a text that grows.

    Of every context, 8, 4 and 2 tokens long, it knows the last place that followed it, and of each place the one before
    with the same context. That is a suffix tree of bounded depth, in which frequencies are counted when it is asked: it
    takes the same time to grow by any token and about 350 bytes for each. A long text is indexed at once by sorting:
    16,000 tokens take 9 ms, where they take 28 one by one.

    :param token_ids: the text; who owns it appends to it, and calls :meth:`grow`
    :param start: places before it are not found
    :ivar token_ids: the text
    """

    def __init__(self, token_ids: list[int], start: int = 0) -> None:
        self.token_ids: list[int] = token_ids
        self._start = start
        self._num_indexed = start
        self._last: list[dict[int, int]] = [{} for _ in LENGTHS]
        self._earlier: list[list[int]] = [[] for _ in LENGTHS]
        if len(token_ids) - start > FEW:
            # Imported here, because numpy takes longer to load than all of a model without weights.
            from paged_sdk.speculative.bulk_index import context_chains

            for level, (last, earlier) in enumerate(context_chains(token_ids, start, _BASE)):
                self._last[level], self._earlier[level] = last, earlier
            self._num_indexed = len(token_ids)
        self.grow()

    def grow(self) -> None:
        """Take in the tokens that the text has got since."""
        token_ids = self.token_ids
        for place in range(self._num_indexed, len(token_ids)):
            keys = context_keys(token_ids[max(place - LENGTHS[0], self._start) : place])
            for key, last, earlier in zip(keys, self._last, self._earlier, strict=True):
                if key < 0:
                    earlier.append(-1)
                else:
                    earlier.append(last.get(key, -1))
                    last[key] = place
        self._num_indexed = len(token_ids)

    def places(self, level: int, key: int) -> list[int]:
        """Return the last places that follow a context, the last one first.

        :param level: index of the context's length in :data:`LENGTHS`
        :param key: its key, as :func:`context_keys` returns it
        """
        place = self._last[level].get(key, -1)
        if place < 0:
            return []
        found, earlier = [place], self._earlier[level]
        while len(found) < MOST_PLACES:
            place = earlier[place - self._start]
            if place < 0:
                break
            found.append(place)
        return found
