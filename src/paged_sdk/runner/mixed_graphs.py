"""Records steps with prompt chunks, by number of tokens: the rows may have any lengths, with or without decodes.

Layers are recorded with their attention, whose kernels read each row's length on the device, and all rows go through
them together, as in launched steps. So a step reads the weights once, and rows that share a prefix see each other's KV
as in launched steps. Two alternatives were rejected: a recorded decode step with the chunks launched beside it reads
the weights twice (16 GB for 8 billion in bfloat16, 4.8 ms at 3.35 TB/s) and launches as much as before; recording only
the parts between attention leaves about four launches per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import Recorded
from paged_sdk.runner.step_table import Record, StepTable
from paged_sdk.types.step import StepRow

__all__ = ["LONGEST_CHUNK_CONTEXT", "MixedGraphs", "token_counts"]

# Beyond 512 tokens, computing takes longer than launching: 512 tokens through 8 billion weights are 8.2 TFLOP, 14 ms at
# 600 TFLOP/s, while 320 launches of 12 us are 4 ms.
_COUNTS: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)

LONGEST_CHUNK_CONTEXT: Final = 16_384
"""Longest context of a recorded row with several tokens. Steps with longer ones are launched, since splitting the keys
among more programs may then gain more than the launches cost.

With 16 tokens after 8,192 on an H200, the 32 layers of Llama-3.1-8B took 26 ms launched and 9.5 ms recorded. Longer
contexts and more tokens were not compared.
"""


def token_counts(max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens to record steps for, ascending: a step is padded to the next."""
    largest = min(max_num_tokens, _COUNTS[-1])
    return [*(count for count in _COUNTS if count < largest), largest]


class MixedGraphs:
    """Runs recorded steps with rows of any lengths, up to the largest number of tokens recorded.

    One copy sends a step's input to the device. Padding tokens belong to an extra row without keys.

    :param counts: numbers of tokens to record steps for
    :param bounds: context lengths to record each number for
    :param record: records a step; may call the step's function any number of times
    :ivar errors: errors of failed recordings; the next larger step or context bound is used in place of each
    :ivar largest: number of tokens of the largest step
    :raises Exception: the first of these errors, if no step for the longest context could be recorded
    """

    def __init__(
        self,
        layers: RecordableLayers,
        *,
        counts: Iterable[int],
        bounds: Iterable[int],
        record: Record,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._layers = layers
        most_rows = len(layers.results.overlap)

        def make(size: int, bound: int) -> _MixedStep:
            step = _MixedStep(layers, size, min(most_rows, size), bound)
            step.input.copy_(self._input(step, [], [], [], []))
            return step

        self._table = StepTable(counts, bounds, make, record, on_progress)
        self.errors: list[Exception] = self._table.errors
        self.largest: int = self._table.largest

    def check(self) -> None:
        """Replay every recorded step once on padding only.

        :raises RuntimeError: the device refuses a replay
        """
        self._table.replay_all()

    def forward(
        self, rows: Sequence[StepRow], sources: Sequence[int], places: Sequence[int]
    ) -> tuple[Recorded, list[int]]:
        """Run a step. It computes the logits of the last token of each row with ``num_logits == 1``.

        :param rows: rows of at most :attr:`largest` tokens in total
        :param sources: per row: the index of its last token among the tokens that the previous step sampled; -1: the
            host knows the token
        :param places: per row: its adapter slot; -1: none
        :returns: the results, and the index of each row's first token
        """
        ends = np.cumsum([row.num_new_tokens for row in rows])
        recorded = self._table.find(int(ends[-1]), max(row.end for row in rows))
        wanted = [int(end) - 1 for row, end in zip(rows, ends, strict=True) if row.num_logits == 1]
        recorded.step.input.copy_(self._input(recorded.step, rows, sources, places, wanted), non_blocking=True)
        recorded.replay()
        return self._layers.results.of(int(ends[-1]), wanted), [0, *ends[:-1].tolist()]

    def _input(
        self,
        step: _MixedStep,
        rows: Sequence[StepRow],
        sources: Sequence[int],
        places: Sequence[int],
        wanted: Sequence[int],
    ) -> Tensor:
        """Make a step's input on the host; the rest of the step is padding."""
        backend, host = self._layers.backend, self._layers.host_input(*step.input.shape)
        part = _Columns(host.numpy(), step.num_tokens, step.num_rows)
        part.row_of_token.fill(step.num_rows)
        part.positions.fill(-1)
        part.tokens.fill(0)
        part.sources.fill(-1)
        part.places.fill(-1)
        part.seats.fill(backend.empty_seat)
        part.lengths.fill(0)
        part.wanted.fill(0)
        part.ends.fill(0)
        part.ends[-1] = step.num_tokens
        if not rows:
            return host
        counts = np.array([row.num_new_tokens for row in rows])
        starts, ends = np.array([row.start for row in rows]), counts.cumsum()
        used = slice(int(ends[-1]))
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        part.row_of_token[used] = row_of_token
        part.positions[used] = np.arange(used.stop) + (starts + counts - ends)[row_of_token]
        part.tokens[used] = np.maximum([token for row in rows for token in row.token_ids], 0)  # AWAITED is < 0
        part.sources[ends - 1] = sources
        adapted = part.positions[used] >= np.array([row.adapter_start for row in rows])[row_of_token]
        part.places[used] = np.where(adapted, np.array(places)[row_of_token], -1)
        part.seats[: len(rows)] = backend.seats(
            [row.seq_id for row in rows], [row.kv_version for row in rows], [row.kv_ids for row in rows]
        )
        part.lengths[: len(rows)] = starts + counts
        part.ends[1:-1] = used.stop
        part.ends[1 : len(rows) + 1] = ends
        part.wanted[: len(wanted)] = wanted
        return host


class _Columns:
    """Names the parts of a step's input.

    :ivar row_of_token: per token: its row; ``positions``, ``tokens``, ``sources`` and ``places`` (adapter slots) are
        also per token
    :ivar seats: per row, and last for the padding's row; so are ``lengths``, the context lengths
    :ivar ends: index of the first token of each row and of the padding's row, then the number of all tokens
    :ivar wanted: indices of the tokens whose logits are computed
    """

    def __init__(self, whole: npt.NDArray[np.int64], num_tokens: int, num_rows: int) -> None:
        sizes = _sizes(num_tokens, num_rows)
        parts = [whole[first:end] for first, end in pairwise(np.cumsum([0, *sizes]).tolist())]
        self.row_of_token, self.positions, self.tokens, self.sources, self.places = parts[:5]
        self.seats, self.lengths, self.ends, self.wanted = parts[5:]


def _sizes(num_tokens: int, num_rows: int) -> list[int]:
    """Return the lengths of the parts of a step's input, in order."""
    return [*[num_tokens] * 5, num_rows + 1, num_rows + 1, num_rows + 2, num_rows]


class _MixedStep:
    """Runs a step of a fixed number of tokens, with a maximum number of rows and contexts up to a bound, so that it can
    be recorded.

    :ivar input: int64; see :class:`_Columns`
    """

    def __init__(self, layers: RecordableLayers, num_tokens: int, num_rows: int, bound: int) -> None:
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        self.input: Tensor = layers.results.overlap.new_empty(sum(_sizes(num_tokens, num_rows)))
        self._bound = bound
        self._layers = layers

    def run(self) -> None:
        """Run the step with device operations only, whose shapes do not depend on values of the input."""
        parts = torch.split(self.input, _sizes(self.num_tokens, self.num_rows))
        row_of_token, positions, token_ids, sources, places, seats, lengths, ends, wanted = parts
        layers = self._layers
        attention = layers.backend.mixed(
            seats, lengths.int(), ends.int(), row_of_token, positions, max_context_len=self._bound
        )
        hidden = layers.forward(token_ids, positions, sources, places, attention)
        layers.results.keep(hidden, layers.model.logits(hidden.index_select(0, wanted)))
