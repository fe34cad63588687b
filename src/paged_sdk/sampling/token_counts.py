"""Counts the tokens of one sequence incrementally."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TokenCounts"]


class TokenCounts:
    """Keeps the distinct tokens of prompt and output, and how often each occurs in the output.

    Adding or removing an output token costs a few dictionary operations.

    :param prompt: token ids that are listed but not counted
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._output: list[int] = []
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._num_prompt_slots = len(self._slots)
        # C arrays: numpy copies them at once, but lists element by element.
        self._tokens = array("q", self._slots)
        self._counts = array("q", bytes(8 * len(self._slots)))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the output."""
        self._output += token_ids
        for token in token_ids:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._counts):
                self._tokens.append(token)
                self._counts.append(0)
            self._counts[slot] += 1

    def roll_back(self, num_tokens: int) -> None:
        """Remove the last tokens of the output."""
        for _ in range(num_tokens):
            token = self._output.pop()
            slot = self._slots[token]
            self._counts[slot] -= 1
            # Tokens that first occurred later are already removed, so a token whose count drops to 0 has the last slot.
            if not self._counts[slot] and slot >= self._num_prompt_slots:
                del self._slots[token]
                self._tokens.pop()
                self._counts.pop()

    def fork(self) -> TokenCounts:
        """Make an independent copy."""
        forked = TokenCounts(())
        forked._output = self._output.copy()
        forked._slots = self._slots.copy()
        forked._num_prompt_slots = self._num_prompt_slots
        forked._tokens = self._tokens[:]
        forked._counts = self._counts[:]
        return forked

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Return the distinct tokens of prompt and output."""
        return np.array(self._tokens)

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """Return how often each of :attr:`tokens` occurs in the output."""
        return np.array(self._counts)
