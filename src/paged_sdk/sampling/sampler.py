"""Samples the next tokens of a batch on the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.errors import PagedError
from paged_sdk.guard import RequestGuard
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.failures import all_banned, not_finite
from paged_sdk.sampling.logprobs import LogprobTable, MakeLogprobTable, make_logprob_tables
from paged_sdk.sampling.processor import Processor
from paged_sdk.sampling.proposals import Proposals
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.text_state import TextState
from paged_sdk.sampling.token_draw import make_token_draw
from paged_sdk.sampling.truncation import draw_greedy, is_greedy

__all__ = ["PreparedRows", "SampledRows", "Sampler", "take_likeliest"]


@frozen(eq=False)
class PreparedRows:
    """Holds rows for which processors have done all work that needs no logits.

    :ivar changes: for each processor, rows and the changes to their logits
    :ivar not_plain: rows for which an argmax of the raw logits is not enough, and rows that have failed
    :ivar failed: rows whose processors raised, and the errors of their requests
    :ivar forced: rows whose constraint allows only one token
    :ivar known_tokens: tokens of the forced rows that need no logits: no other processor applies to them, and they have
        no logprobs
    """

    rows: Sequence[SampleRow]
    changes: Sequence[Sequence[tuple[int, Any]]]
    not_plain: frozenset[int]
    failed: Mapping[int, PagedError] = field(factory=dict)
    forced: Container[int] = field(factory=frozenset)
    known_tokens: Mapping[int, int] = field(factory=dict)

    @property
    def is_plain(self) -> bool:
        """Tell whether an argmax of the raw logits is enough for every row."""
        return not self.not_plain

    @property
    def is_bare(self) -> bool:
        """Tell whether a draw from the raw logits is enough for every row."""
        return not (self.failed or any(self.changes))

    def needing_logits(self) -> PreparedRows:
        """Select the rows that need logits."""
        if not self.known_tokens:
            return self
        return self.part([index for index in range(len(self.rows)) if index not in self.known_tokens])

    def part(self, indices: Sequence[int]) -> PreparedRows:
        """Select some rows.

        :param indices: row indices, ascending
        """
        new = {old: new for new, old in enumerate(indices)}
        return PreparedRows(
            [self.rows[old] for old in indices],
            [[(new[old], change) for old, change in own if old in new] for own in self.changes],
            frozenset(new[old] for old in indices if old in self.not_plain),
            {new[old]: error for old, error in self.failed.items() if old in new},
            frozenset(new[old] for old in indices if old in self.forced),
            {new[old]: token for old, token in self.known_tokens.items() if old in new},
        )


@frozen
class SampledRows:
    """Holds the sampled tokens, row by row.

    :ivar token_ids: ``num_samples`` tokens of each row, or none if the row failed
    :ivar logprobs: an entry for each token, of the raw logits (before bias, penalties, temperature and truncation);
        None for rows without logprobs
    :ivar failed: rows whose requests have to end, and the errors
    """

    token_ids: list[list[int]]
    logprobs: list[list[RawLogprobs] | None]
    failed: dict[int, PagedError] = field(factory=dict)

    def with_known_tokens(self, prepared: PreparedRows) -> SampledRows:
        """Insert the rows whose tokens were known, and which were left out of sampling."""
        rows, known = prepared.rows, prepared.known_tokens
        if not known:
            return self
        sampled = [index for index in range(len(rows)) if index not in known]
        token_ids = [[known[index]] * row.num_samples if index in known else [] for index, row in enumerate(rows)]
        logprobs: list[list[RawLogprobs] | None] = [None] * len(rows)
        for index, own_ids, own_logprobs in zip(sampled, self.token_ids, self.logprobs, strict=True):
            token_ids[index], logprobs[index] = own_ids, own_logprobs
        return SampledRows(token_ids, logprobs, {sampled[index]: error for index, error in self.failed.items()})


class Sampler:
    """Samples tokens: processors change the logits in order, then temperature, top-k, top-p and min-p are applied.

    A token depends on its own row alone: on the logits, the tokens before it, the seed, the choice index and the number
    of output tokens; not on the batch or on earlier calls. The state kept per sequence is only a cache.

    :param vocab_size: columns of the logits
    :param device: the device of the logits
    :param processors: the processors, in the order in which they apply
    :ivar make_logprob_table: computes logprobs of raw logits
    """

    def __init__(self, vocab_size: int, device: torch.device, processors: Sequence[Processor[Any]]) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._processors = processors
        self._states: dict[int, TextState] = {}
        self._token_draw = make_token_draw(device)
        self.make_logprob_table: MakeLogprobTable = make_logprob_tables(device)

    def prepare(self, rows: Sequence[SampleRow]) -> PreparedRows:
        """Do all work that needs no logits, so that it overlaps with a device computing them."""
        changes: list[list[tuple[int, Any]]] = [[] for _ in self._processors]
        failed: dict[int, PagedError] = {}
        not_plain: list[int] = []
        for index, row in enumerate(rows):
            state = self._states.get(row.seq_id)
            if state is not None and row.request is state.request:  # the usual cases, which need no guard
                if row.num_output_tokens >= state.plain_from:
                    continue
                if state.is_bare:
                    not_plain.append(index)
                    continue
            with RequestGuard(row.request.request_id, partial(failed.__setitem__, index)):
                state = self._state(row)
                if _is_plain_at(row, state):
                    continue
                state.move_to(row)
                for processor_index, change in list(state.changes()):  # all or, if one raises, none
                    changes[processor_index].append((index, change))
            not_plain.append(index)
        forced: dict[int, int] = {}
        for own_changes, processor in zip(changes, self._processors, strict=True):
            if own_changes:
                own_changes[:] = _prepared(processor, own_changes, rows, failed)
                for index, change in own_changes:
                    token = processor.only_token(change)
                    if token is not None:
                        forced[index] = token
        known_tokens = forced and _known_tokens(forced, rows, changes, failed)
        return PreparedRows(rows, changes, frozenset(not_plain), failed, forced, known_tokens)

    def sample(self, logits: Tensor, prepared: PreparedRows) -> SampledRows:
        """Sample each row's tokens. A row with NaN or Inf in its logits, or with every token banned, fails alone.

        :param logits: float32 ``[len(prepared.rows), vocab_size]``; overwritten
        """
        rows = prepared.rows
        if not rows:
            return SampledRows([], [])
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows), self._vocab_size)
        assert logits.device.type == self._device.type, (logits.device, self._device)
        with torch.inference_mode():
            if prepared.is_plain:
                return take_likeliest(draw_greedy(logits).tolist(), rows)
            if prepared.is_bare:
                tables = self._logprob_tables(logits, rows, logits_stay=self._token_draw.keeps_logits)
                drawn = self._token_draw.draw(logits, rows, range(len(rows)), {})
                return _take_drawn(drawn, rows, _raw_logprobs(tables, drawn))
            return self._sample_changed(logits, prepared)

    def _sample_changed(self, logits: Tensor, prepared: PreparedRows) -> SampledRows:
        """Sample rows of which processors change some."""
        rows = prepared.rows
        likeliest: dict[int, int] = dict(enumerate(draw_greedy(logits).tolist()))
        failed: dict[int, PagedError] = {**prepared.failed, **_zero_bad_rows(logits, rows, likeliest)}
        tables = self._logprob_tables(logits, rows, logits_stay=False)
        taken: Mapping[int, list[int]] = {}
        proposed: Mapping[int, npt.NDArray[np.int64]] = {}
        for processor, changes in zip(self._processors, prepared.changes, strict=True):
            if not changes:
                continue
            if processor is self._processors[-1] and processor.answers_per_token:
                asked = [each for each in changes if each[0] not in failed and processor.only_token(each[1]) is None]
                proposals = Proposals(logits, rows, processor, asked, self._token_draw, likeliest)
                taken, proposed = proposals.taken, proposals.drawn
                changes = [each for each in changes if each[0] not in taken]
            if changes:
                failed = {**processor.apply(logits, changes), **failed}
            for index, _ in changes:
                likeliest.pop(index, None)  # it may be another one now
        wanted = [index for index in range(len(rows)) if index not in failed and index not in taken]
        tokens = {**taken, **_greedy_rows(likeliest, rows, wanted)}
        wanted = [index for index in wanted if index not in tokens]
        tokens |= zip(wanted, self._token_draw.draw(logits, rows, wanted, proposed), strict=True)
        failed |= {index: all_banned(rows[index].request) for index in wanted if not tokens[index]}
        chosen = [tokens.get(index, []) for index in range(len(rows))]
        return SampledRows(chosen, _raw_logprobs(tables, chosen), failed)

    def sample_alone(self, logits: Tensor, rows: Sequence[SampleRow]) -> SampledRows:
        """Sample rows one by one, after :meth:`sample` has raised for all together. A row that raises again fails.

        :param logits: as for :meth:`sample`
        """
        sampled = SampledRows([[] for _ in rows], [None] * len(rows))
        for index, row in enumerate(rows):
            with RequestGuard(row.request.request_id, partial(sampled.failed.__setitem__, index)):
                self.forget([row.seq_id])
                alone = self.sample(logits[index : index + 1], self.prepare([row]))
                sampled.token_ids[index], sampled.logprobs[index] = alone.token_ids[0], alone.logprobs[0]
                if alone.failed:
                    sampled.failed[index] = alone.failed[0]
        return sampled

    def forget(self, seq_ids: Collection[int]) -> None:
        """Drop the state of sequences that have ended; unknown ids are allowed."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)
        self._token_draw.forget(seq_ids)

    def _logprob_tables(
        self, logits: Tensor, rows: Sequence[SampleRow], *, logits_stay: bool
    ) -> list[tuple[LogprobTable, list[int]]]:
        """Make one table for each ``top_n_logprobs`` among the rows, with its rows."""
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            if row.request.sampling.top_n_logprobs is not None:
                wanted[row.request.sampling.top_n_logprobs].append(index)
        return [
            (self.make_logprob_table(select_rows(logits, indices), top_n, logits_stay=logits_stay), indices)
            for top_n, indices in wanted.items()
        ]

    def _state(self, row: SampleRow) -> TextState:
        """Return the state of a row's sequence, made if it is new."""
        state = self._states.get(row.seq_id)
        if state is None or state.request is not row.request:
            first = self._states.get(row.seq_id - row.choice_index)
            if first is not None and first.request is row.request:
                state = first.fork()
            else:
                state = TextState.begin(row.request, self._processors)
            self._states[row.seq_id] = state
        return state


def _is_plain_at(row: SampleRow, state: TextState) -> bool:
    """Tell whether the state is that of the row's request, and an argmax of the row's raw logits is enough."""
    return row.request is state.request and row.num_output_tokens >= state.plain_from


def _prepared(
    processor: Processor[Any],
    changes: list[tuple[int, Any]],
    rows: Sequence[SampleRow],
    failed: dict[int, PagedError],
) -> list[tuple[int, Any]]:
    """Let a processor prepare the changes of a step together or, if that raises, one at a time.

    :param failed: rows that raise even alone are added to it, with the errors of their requests
    :returns: the changes of the other rows
    """
    try:
        processor.prepare(changes)
    except Exception:
        for index, change in changes:
            with RequestGuard(rows[index].request.request_id, partial(failed.__setitem__, index)):
                processor.prepare([(index, change)])
        return [(index, change) for index, change in changes if index not in failed]
    return changes


def _known_tokens(
    forced: Mapping[int, int],
    rows: Sequence[SampleRow],
    changes: Sequence[Sequence[tuple[int, Any]]],
    failed: Container[int],
) -> dict[int, int]:
    """Return the tokens of the forced rows that need no logits."""
    num_changes = Counter(index for own in changes for index, _ in own)
    return {
        index: token
        for index, token in forced.items()
        if num_changes[index] == 1 and index not in failed and rows[index].request.sampling.top_n_logprobs is None
    }


def _greedy_rows(
    likeliest: Mapping[int, int], rows: Sequence[SampleRow], wanted: Sequence[int]
) -> dict[int, list[int]]:
    """Return the tokens of those wanted rows that are greedy and whose likeliest token is known."""
    return {
        index: [likeliest[index]] * rows[index].num_samples
        for index in wanted
        if index in likeliest and is_greedy(rows[index].request.sampling)
    }


def take_likeliest(likeliest: Sequence[int], rows: Sequence[SampleRow]) -> SampledRows:
    """Take each row's likeliest token.

    :param likeliest: the tokens; a row with :data:`NOT_DRAWN`, whose logits are not finite, fails
    """
    failed: dict[int, PagedError] = {
        index: not_finite(rows[index].request) for index, token in enumerate(likeliest) if token == NOT_DRAWN
    }
    tokens = [[token] * row.num_samples if token >= 0 else [] for token, row in zip(likeliest, rows, strict=True)]
    return SampledRows(tokens, [None] * len(rows), failed)


def _take_drawn(
    drawn: list[list[int]], rows: Sequence[SampleRow], logprobs: list[list[RawLogprobs] | None]
) -> SampledRows:
    """Take what was drawn from raw logits; a row without tokens, whose logits are not finite, fails."""
    failed: dict[int, PagedError] = {
        index: not_finite(row.request) for index, row in enumerate(rows) if not drawn[index]
    }
    return SampledRows(drawn, logprobs, failed)


def _zero_bad_rows(logits: Tensor, rows: Sequence[SampleRow], likeliest: Mapping[int, int]) -> dict[int, PagedError]:
    """Overwrite the logits of rows with NaN or Inf with zeros, so that processors see finite numbers.

    :param likeliest: :data:`NOT_DRAWN` for these rows
    """
    bad = [index for index, token in likeliest.items() if token == NOT_DRAWN]
    for index in bad:
        logits[index] = 0
    return {index: not_finite(rows[index].request) for index in bad}


def _raw_logprobs(
    tables: Sequence[tuple[LogprobTable, list[int]]], chosen: Sequence[list[int]]
) -> list[list[RawLogprobs] | None]:
    """Make an entry per chosen token, for the rows with logprobs."""
    logprobs: list[list[RawLogprobs] | None] = [None] * len(chosen)
    for table, indices in tables:
        pairs = [(position, token) for position, index in enumerate(indices) for token in chosen[index]]
        entries = iter(table.entries([position for position, _ in pairs], [token for _, token in pairs]))
        for index in indices:
            logprobs[index] = [next(entries) for _ in chosen[index]] or None
    return logprobs
