"""Computes prompt logprobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paged_sdk.kernels.transfer import HostCopies, to_device
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.step_states import StepStates
from paged_sdk.sampling.device_logprobs import LogprobRows
from paged_sdk.sampling.failures import not_finite
from paged_sdk.sampling.logprobs import MakeLogprobTable
from paged_sdk.sampling.raw_logprobs import RawLogprobs

__all__ = ["LOGITS_TILE", "add_prompt_logprobs"]

LOGITS_TILE: Final = 64
"""Number of prompt tokens whose logits are computed at a time: 150,000 float32 logits take 0.6 MB per token."""


def add_prompt_logprobs(late: LateResults, states: StepStates, make_table: MakeLogprobTable) -> None:
    """Compute the requested logprobs of prompt tokens, each from the logits of the token before it. A row whose logits
    are not finite fails alone.

    :param late: receives them as ``prompt_logprobs``
    :param make_table: computes those that are waited for
    """
    for index, row in enumerate(late.scheduled):
        sequence, top_n = row.sequence, row.sequence.request.sampling.prompt_logprobs
        last = min(row.start + row.num_new_tokens, sequence.num_prompt_tokens - 1)
        if top_n is None or last <= row.start:
            continue
        token_ids, first = sequence.token_ids[row.start + 1 : last + 1], states.first_tokens[index]

        def logits(tile: range, first: int = first) -> Tensor:
            return states.logits(range(first + tile.start, first + tile.stop))

        with late.guard(index):
            if late.waits:
                late.output.prompt_logprobs[index] = _look_up(late, index, logits, token_ids, top_n, make_table)
            else:
                late.add(index, _launch(late, index, logits, token_ids, top_n))


def _look_up(
    late: LateResults,
    index: int,
    logits: Callable[[range], Tensor],
    token_ids: Sequence[int],
    top_n: int,
    make_table: MakeLogprobTable,
) -> list[RawLogprobs]:
    """Compute the logprobs of one row's tokens, and wait for them.

    :param logits: computes the logits that predict a tile of the tokens, float32 ``[len(tile), vocab_size]``
    :raises NumericalError: logits are not finite
    """
    entries: list[RawLogprobs] = []
    for tile in _tiles(len(token_ids)):
        of_tile = logits(tile)
        if not of_tile.amax(-1).isfinite().all():  # the maximum is NaN or Inf if any value is
            raise not_finite(late.scheduled[index].sequence.request)
        table = make_table(of_tile, top_n, logits_stay=True)
        entries += table.entries(range(len(tile)), token_ids[tile.start : tile.stop])
    return entries


def _launch(
    late: LateResults, index: int, logits: Callable[[range], Tensor], token_ids: Sequence[int], top_n: int
) -> Callable[[], None]:
    """Launch the computation of one row's logprobs on the device, and their copy to the host.

    :param logits: as for :func:`_look_up`
    :returns: a function that waits for the copy and stores the logprobs in the results
    """
    rows = LogprobRows(range(len(token_ids)), [top_n] * len(token_ids))
    tiles = [_launch_tile(logits(tile), token_ids[tile.start : tile.stop], top_n) for tile in _tiles(len(token_ids))]
    copies = HostCopies(*map(torch.cat, zip(*tiles, strict=True)))

    def take_in() -> None:
        are_finite, chosen, values, likeliest = copies.wait()
        if not are_finite.all():
            raise not_finite(late.scheduled[index].sequence.request)
        late.output.prompt_logprobs[index] = rows.entries(token_ids, (chosen, values, likeliest))

    return take_in


def _launch_tile(logits: Tensor, token_ids: Sequence[int], top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the computation of some tokens' logprobs. No tensor of the logits' size outlives the call.

    :param logits: float32 ``[N, vocab_size]``
    :param token_ids: ``[N]``
    :returns: whether each row of logits is finite, bool ``[N]``, then the results of :meth:`LogprobRows.look_up`
    """
    (wanted,) = to_device(logits.device, np.array(token_ids, np.int64))
    rows = LogprobRows(range(len(token_ids)), [top_n] * len(token_ids))
    return logits.amax(-1).isfinite(), *rows.look_up(rows.all_logprobs(logits), wanted)


def _tiles(count: int) -> list[range]:
    return [range(start, min(start + LOGITS_TILE, count)) for start in range(0, count, LOGITS_TILE)]
