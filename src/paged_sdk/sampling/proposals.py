"""Samples constrained rows without a mask where possible: proposes the tokens that a row would get without its
constraint, and asks the constraint whether it allows them.

For a greedy row, the likeliest tokens are proposed in order. The first allowed one is the likeliest allowed token.

For a row that draws, NUM_DRAWN tokens are drawn independently from p, the softmax of all tokens at the row's
temperature. The distribution to sample is M(x) = p(x) / p(K) for x in K, where K are the tokens that top-p and min-p
keep of the allowed ones. The first proposal that is in K is taken. If none is, a token is drawn from M with another
random number. With s = p(K) and n proposals, the result has distribution M for any s:

    P(x) = p(x) (1 + (1 - s) + ... + (1 - s)^(n-1)) + (1 - s)^n M(x) = M(x) (1 - (1 - s)^n) + (1 - s)^n M(x) = M(x).

The random numbers depend only on seed, choice and position, and K only on the row. So the token is the same whether a
mask was computed or the constraint was asked. Rows with top-k are not proposed to: much of p lies outside of the top k,
and summing p takes as long as computing a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.candidates import likeliest, select_rows
from paged_sdk.sampling.processor import Processor
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.token_draw import TokenDraw
from paged_sdk.sampling.truncation import draw_greedy, is_greedy

__all__ = ["NUM_DRAWN", "Proposals"]

Ids: TypeAlias = npt.NDArray[np.int64]
Allows: TypeAlias = Callable[[int], bool]

NUM_DRAWN: Final = 4
"""Checking one token takes 3 us, computing a mask 100 to 300 us."""
_NUM_LIKELIEST: Final = 8
_MOST_AHEAD: Final = 8
_MARGIN: Final = 1e-5
"""Relative margin, larger than the rounding error of sums of float32 weights."""


class Proposals:
    """Proposes tokens to the last processor.

    :param logits: float32 ``[N, V]``, changed by all other processors
    :param rows: one per row of the logits
    :param changes: the rows to propose for, and their changes
    :param token_draw: draws the proposals
    :param likeliest_tokens: the likeliest tokens of rows where they are known
    :ivar taken: the chosen tokens of rows that need no mask
    :ivar drawn: the proposals of the other rows that draw, ``[num_samples, NUM_DRAWN]`` each; below 0: no token
    """

    def __init__(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        processor: Processor[Any],
        changes: Sequence[tuple[int, Any]],
        token_draw: TokenDraw,
        likeliest_tokens: Mapping[int, int],
    ) -> None:
        self.taken: dict[int, list[int]] = {}
        self.drawn: dict[int, Ids] = {}
        self._logits = logits
        self._rows = rows
        self._token_draw = token_draw
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
            self._take_likeliest(greedy, likeliest_tokens)
        if drawing:
            self._draw(drawing)

    def _take_likeliest(self, indices: Sequence[int], known: Mapping[int, int]) -> None:
        unknown = [index for index in indices if index not in known]
        found = draw_greedy(select_rows(self._logits, unknown)).tolist() if unknown else []
        tokens = {**known, **dict(zip(unknown, found, strict=True))}
        drawn = [index for index in indices if tokens[index] != NOT_DRAWN]
        banned = [index for index in drawn if not self._take(index, [tokens[index]])]
        if banned:
            self._take_next_likeliest(banned)

    def _take_next_likeliest(self, indices: Sequence[int]) -> None:
        """Take the likeliest allowed token of each row after the likeliest one, unless the next few are all banned."""
        width = min(_NUM_LIKELIEST, self._logits.shape[1])
        for index, values, tokens in zip(indices, *likeliest(select_rows(self._logits, indices), width), strict=True):
            # Skip tokens that tie with the last: ties with lower ids may be missing from the list, and all may be -inf.
            self._take(index, tokens[values > values[-1]][1:].tolist())

    def _take(self, index: int, tokens: Sequence[int]) -> bool:
        """Take the first of some tokens that is allowed, and tell whether one is."""
        token = next(filter(self._allows[index], tokens), NOT_DRAWN)
        if token != NOT_DRAWN:
            self.taken[index] = [token] * self._rows[index].num_samples
        return token != NOT_DRAWN

    def _draw(self, indices: Sequence[int]) -> None:
        proposed = self._token_draw.propose(self._logits, self._rows, indices, NUM_DRAWN)
        for index, own in zip(indices, proposed, strict=True):
            self._settle(index, own)

    def _settle(self, index: int, proposed: Ids) -> None:
        """Take the first allowed proposal of each sample, if it is certain for all samples that top-p and min-p keep
        it.
        """
        chosen = []
        for tokens in proposed.tolist():
            token = next((token for token in tokens if token == NOT_DRAWN or self._allows[index](token)), NOT_DRAWN)
            if token == NOT_DRAWN or not self._is_kept(index, token):
                self.drawn[index] = proposed
                return
            chosen.append(token)
        self.taken[index] = chosen

    def _is_kept(self, index: int, token: int) -> bool:
        """Tell whether top-p and min-p, applied to the allowed tokens, certainly keep this allowed token."""
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
        # Weights are relative to the likeliest token, banned or not; relative to the allowed ones they are no smaller.
        if weights[0] < min_p * (1 + _MARGIN):
            return False
        allows = self._allows[index]
        before = sum(weight for each, weight in zip(ahead, weights[1:], strict=True) if allows(int(each)))
        # All allowed tokens together weigh at least as much as these.
        return bool(before * (1 + _MARGIN) < top_p * (before + weights[0]))
