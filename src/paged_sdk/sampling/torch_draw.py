"""Draws the tokens of a step by torch and numpy, from logits on any device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.truncation import (
    Settings,
    draw_from_all,
    draw_from_likeliest,
    draw_greedy,
    is_greedy,
    num_candidates,
)
from paged_sdk.sampling.uniform import more_uniforms

__all__ = ["TorchTokenDraw"]

Ids: TypeAlias = npt.NDArray[np.int64]

_NUMBERS_AT_ONCE: Final = 1 << 19
"""Bounds copies of logits to 2 MB, which stay in the cache between the operations that turn them into weights."""


class TorchTokenDraw:
    """Implements :class:`~paged_sdk.sampling.token_draw.TokenDraw` where the native kernels cannot."""

    keeps_logits: Final = False

    def draw(
        self, logits: Tensor, rows: Sequence[SampleRow], wanted: Sequence[int], proposed: Mapping[int, Ids]
    ) -> list[list[int]]:
        """Implement :meth:`~paged_sdk.sampling.token_draw.TokenDraw.draw`."""
        tokens: dict[int, list[int]] = {index: [] for index in wanted}
        # Rows are grouped by how they are drawn, which depends on a row's own settings alone.
        ways: defaultdict[int | None, list[int]] = defaultdict(list)
        for index in wanted:
            params = rows[index].request.sampling
            ways[None if is_greedy(params) else num_candidates(params, logits.shape[1])].append(index)
        for width, indices in ways.items():
            part = select_rows(logits, indices)
            owners = np.repeat(np.arange(len(indices)), [rows[index].num_samples for index in indices])
            if width is None:
                drawn = draw_greedy(part)[owners]
            else:
                drawn = _draw(part, [rows[index] for index in indices], owners, width, _asked(proposed, rows, indices))
            for owner, token in zip(owners.tolist(), drawn.tolist(), strict=True):
                if token != NOT_DRAWN:
                    tokens[indices[owner]].append(token)
        return list(tokens.values())

    def propose(self, logits: Tensor, rows: Sequence[SampleRow], wanted: Sequence[int], num: int) -> list[Ids]:
        """Implement :meth:`~paged_sdk.sampling.token_draw.TokenDraw.propose`."""
        proposed: list[Ids] = []
        at_once = max(_NUMBERS_AT_ONCE // logits.shape[1], 1)
        for start in range(0, len(wanted), at_once):
            some = wanted[start : start + at_once]
            own = [rows[index] for index in some]
            owners = np.repeat(np.arange(len(own)), [row.num_samples * num for row in own])
            settings = Settings.of([row.request.sampling for row in own], logits.shape[1]).only_temperature()
            numbers = _numbers_of(own, num).ravel()
            drawn = draw_from_all(select_rows(logits, some), settings, owners, numbers, keeps_logits=True)
            proposed += np.split(drawn.reshape(-1, num), np.cumsum([row.num_samples for row in own])[:-1])
        return proposed

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Implement :meth:`~paged_sdk.sampling.token_draw.TokenDraw.forget`: nothing is kept."""


def _asked(proposed: Mapping[int, Ids], rows: Sequence[SampleRow], indices: Sequence[int]) -> Ids | None:
    """Return the proposals for each sample of some rows, with :data:`NOT_DRAWN` for rows without proposals."""
    if proposed.keys().isdisjoint(indices):
        return None
    none = np.full((1, next(iter(proposed.values())).shape[1]), NOT_DRAWN, np.int64)
    return np.concatenate([proposed.get(index, none.repeat(rows[index].num_samples, 0)) for index in indices])


def _draw(logits: Tensor, rows: Sequence[SampleRow], owners: Ids, width: int, proposed: Ids | None) -> Ids:
    """Draw a token for each sample.

    :param owners: the index in ``rows`` of each sample
    :param proposed: proposals for each sample, ``[len(owners), N]``; the first that truncation keeps is taken
    """
    settings = Settings.of([row.request.sampling for row in rows], logits.shape[1])
    if proposed is None:
        numbers = _numbers_of(rows, 1)[:, 0]
    else:  # the first numbers of samples with proposals were used to draw these
        num = proposed.shape[1]
        all_numbers = _numbers_of(rows, num + 1)
        numbers = np.where(proposed[:, 0] == NOT_DRAWN, all_numbers[:, 0], all_numbers[:, num])
    if width:
        return draw_from_likeliest(logits, settings, width, owners, numbers, proposed)
    return draw_from_all(logits, settings, owners, numbers, proposed)


def _numbers_of(rows: Sequence[SampleRow], num: int) -> npt.NDArray[np.float64]:
    """Return ``num`` random numbers in [0, 1) for each sample of each row.

    :returns: ``[number of samples of all rows, num]``
    """
    streams = [(row, row.choice_index + sample) for row in rows for sample in range(row.num_samples)]
    return more_uniforms(
        [_seed_of(row.request.sampling) for row, _ in streams],
        [choice for _, choice in streams],
        [row.num_output_tokens for row, _ in streams],
        num,
    )


def _seed_of(params: SamplingParams) -> int:
    """Return the seed, which every request in the scheduler has."""
    assert params.seed is not None, "the scheduler's sequences have a seed"
    return params.seed
