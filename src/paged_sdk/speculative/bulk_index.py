"""Indexes the contexts of a whole text at once, by sorting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["context_chains"]


def context_chains(token_ids: Sequence[int], start: int, base: int) -> list[tuple[dict[int, int], list[int]]]:
    """Return chains of equal contexts, for contexts of 8, 4 and 2 tokens.

    :param start: the first token of the first context, and the place of the first entry of the lists
    :param base: base of the polynomials that are the contexts' keys
    :returns: for each length, the last place of each context, and for each place the previous one with the same
        context, or -1. A context's place is the index of the token after it.
    """
    keys = np.array(token_ids[start:], dtype=np.int64).astype(np.uint64)
    num_places, found = len(keys), []
    for length, shift in ((2, 1), (4, 2), (8, 4)):
        keys = keys[:-shift] * np.uint64(base) + keys[shift:]
        base = base * base % 2**64
        last, earlier = _chains(keys[:-1], start + length)  # nothing follows the last context yet
        found.append((last, [-1] * (num_places - len(earlier)) + earlier))
    return found[::-1]


def _chains(keys: npt.NDArray[np.uint64], first: int) -> tuple[dict[int, int], list[int]]:
    """Return the last place of each key, and for each place the previous one with the same key, or -1.

    :param first: the place of the first key
    """
    count = len(keys)
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    earlier = np.full(count, -1, dtype=np.int64)
    earlier[order[1:][same]] = order[:-1][same] + first
    return dict(zip(keys.tolist(), range(first, first + count), strict=True)), earlier.tolist()
