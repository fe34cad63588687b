"""Computes DRY ("don't repeat yourself") penalties, which lower the odds of repeating whole passages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paged_sdk.config.sampling import DryParams
from paged_sdk.sampling.failures import NO_FAILURES, Failures
from paged_sdk.sampling.processor import ALL_TOKENS, Processor, ProcessorState
from paged_sdk.sampling.sparse import SparseChange, add_sparse
from paged_sdk.scheduler.request import Request

__all__ = ["Dry", "DryState", "breaker_tokens", "dry_penalties"]

_LOG_OF_LARGEST_PENALTY = 88.0
"""Caps penalties near float32's largest number, since an infinite penalty would be a ban."""


class Dry(Processor[SparseChange]):
    """Lowers the logits of tokens that would extend a repetition, by ``SamplingParams.dry_params``.

    :param encode: encodes the sequence breakers to token ids, without special tokens
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def applies_until(self, request: Request) -> int:
        params = request.sampling.dry_params
        return ALL_TOKENS if params is not None and params.multiplier > 0 else 0

    def begin(self, request: Request) -> DryState:
        params = request.sampling.dry_params
        assert params is not None, "begun for a request that needs it"
        breakers = breaker_tokens(params.sequence_breakers, self._encode)
        return DryState(params, breakers, array("q", request.prompt_token_ids))

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, SparseChange]]) -> Failures:
        add_sparse(logits, changes)
        return NO_FAILURES


class DryState(ProcessorState[SparseChange]):
    """Keeps the tokens of one sequence.

    :param breakers: sequence breakers as :func:`breaker_tokens` returns them
    :param tokens: prompt and output so far, in a C array, which numpy copies at once
    """

    def __init__(self, params: DryParams, breakers: Sequence[tuple[int, ...]], tokens: array[int]) -> None:
        self._params = params
        self._breakers = breakers
        self._tokens = tokens

    def advance(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        del self._tokens[len(self._tokens) - num_tokens :]

    def fork(self) -> Self:
        return type(self)(self._params, self._breakers, self._tokens[:])

    def change(self) -> SparseChange | None:
        tokens, amounts = dry_penalties(np.array(self._tokens), self._params, self._breakers)
        return SparseChange(tokens, -amounts) if len(tokens) else None


def breaker_tokens(breakers: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Encode DRY's sequence breakers as they appear in the middle of a text.

    A token that merely contains a breaker, such as ``":\\n"``, is not a breaker.

    :param encode: encodes text to token ids, without special tokens
    """
    # Some tokenizers prepend a space to a text. After a letter, a breaker is encoded without it.
    before = encode("a")
    found = []
    for breaker in breakers:
        together = encode("a" + breaker)
        apart = together[: len(before)] == before and len(together) > len(before)
        found.append(tuple(together[len(before) :] if apart else encode(breaker)))
    return tuple(tokens for tokens in found if tokens)


def dry_penalties(
    tokens: npt.NDArray[np.int64], params: DryParams, breakers: Sequence[tuple[int, ...]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Compute the penalties of tokens that would extend a repetition.

    Let the last n tokens, all after the last breaker, also occur earlier, followed by token t. If n >= allowed_length,
    ``multiplier * base ** (n - allowed_length)`` is subtracted from the logit of t, for the largest such n. Tokens that
    are breakers themselves are never penalized. As in text-generation-webui's pull request 5677 (p-e-w, 2024), with
    breakers of several tokens as in llama.cpp.

    :param tokens: prompt and output, ``[length]``
    :param breakers: sequence breakers as :func:`breaker_tokens` returns them
    :returns: distinct token ids, and the penalty of each
    """
    none = np.empty(0, np.int64), np.empty(0, np.float32)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(ends):
        return none
    unbroken = _length_since_breaker(tokens, breakers, _length_of_largest_penalty(params))
    if unbroken < max(params.allowed_length, 1):
        return none
    lengths = np.ones(len(ends), np.int64)
    growing = np.arange(len(ends))
    for length in range(1, unbroken):
        growing = growing[ends[growing] >= length]
        growing = growing[tokens[ends[growing] - length] == tokens[-1 - length]]
        if not len(growing):
            break
        lengths[growing] += 1

    singles = [breaker[0] for breaker in breakers if len(breaker) == 1]
    followers = tokens[ends + 1]
    counted = (lengths >= params.allowed_length) & ~np.isin(followers, singles)
    if not counted.any():
        return none
    found, inverse = np.unique(followers[counted], return_inverse=True)
    longest = np.zeros(len(found), np.int64)
    np.maximum.at(longest, inverse, lengths[counted])
    growth = np.exp(np.minimum((longest - params.allowed_length) * math.log(params.base), _LOG_OF_LARGEST_PENALTY))
    return found, np.minimum(growth * min(params.multiplier, 1e38), 1e38).astype(np.float32)


def _length_of_largest_penalty(params: DryParams) -> int:
    """Return the repetition length at which penalties reach their cap."""
    if params.base == 1:
        return max(params.allowed_length, 1)
    return params.allowed_length + math.ceil(_LOG_OF_LARGEST_PENALTY / math.log(params.base))


def _length_since_breaker(tokens: npt.NDArray[np.int64], breakers: Sequence[tuple[int, ...]], most: int) -> int:
    """Count the tokens after the last breaker, up to ``most``."""
    length = min(len(tokens), most)
    for breaker in breakers:
        # A breaker counts if it ends within the last `length` tokens, even if it starts before them.
        tail = tokens[max(len(tokens) - length - len(breaker) + 1, 0) :]
        starts = np.arange(max(len(tail) - len(breaker) + 1, 0))
        for offset, token in enumerate(breaker):
            starts = starts[tail[starts + offset] == token]
        if len(starts):
            length = len(tail) - int(starts[-1]) - len(breaker)
    return length
