"""Truncates distributions by temperature, top-k, top-p and min-p, and draws from them, where the native kernels cannot.

The device does what reads whole rows of logits: finding candidates and summing weights. The rest, on a few hundred
candidates per row, runs in float64 on the host, so it is the same for every device, and independent of other rows.

A row's own settings select one of two methods:

- With top-k or top-p, the likeliest tokens are sorted (ties: lower id first), and the inverse CDF runs over them in
  that order. Only if a distribution is too flat to be truncated within these candidates are more of its tokens sorted.
- Without, nothing is sorted, and the inverse CDF runs over the vocabulary in the order of token ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kernels.native.argmax import likeliest_tokens
from paged_sdk.kernels.native.library import load
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.candidates import argmax, likeliest, likeliest_from, select_rows

__all__ = [
    "Settings",
    "draw_from_all",
    "draw_from_likeliest",
    "draw_greedy",
    "is_greedy",
    "num_candidates",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

_TOP_P_CANDIDATES: Final = 256
"""Enough for the nucleus of most language model distributions at top_p = 0.9; more would cost time in every step."""

_SUM_BLOCK: Final = 128
"""Tokens per block in the two-level inverse CDF over the vocabulary."""

_LEAST_EXPONENT: Final = -87.0
_LEAST_WEIGHT: Final = 1.7e-38
"""Weights up to this are set to 0. Larger than exp(_LEAST_EXPONENT), and negligible beside the likeliest token's 1."""

_NUMBERS_AT_ONCE: Final = 1 << 20
"""Bounds copies of logits: larger copies cost more in page faults than in arithmetic."""


@frozen(eq=False)
class Settings:
    """Holds the settings of R rows, each ``[R, 1]``; a setting that is off has a value that keeps every token."""

    temperature: Floats
    top_k: Ids
    top_p: Floats
    min_p: Floats

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Settings:
        def column(values: Sequence[float | None], off: float) -> Floats:
            return np.array([[off if value is None else value] for value in values], np.float64)

        return cls(
            # Must be finite in float32: -inf divided by inf is NaN.
            temperature=column([each.temperature for each in params], 1).clip(max=1e30),
            top_k=np.array([[min(each.top_k or vocab_size, vocab_size)] for each in params], np.int64),
            top_p=column([each.top_p for each in params], 1),
            min_p=column([each.min_p for each in params], 0),
        )

    def only_temperature(self) -> Settings:
        """Return the same settings without top-k, top-p and min-p."""
        everything = np.full_like(self.top_k, np.iinfo(np.int64).max)
        return Settings(self.temperature, everything, np.ones_like(self.top_p), np.zeros_like(self.min_p))

    def select(self, rows: Ids) -> Settings:
        """Return the settings of some rows."""
        return Settings(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def is_greedy(params: SamplingParams) -> bool:
    """Tell whether the likeliest token is taken."""
    return params.is_greedy or params.top_k == 1


def num_candidates(params: SamplingParams, vocab_size: int) -> int:
    """Return the ``width`` of a row for :func:`draw_from_likeliest`; 0: use :func:`draw_from_all`.

    The width depends on the row's own settings alone, so that results do not depend on the batch.
    """
    if params.top_k is not None and params.top_k < vocab_size:
        # Room for ties with the last token (many if the logits were bfloat16); powers of two, so few different widths.
        return min(max(64, 1 << (2 * params.top_k - 1).bit_length()), vocab_size)
    if params.top_p is not None and params.top_p < 1:
        return min(_TOP_P_CANDIDATES, vocab_size)
    return 0


def draw_greedy(logits: Tensor) -> Ids:
    """Return the likeliest token of each row or :data:`NOT_DRAWN`, ``[R]``."""
    library = load() if logits.device.type == "cpu" else None
    if library is not None:
        found: Ids = likeliest_tokens(library, logits).numpy()  # one pass, on all threads
        return found
    tokens = argmax(logits)
    if logits.device.type != "cpu":  # argmax has already checked for finite logits there
        return tokens
    largest = logits.numpy()[np.arange(len(tokens)), tokens]
    return np.where(np.isfinite(largest), tokens, NOT_DRAWN)


def draw_from_likeliest(
    logits: Tensor, settings: Settings, width: int, rows: Ids, uniforms: Floats, proposed: Ids | None = None
) -> Ids:
    """Draw tokens of rows with top-k or top-p.

    Among tokens that tie for the last place that top-k or top-p keeps, those with the lowest ids are kept.

    :param logits: float32 ``[R, V]``
    :param width: the result of :func:`num_candidates`, the same for all rows
    :param rows: the row of each draw, ``[M]``
    :param uniforms: a number in [0, 1) for each draw, ``[M]``
    :param proposed: proposed tokens of each draw, ``[M, N]``; below 0: no token. The first that is kept is taken
        instead of a drawn one
    :returns: token ids or :data:`NOT_DRAWN`, ``[M]``
    """
    vocab_size = logits.shape[1]
    values, tokens = likeliest(logits, width)
    good = np.isfinite(values[:, 0]) & ~np.isnan(values).any(axis=1)
    values[~good] = 0
    # Top-p applies to the tokens that top-k keeps; without top-k, to the whole vocabulary, not only the candidates.
    totals = np.full((len(values), 1), np.nan)
    whole = np.flatnonzero(good & (settings.top_k[:, 0] == vocab_size))
    if len(whole):
        totals[whole] = _total_weight(select_rows(logits, whole.tolist()), settings.select(whole))
    cumulative, kept = _keep(values, settings, totals)

    drawn = np.full(len(rows), NOT_DRAWN, np.int64)
    last_kept = np.take_along_axis(values, kept - 1, axis=1)
    settled = (last_kept > values[:, -1:])[:, 0] | (width == vocab_size) | ~good
    ready = (settled & good)[rows]
    drawn[ready] = tokens[rows[ready], _inverse_cdf(cumulative, kept, rows[ready], uniforms[ready])]
    if proposed is not None:
        for draw in np.flatnonzero(ready):
            row = rows[draw]
            drawn[draw] = _first_in(tokens[row, : kept[row, 0]], proposed[draw], drawn[draw])

    for row in np.flatnonzero(~settled):
        own = settings.select(np.array([row]))
        threshold = _threshold(values[row], own, float(totals[row, 0]), vocab_size)
        row_values, row_tokens = likeliest_from(logits[int(row)], threshold)
        cumulative, kept = _keep(row_values[None], own, totals[row : row + 1])
        mine = rows == row
        drawn[mine] = row_tokens[_inverse_cdf(cumulative, kept, np.zeros_like(rows[mine]), uniforms[mine])]
        if proposed is not None:
            for draw in np.flatnonzero(mine):
                drawn[draw] = _first_in(row_tokens[: kept[0, 0]], proposed[draw], drawn[draw])
    return drawn


def draw_from_all(
    logits: Tensor,
    settings: Settings,
    rows: Ids,
    uniforms: Floats,
    proposed: Ids | None = None,
    *,
    keeps_logits: bool = False,
) -> Ids:
    """Draw tokens of rows with neither top-k nor top-p.

    :param logits: float32 ``[R, V]``; overwritten unless ``keeps_logits``
    :param rows: the row of each draw, ``[M]``
    :param uniforms: a number in [0, 1) for each draw, ``[M]``
    :param proposed: as for :func:`draw_from_likeliest`
    :returns: token ids or :data:`NOT_DRAWN`, ``[M]``
    """
    weights = _to_weights(logits, settings, keeps_logits=keeps_logits)
    for row in np.flatnonzero(settings.min_p[:, 0]):
        below = np.nextafter(np.float32(settings.min_p[row, 0]), np.float32(-1))
        torch.threshold_(weights[int(row)], float(below), 0.0)  # a tenth of the time of comparing and multiplying
    blocks = _blocks(weights)
    cumulative = _floats(blocks.sum(dim=-1)).cumsum(axis=1)

    drawn = np.full(len(rows), NOT_DRAWN, np.int64)
    good = (cumulative[:, -1] > 0)[rows]  # False for NaN
    if proposed is not None:
        draws = np.flatnonzero(good & (proposed[:, 0] >= 0))
        own = weights[torch.from_numpy(rows[draws, None]), torch.from_numpy(proposed[draws])].cpu().numpy() > 0
        found = own.any(axis=1)
        drawn[draws[found]] = proposed[draws, own.argmax(axis=1)][found]
        good[draws[found]] = False
    rows, uniforms = rows[good], uniforms[good]
    last = np.full((len(cumulative), 1), cumulative.shape[1])
    block = _inverse_cdf(cumulative, last, rows, uniforms)
    start = np.where(block > 0, cumulative[rows, block - 1], 0)
    # Position of the target within its block, as a fraction: block sums are float32, sums within the block float64.
    within = (uniforms * cumulative[rows, -1] - start) / (cumulative[rows, block] - start)
    inner = _floats(blocks[torch.from_numpy(rows), torch.from_numpy(block)]).cumsum(axis=1)
    last = np.full((len(inner), 1), _SUM_BLOCK)
    offset = _inverse_cdf(inner, last, np.arange(len(inner)), np.clip(within, 0, np.nextafter(1, 0)))
    drawn[good] = block * _SUM_BLOCK + offset
    return drawn


def _first_in(kept: Ids, proposed: Ids, otherwise: int) -> int:
    """Return the first proposed token that is kept, or ``otherwise``."""
    found = proposed[np.isin(proposed, kept)]
    return int(found[0]) if len(found) else otherwise


def _keep(values: npt.NDArray[np.float32], settings: Settings, totals: Floats) -> tuple[Floats, Ids]:
    """Apply the settings to sorted candidates.

    :param values: logits ``[R, C]``, descending
    :param totals: the weight of the whole vocabulary relative to its likeliest token, ``[R, 1]``; NaN for rows with
        top-k
    :returns: cumulative weights ``[R, C]``, and the number of leading candidates that are kept ``[R, 1]``
    """
    num_columns = values.shape[1]
    weights = np.exp((values.astype(np.float64) - values[:, :1]) / settings.temperature)
    cumulative = weights.cumsum(axis=1)
    top_k_total = np.take_along_axis(cumulative, np.minimum(settings.top_k, num_columns) - 1, axis=1)
    totals = np.where(np.isnan(totals), top_k_total, totals)
    before = np.zeros_like(cumulative)
    before[:, 1:] = cumulative[:, :-1]
    keep = np.arange(num_columns) < settings.top_k
    keep &= before < settings.top_p * totals
    keep &= (weights >= settings.min_p) & (weights > 0)  # banned tokens, which may be proposed, have weight 0
    return cumulative, keep.sum(axis=1, keepdims=True)


def _inverse_cdf(cumulative: Floats, kept: Ids, rows: Ids, uniforms: Floats) -> Ids:
    """Draw columns by weight from the first ``kept`` columns of each draw's row.

    A number below 1 times the kept weight is below the kept weight. So no column after the kept ones is drawn, and no
    column with weight 0.
    """
    mass = np.take_along_axis(cumulative, kept - 1, axis=1)[rows, 0]
    columns: Ids = (cumulative[rows] <= (uniforms * mass)[:, None]).sum(axis=1)
    return columns


def _threshold(values: npt.NDArray[np.float32], settings: Settings, total: float, vocab_size: int) -> float:
    """Return a logit below which a row keeps no token.

    :param values: logits of the row's candidates, descending; at least top-k of them
    """
    top_k = int(settings.top_k[0, 0])
    if top_k < vocab_size:
        return float(values[top_k - 1])
    # All tokens less likely than (1 - p) / V have less than 1 - p together, so top-p is reached without them.
    # The factors 1/2 and 1e-6 allow for rounding.
    least = (1 - float(settings.top_p[0, 0])) / vocab_size / 2
    threshold = float(values[0]) + float(settings.temperature[0, 0]) * math.log(least * total)
    return max(threshold - abs(threshold) * 1e-6, float(np.finfo(np.float32).min))


def _to_weights(logits: Tensor, settings: Settings, *, keeps_logits: bool) -> Tensor:
    """Turn logits into weights relative to the row's likeliest token, in place unless ``keeps_logits``."""
    largest = logits.amax(dim=-1, keepdim=True)
    logits = logits.sub(largest) if keeps_logits else logits.sub_(largest)
    if (settings.temperature != 1).any():
        logits.div_(torch.from_numpy(settings.temperature).to(logits))
    # On a CPU, exp is 3 times as slow at -inf, and 36 times for results below 1.2e-38 (denormals), of which there are
    # many at low temperatures. Such weights are set to 0.
    weights = logits.clamp_(min=_LEAST_EXPONENT).exp_()
    return torch.threshold_(weights, _LEAST_WEIGHT, 0.0)


def _total_weight(logits: Tensor, settings: Settings) -> Floats:
    """Sum the weights of the whole vocabulary, relative to the row's likeliest token, ``[R, 1]``."""
    rows_at_once = max(_NUMBERS_AT_ONCE // logits.shape[1], 1)
    totals = []
    for start in range(0, len(logits), rows_at_once):
        rows = np.arange(start, min(start + rows_at_once, len(logits)))
        weights = _to_weights(logits[start : start + rows_at_once], settings.select(rows), keeps_logits=True)
        totals.append(_floats(_blocks(weights).sum(dim=-1)).cumsum(axis=1)[:, -1:])
    return np.concatenate(totals)


def _blocks(weights: Tensor) -> Tensor:
    """Split rows ``[R, V]`` into blocks ``[R, B, block]``, padded with zeros."""
    missing = -weights.shape[1] % _SUM_BLOCK
    if missing:
        weights = F.pad(weights, (0, missing))
    return weights.view(len(weights), -1, _SUM_BLOCK)


def _floats(tensor: Tensor) -> Floats:
    return tensor.cpu().numpy().astype(np.float64)
