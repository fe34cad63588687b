"""A sequence's tokens in the forms that penalties read, kept from step to step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TokenHistory"]


class TokenHistory:
    """The tokens of one sequence and how often each occurs in its output.

    A step costs a few dictionary operations per new token; the earlier ones are only compared, in C.

    :param token_ids: prompt and output
    :param num_prompt_tokens: how many of them are the prompt
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids = list(token_ids[:num_prompt_tokens])
        # C arrays beside the list: numpy copies them in one go, a list element by element.
        self._tokens = array("q", self._token_ids)
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(self._token_ids))}
        self._distinct_tokens = array("q", self._slots)
        self._output_counts = array("q", bytes(8 * len(self._slots)))
        self._extend(token_ids[num_prompt_tokens:])

    def catch_up(self, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Take in what the sequence has gained.

        :returns: False, with nothing taken in, if it does not continue what is known: make a new history
        """
        known = len(self._token_ids)
        if num_prompt_tokens != self._num_prompt_tokens or list(token_ids[:known]) != self._token_ids:
            return False
        self._extend(token_ids[known:])
        return True

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and output."""
        return np.array(self._tokens)

    @property
    def distinct_tokens(self) -> npt.NDArray[np.int64]:
        """Every token that occurs, once."""
        return np.array(self._distinct_tokens)

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """How often each of :attr:`distinct_tokens` occurs in the output."""
        return np.array(self._output_counts)

    def _extend(self, output: Iterable[int]) -> None:
        for token in output:
            self._token_ids.append(token)
            self._tokens.append(token)
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._output_counts):
                self._distinct_tokens.append(token)
                self._output_counts.append(0)
            self._output_counts[slot] += 1
