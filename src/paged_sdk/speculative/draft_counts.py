"""Chooses how many drafts of each text a step verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["draft_counts"]

MARGIN: Final = 1.15
"""Drafts have to promise so much: times of steps and chances are known no better. With 1.03, single drafts that were
right once in twenty times were tried at every step of prose wherever two tokens were timed to take as long as one. With
1.1, four texts of prose after edits took 1 % longer, with 1.2, edits 2 %."""


def draft_counts(
    chances: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    may_lose: float,
    drafting_seconds: Callable[[int], float] = lambda ahead: 0.0,
) -> list[int]:
    """Choose the numbers of drafts with which texts get the most tokens per second.

    :param chances: for each text how likely the first draft is right, the first two are, and so on
    :param seconds: how long a step with so many tokens takes; 0 if that is not known
    :param may_lose: how much longer the step may take than one without drafts, in such steps: should all drafts be
        wrong, no more is lost
    :param drafting_seconds: how long it takes to make so many drafts of texts
    """
    num_texts, counts = len(chances), [0] * len(chances)
    plain = seconds(num_texts)
    if not plain:
        return counts
    # A draft is of use only after those before it, which are likelier to be right: so the likeliest come first.
    ranked = sorted(
        ((chance, -ahead, text) for text, row in enumerate(chances) for ahead, chance in enumerate(row)), reverse=True
    )
    most, num_drafts, tokens, deepest = MARGIN * num_texts / plain, 0, float(num_texts), 0
    for count, (chance, place, _) in enumerate(ranked, start=1):
        tokens += chance
        deepest = max(deepest, 1 - place)
        longer = seconds(num_texts + count) + drafting_seconds(deepest)
        if longer > (1 + may_lose) * plain:
            break
        rate = tokens / longer
        if rate > most:
            most, num_drafts = rate, count
    for _, _, text in ranked[:num_drafts]:
        counts[text] += 1
    return counts
