"""Draws the tokens of a step on the CPU in one native call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paged_sdk.kernels.native.draw import NativeDraw
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.structures_sampling import DRAW_SETTINGS
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sequence_settings import SequenceSettings
from paged_sdk.sampling.uniform import stream_starts, streams_of_others

__all__ = ["NativeTokenDraw"]

Ids: TypeAlias = npt.NDArray[np.int64]


class NativeTokenDraw:
    """Implements :class:`~paged_sdk.sampling.token_draw.TokenDraw` for logits on the CPU.

    :param library: the loaded library
    """

    keeps_logits: Final = True

    def __init__(self, library: NativeLibrary) -> None:
        self._draw = NativeDraw(library)
        self._settings: dict[int, SequenceSettings] = {}

    def draw(
        self, logits: Tensor, rows: Sequence[SampleRow], wanted: Sequence[int], proposed: Mapping[int, Ids]
    ) -> list[list[int]]:
        """Implement :meth:`~paged_sdk.sampling.token_draw.TokenDraw.draw`."""
        if not wanted:
            return []
        if not proposed and len(wanted) == len(rows) and all(row.num_samples == 1 for row in rows):
            drawn = self._draw.one_each(logits, self._records(rows), [row.num_output_tokens for row in rows])
            return [[] if token == NOT_DRAWN else [token] for token in drawn]
        settings = np.frombuffer(self._records(rows), DRAW_SETTINGS)
        num_draws = _num_draws(rows, wanted)
        streams, positions = self._places(rows, settings, wanted)
        asked = None
        if proposed:
            asked, streams, positions = _after_proposals(rows, wanted, proposed, streams, positions)
        tokens = self._draw(logits, settings, num_draws, streams, positions, asked).tolist()
        ends = accumulate(rows[index].num_samples for index in wanted)
        return [
            [] if tokens[end - 1] == NOT_DRAWN else tokens[end - rows[index].num_samples : end]
            for index, end in zip(wanted, ends, strict=True)
        ]

    def propose(self, logits: Tensor, rows: Sequence[SampleRow], wanted: Sequence[int], num: int) -> list[Ids]:
        """Implement :meth:`~paged_sdk.sampling.token_draw.TokenDraw.propose`."""
        settings = np.frombuffer(self._records(rows), DRAW_SETTINGS).copy()
        streams, positions = self._places(rows, settings, wanted)
        settings["top_k"], settings["top_p"], settings["min_p"] = logits.shape[1], 1, 0
        others = streams_of_others(streams, positions)[:, None].repeat(num - 1, axis=1)
        streams = np.concatenate([streams[:, None], others], axis=1)
        positions = np.concatenate([positions[:, None], np.broadcast_to(np.arange(num - 1), others.shape)], axis=1)
        num_draws = _num_draws(rows, wanted)
        tokens = self._draw(logits, settings, num_draws * num, streams.ravel(), positions.ravel())
        return np.split(tokens.reshape(-1, num), num_draws[wanted].cumsum()[:-1])

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Implement :meth:`~paged_sdk.sampling.token_draw.TokenDraw.forget`."""
        for seq_id in seq_ids:
            self._settings.pop(seq_id, None)

    def _records(self, rows: Sequence[SampleRow]) -> bytes:
        return b"".join([self._settings_of(row).record for row in rows])

    def _settings_of(self, row: SampleRow) -> SequenceSettings:
        found = self._settings.get(row.seq_id)
        if found is None or found.params is not row.request.sampling or found.choice_index != row.choice_index:
            found = self._settings[row.seq_id] = SequenceSettings(row.request.sampling, row.choice_index)
        return found

    def _places(
        self, rows: Sequence[SampleRow], settings: npt.NDArray[np.void], wanted: Sequence[int]
    ) -> tuple[Ids, Ids]:
        """Return the stream of each sample of some rows, and the place of its first random number in it."""
        streams = settings["stream"][wanted]
        positions = np.array([rows[index].num_output_tokens for index in wanted], np.int64)
        if all(rows[index].num_samples == 1 for index in wanted):
            return streams, positions
        parts = [_streams(rows[index], streams[place : place + 1]) for place, index in enumerate(wanted)]
        return np.concatenate(parts), positions.repeat([len(part) for part in parts])


def _num_draws(rows: Sequence[SampleRow], wanted: Sequence[int]) -> Ids:
    """Return the number of samples of each row that is wanted, and 0 for the others."""
    num_draws = np.zeros(len(rows), np.int64)
    num_draws[wanted] = [rows[index].num_samples for index in wanted]
    return num_draws


def _streams(row: SampleRow, first: Ids) -> Ids:
    """Return the streams of a row's samples.

    :param first: the stream of the first, ``[1]``
    """
    seed, num = row.request.sampling.seed, row.num_samples
    if num == 1 or seed is None:  # a greedy row, which needs no random numbers
        return first.repeat(num)
    return stream_starts([seed] * num, range(row.choice_index, row.choice_index + num)).view(np.int64)


def _after_proposals(
    rows: Sequence[SampleRow], wanted: Sequence[int], proposed: Mapping[int, Ids], streams: Ids, positions: Ids
) -> tuple[Ids, Ids, Ids]:
    """Return the proposals for each sample, NOT_DRAWN where it has none, and the places of the random numbers after
    those that the proposals were drawn with.
    """
    num = next(iter(proposed.values())).shape[1]
    none = np.full((1, num), NOT_DRAWN, np.int64)
    asked = np.concatenate([proposed.get(index, none.repeat(rows[index].num_samples, 0)) for index in wanted])
    has_any = asked[:, 0] != NOT_DRAWN
    others = streams_of_others(streams, positions)
    return asked, np.where(has_any, others, streams), np.where(has_any, num - 1, positions)
