"""Chooses how many drafts of each text a step verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["draft_counts"]

MARGIN: Final = 1.03
"""Drafts have to promise so much: estimates are no better, and a choice that gains nothing costs its making."""


def draft_counts(chances: Sequence[Sequence[float]], seconds: Callable[[int], float]) -> list[int]:
    """Choose the numbers of drafts with which texts get the most tokens per second.

    :param chances: for each text how likely the first draft is right, the first two are, and so on
    :param seconds: how long a step with so many tokens takes; 0 if that is not known
    """
    num_texts, counts = len(chances), [0] * len(chances)
    plain = seconds(num_texts)
    if not plain:
        return counts
    # A draft is of use only after those before it, which are likelier to be right: so the likeliest come first.
    ranked = sorted(
        ((chance, -ahead, text) for text, row in enumerate(chances) for ahead, chance in enumerate(row)), reverse=True
    )
    most, num_drafts, tokens = MARGIN * num_texts / plain, 0, float(num_texts)
    for count, (chance, _, _) in enumerate(ranked, start=1):
        tokens += chance
        rate = tokens / seconds(num_texts + count)
        if rate > most:
            most, num_drafts = rate, count
    for _, _, text in ranked[:num_drafts]:
        counts[text] += 1
    return counts
