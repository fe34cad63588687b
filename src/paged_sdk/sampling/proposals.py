"""Proposes tokens to constraints: all that is banned need not be known where a token is allowed that a row would get
anyway.

Of a row whose likeliest token is taken, that is proposed, then those after it. The first one that is allowed is the
likeliest of all that are.

Of a row whose token is drawn, NUM_DRAWN are proposed, drawn independently from p, the distribution of all tokens by
temperature alone. Its own distribution is M(x) = p(x) / p(K) for x in K, which is what top-p and min-p keep of the
allowed tokens. The first proposal that lies in K is taken; if none does, a token is drawn from M with a number of its
own. With s = p(K), and n proposals, M comes out whatever s is:

    P(x) = p(x) (1 + (1 - s) + ... + (1 - s)^(n-1)) + (1 - s)^n M(x) = M(x) (1 - (1 - s)^n) + (1 - s)^n M(x) = M(x).

All numbers depend on seed, choice and position alone, and whether a token lies in K on its row alone: so it is the same
whether a mask was made or the grammar was asked. With top-k, p is not proposed: much of it lies where top-k keeps
nothing, and to sum it takes as long as masks do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.sampling.candidates import argmax, likeliest, select_rows
from paged_sdk.sampling.processor import Processor
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.truncation import NOT_DRAWN, Settings, draw_from_all, is_greedy
from paged_sdk.sampling.uniform import more_uniforms

__all__ = ["NUM_DRAWN", "Proposals", "numbers_of"]

Ids: TypeAlias = npt.NDArray[np.int64]
Allows: TypeAlias = Callable[[int], bool]

NUM_DRAWN: Final = 4
"""To ask for a token takes 3 us, a mask 100 to 300."""
_NUM_LIKELIEST: Final = 8
_MOST_AHEAD: Final = 8
_MARGIN: Final = 1e-5
"""Is more than the rounding of sums of float32 weights."""
_NUMBERS_AT_ONCE: Final = 1 << 19
"""Bounds copies of logits: 2 MB stay in the cache between the operations that make weights of them."""


class Proposals:
    """Proposes tokens to the last processor.

    :param logits: float32 ``[N, V]``, as all other processors have left them
    :param rows: of all logits
    :param changes: rows that can be asked about, and their changes
    :ivar taken: the tokens of rows that are settled
    :ivar drawn: what was proposed to the others that draw, ``[num_samples, NUM_DRAWN]`` each; below 0: no token
    """

    def __init__(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        processor: Processor[Any],
        changes: Sequence[tuple[int, Any]],
    ) -> None:
        self.taken: dict[int, list[int]] = {}
        self.drawn: dict[int, Ids] = {}
        self._logits = logits
        self._rows = rows
        greedy: list[int] = []
        drawing: list[int] = []
        for index, _ in changes:
            params = rows[index].request.sampling
            if is_greedy(params):
                greedy.append(index)
            elif params.top_k is None or params.top_k >= logits.shape[1]:
                drawing.append(index)
        self._allows: dict[int, Allows] = {index: partial(processor.allows, change) for index, change in changes}
        if greedy:
            self._take_likeliest(greedy)
        if drawing:
            self._draw(drawing)

    def _take_likeliest(self, indices: Sequence[int]) -> None:
        tokens = argmax(select_rows(self._logits, indices)).tolist()
        for index, token in zip(indices, tokens, strict=True):
            row = self._logits[index]
            if math.isfinite(row[token]) and not self._allows[index](token):
                token = self._next_likeliest(index)
            if token != NOT_DRAWN and math.isfinite(row[token]):
                self.taken[index] = [token] * self._rows[index].num_samples

    def _next_likeliest(self, index: int) -> int:
        """Return the first allowed one of the tokens that follow the likeliest; or that none was found."""
        row = self._logits[index : index + 1]
        values, tokens = (each[0] for each in likeliest(row, min(_NUM_LIKELIEST, row.shape[1])))
        # Of those that tie with the last, likelier ones may be missing; that may also be -inf.
        found = (token for token in tokens[values > values[-1]][1:].tolist() if self._allows[index](token))
        return next(found, NOT_DRAWN)

    def _draw(self, indices: Sequence[int]) -> None:
        at_once = max(_NUMBERS_AT_ONCE // self._logits.shape[1], 1)
        for start in range(0, len(indices), at_once):
            some = indices[start : start + at_once]
            own = [self._rows[index] for index in some]
            owners = np.repeat(np.arange(len(own)), [row.num_samples * NUM_DRAWN for row in own])
            settings = Settings.of([row.request.sampling for row in own], self._logits.shape[1])
            numbers = numbers_of(own, NUM_DRAWN).ravel()
            logits = select_rows(self._logits, some)
            drawn = draw_from_all(logits, settings.only_temperature(), owners, numbers, keeps_logits=True)
            drawn = drawn.reshape(-1, NUM_DRAWN)
            at = 0
            for index, row in zip(some, own, strict=True):
                self._settle(index, drawn[at : at + row.num_samples])
                at += row.num_samples

    def _settle(self, index: int, proposed: Ids) -> None:
        """Take the first proposal of each sample that is kept, where that can be told of all samples."""
        chosen = []
        for tokens in proposed.tolist():
            token = next((token for token in tokens if token == NOT_DRAWN or self._allows[index](token)), NOT_DRAWN)
            if token == NOT_DRAWN or not self._is_kept(index, token):
                self.drawn[index] = proposed
                return
            chosen.append(token)
        self.taken[index] = chosen

    def _is_kept(self, index: int, token: int) -> bool:
        """Tell whether it is certain that top-p and min-p keep an allowed token, of all allowed ones."""
        params = self._rows[index].request.sampling
        top_p, min_p = params.top_p or 1.0, params.min_p or 0.0
        if top_p >= 1 and min_p <= 0:
            return True
        if self._logits.device.type != "cpu":
            return False
        row = self._logits[index].numpy()
        ahead = np.flatnonzero(row >= row[token])
        ahead = ahead[(row[ahead] > row[token]) | (ahead < token)]
        if len(ahead) > _MOST_AHEAD:
            return False
        temperature = 1.0 if params.temperature is None else params.temperature
        weights = np.exp((row[[token, *ahead]].astype(np.float64) - row[[token, *ahead]].max()) / temperature)
        # The largest of all tokens may be banned: among those that are not, a token weighs more.
        if weights[0] < min_p * (1 + _MARGIN):
            return False
        allows = self._allows[index]
        before = sum(weight for each, weight in zip(ahead, weights[1:], strict=True) if allows(int(each)))
        # All that is allowed weighs as much as this at least.
        return bool(before * (1 + _MARGIN) < top_p * (before + weights[0]))


def numbers_of(rows: Sequence[SampleRow], num: int) -> npt.NDArray[np.float64]:
    """Return random numbers for the samples of some rows.

    :returns: ``[num_samples of all, num]``
    """
    streams = [(row, row.choice_index + sample) for row in rows for sample in range(row.num_samples)]
    return more_uniforms(
        [seed_of(row.request.sampling) for row, _ in streams],
        [choice for _, choice in streams],
        [row.num_output_tokens for row, _ in streams],
        num,
    )


def seed_of(params: SamplingParams) -> int:
    """Return the seed of a request that the scheduler has."""
    assert params.seed is not None, "the scheduler's sequences have a seed"
    return params.seed
