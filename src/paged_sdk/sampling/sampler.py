"""Choosing the next tokens of a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.sampling import DryParams, SamplingParams
from paged_sdk.sampling.candidates import argmax, select_rows
from paged_sdk.sampling.dry import breaker_tokens, dry_penalties
from paged_sdk.sampling.history import TokenHistory
from paged_sdk.sampling.logprobs import LogprobTable
from paged_sdk.sampling.penalties import add_sparse, apply_penalties
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.truncation import (
    NOT_DRAWN,
    Settings,
    draw_from_all,
    draw_from_likeliest,
    draw_greedy,
    num_candidates,
)
from paged_sdk.sampling.uniform import uniforms

__all__ = [
    "SampleRow",
    "Sampled",
    "Sampler",
    "has_penalties",
    "is_greedy",
    "takes_penalized_logits",
]

SparseChange: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Distinct token ids of a row, and what to add to the logit of each."""


@frozen
class SampleRow:
    """What to sample from one row of logits.

    :ivar params: resolved: a seed, unless greedy
    :ivar token_ids: prompt and output
    :ivar num_prompt_tokens: how many of them are the prompt
    :ivar choice_index: of the first sample; sample j belongs to choice ``choice_index + j``
    :ivar num_samples: tokens to choose, each as if it were alone
    :ivar stop_token_ids: what ``min_tokens`` bans
    """

    seq_id: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    choice_index: int
    num_samples: int
    stop_token_ids: frozenset[int]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@frozen
class Sampled:
    """A chosen token.

    :ivar logprobs: if asked for: of the raw logits, before bias, penalties, temperature and truncation
    """

    token_id: int
    logprobs: RawLogprobs | None


class Sampler:
    """Chooses tokens, in the order logits bias, min_tokens, repetition, frequency and presence penalties, DRY,
    temperature, top-k, top-p, min-p.

    A token depends on its own row alone: on its logits, its history and, through the seed, on its choice and the
    number of output tokens; not on the batch and not on earlier calls. The state kept per sequence only saves
    counting its tokens again.

    :param vocab_size: columns of the logits
    :param device: of the logits
    :param encode: text to token ids without special tokens, for DRY's sequence breakers
    """

    def __init__(self, vocab_size: int, device: torch.device, encode: Callable[[str], list[int]]) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._encode = encode
        self._states: dict[int, _SequenceState] = {}

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[list[Sampled]]:
        """Choose each row's tokens.

        :param logits: float32 ``[len(rows), vocab_size]``; contents are lost
        :returns: ``num_samples`` tokens per row, or none for a row where nothing can be chosen: every logit is -inf
            (bans included), or one is NaN or +inf. If all rows are greedy and ask for nothing else, the logits are
            only compared, and the caller has to check that they are finite
        """
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows), self._vocab_size)
        assert logits.device.type == self._device.type, (logits.device, self._device)
        with torch.inference_mode():
            if all(_is_plain(row) for row in rows):
                tokens = argmax(logits).tolist() if rows else []
                return [[Sampled(token, None)] * row.num_samples for token, row in zip(tokens, rows, strict=True)]
            tables = _logprob_tables(logits, rows)
            self._process(logits, rows)
            chosen = _choose(logits, rows)
            logprobs = _raw_logprobs(tables, chosen)
        return [
            [
                Sampled(token, entry)
                for token, entry in zip(tokens, logprobs.get(index, [None] * len(tokens)), strict=True)
            ]
            for index, tokens in enumerate(chosen)
        ]

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], top_n: int) -> list[RawLogprobs]:
        """The logprobs of given tokens.

        :param logits: float32 ``[N, vocab_size]``; not changed
        :param targets: the token that follows, for each row
        :param top_n: how many of the likeliest tokens to list
        """
        with torch.inference_mode():
            return LogprobTable(logits, top_n).entries(range(len(targets)), targets)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is kept of sequences that have ended; unknown ones are fine."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def _process(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        """Everything before temperature, in place."""
        states = {index: self._state(row) for index, row in enumerate(rows) if _has_processors(row.params)}
        add_sparse(logits, [(index, *state.bias) for index, state in states.items() if state.params.logits_bias])
        banned = [index for index, row in enumerate(rows) if _bans_stop(row.params, row.num_output_tokens)]
        add_sparse(logits, [(index, *self._stop_ban(rows[index])) for index in banned])
        penalized = [(index, state) for index, state in states.items() if has_penalties(state.params)]
        apply_penalties(logits, [(index, state.params, state.history) for index, state in penalized])
        add_sparse(logits, [(index, *state.dry()) for index, state in states.items() if _has_dry(state.params)])

    def _state(self, row: SampleRow) -> _SequenceState:
        state = self._states.get(row.seq_id)
        if state is None or state.params is not row.params:
            state = self._states[row.seq_id] = _SequenceState(row, self._vocab_size, self._encode)
        state.catch_up(row)
        return state

    def _stop_ban(self, row: SampleRow) -> SparseChange:
        tokens = [token for token in row.stop_token_ids if token < self._vocab_size]
        return np.array(tokens, np.int64), np.full(len(tokens), -np.inf, np.float32)


class _SequenceState:
    """What the processors of one sequence keep between steps."""

    def __init__(self, row: SampleRow, vocab_size: int, encode: Callable[[str], list[int]]) -> None:
        self.params = row.params
        self.history = TokenHistory(row.token_ids, row.num_prompt_tokens)
        # A token beyond the logits can never be chosen: there is nothing to bias.
        bias = {token: value for token, value in (row.params.logits_bias or {}).items() if token < vocab_size}
        self.bias: SparseChange = np.array(list(bias), np.int64), _as_float32(list(bias.values()))
        self._dry_params = row.params.dry_params or DryParams()
        self._breakers = breaker_tokens(self._dry_params.sequence_breakers, encode) if _has_dry(row.params) else ()

    def catch_up(self, row: SampleRow) -> None:
        if not self.history.catch_up(row.token_ids, row.num_prompt_tokens):
            self.history = TokenHistory(row.token_ids, row.num_prompt_tokens)

    def dry(self) -> SparseChange:
        tokens, amounts = dry_penalties(self.history.tokens, self._dry_params, self._breakers)
        return tokens, -amounts


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token's earlier occurrences cost it something."""
    return params.repetition_penalty not in (None, 1.0) or params.frequency_penalty != 0 or params.presence_penalty != 0


def _has_dry(params: SamplingParams) -> bool:
    return params.dry_params is not None and params.dry_params.multiplier > 0


def _has_processors(params: SamplingParams) -> bool:
    return bool(params.logits_bias) or has_penalties(params) or _has_dry(params)


def _bans_stop(params: SamplingParams, num_output_tokens: int) -> bool:
    return num_output_tokens < params.min_tokens


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token is taken."""
    return params.is_greedy or params.top_k == 1


def takes_penalized_logits(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether nothing but penalties changes the logits that a token is chosen by.

    :param num_output_tokens: before it
    """
    return not (params.logits_bias or _has_dry(params) or _bans_stop(params, num_output_tokens))


def _is_plain(row: SampleRow) -> bool:
    """Whether the row's token is its largest logit's and nothing else is asked for."""
    params = row.params
    asks_for_more = has_penalties(params) or params.top_n_logprobs is not None
    return is_greedy(params) and not asks_for_more and takes_penalized_logits(params, row.num_output_tokens)


def _as_float32(values: Sequence[float]) -> npt.NDArray[np.float32]:
    """Finite values stay finite; -inf stays a ban."""
    exact = np.array(values, np.float64)
    return np.where(np.isneginf(exact), exact, exact.clip(-1e38, 1e38)).astype(np.float32)


def _choose(logits: Tensor, rows: Sequence[SampleRow]) -> list[list[int]]:
    """The tokens of each row, from processed logits; none where nothing can be chosen."""
    tokens: list[list[int]] = [[] for _ in rows]
    # Rows go together by what is done to them; each row's way depends on its own settings alone.
    ways: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        ways[None if is_greedy(row.params) else num_candidates(row.params, logits.shape[1])].append(index)
    for width, indices in ways.items():
        part = select_rows(logits, indices)
        owners = np.repeat(np.arange(len(indices)), [rows[index].num_samples for index in indices])
        if width is None:
            drawn = draw_greedy(part)[owners]
        else:
            drawn = _draw(part, [rows[index] for index in indices], owners, width)
        for owner, token in zip(owners.tolist(), drawn.tolist(), strict=True):
            if token != NOT_DRAWN:
                tokens[indices[owner]].append(token)
    return tokens


def _draw(
    logits: Tensor, rows: Sequence[SampleRow], owners: npt.NDArray[np.int64], width: int
) -> npt.NDArray[np.int64]:
    """A token for each of ``owners``, which are indices of ``rows`` and repeat for rows with several samples."""
    settings = Settings.of([row.params for row in rows], logits.shape[1])
    streams = [(row, row.choice_index + sample) for row in rows for sample in range(row.num_samples)]
    numbers = uniforms(
        [_seed(row.params) for row, _ in streams],
        [choice for _, choice in streams],
        [row.num_output_tokens for row, _ in streams],
    )
    if width:
        return draw_from_likeliest(logits, settings, width, owners, numbers)
    return draw_from_all(logits, settings, owners, numbers)


def _seed(params: SamplingParams) -> int:
    assert params.seed is not None, "the scheduler's sequences have a seed"
    return params.seed


def _logprob_tables(logits: Tensor, rows: Sequence[SampleRow]) -> list[tuple[LogprobTable, list[int]]]:
    """Tables for the rows that ask for logprobs, by how many, with the rows of each."""
    wanted: defaultdict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.params.top_n_logprobs is not None:
            wanted[row.params.top_n_logprobs].append(index)
    return [(LogprobTable(select_rows(logits, indices), top_n), indices) for top_n, indices in wanted.items()]


def _raw_logprobs(
    tables: Sequence[tuple[LogprobTable, list[int]]], chosen: Sequence[list[int]]
) -> dict[int, list[RawLogprobs]]:
    """For the rows that ask for them, an entry per chosen token."""
    logprobs: dict[int, list[RawLogprobs]] = {}
    for table, indices in tables:
        pairs = [(position, token) for position, index in enumerate(indices) for token in chosen[index]]
        entries = iter(table.entries([position for position, _ in pairs], [token for _, token in pairs]))
        logprobs.update({index: [next(entries) for _ in chosen[index]] for index in indices})
    return logprobs
