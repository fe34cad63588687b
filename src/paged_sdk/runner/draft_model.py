"""Proposes drafts made by a smaller model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from contextlib import nullcontext
from typing import Final

import torch

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.kernels.step import StepContext
from paged_sdk.kv.manager import KvManager
from paged_sdk.models.causal_model import CausalModel, GreedyModel
from paged_sdk.runner.draft_state import DraftState
from paged_sdk.runner.first_pause import FirstPause
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.runner.live_compilations import LiveCompilations
from paged_sdk.sampling.candidates import argmax, select_rows
from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.speculative.draft_counts import draft_counts
from paged_sdk.types.step import StepRow

__all__ = ["DraftModel"]

PRIOR: Final = 0.7
"""Prior acceptance rate of drafts, for a new pair of models."""
FIRST_CHUNK: Final = 32
"""Size of the first prefill chunk, before any chunk's time has been measured."""
LEAST_CHUNK: Final = 16
"""Minimum size of a prefill chunk: matrix products compute rows in tiles of about this size."""
PREFILL_SHARE: Final = 1.0
"""Time that prefill may add to a step, as a fraction of a step without drafts. The first 8 of 28 layers of
Qwen2.5-Coder-1.5B take 1 s to prefill 1,000 tokens: in one chunk, that delayed all sequences by 40 steps."""


class DraftModel:
    """Drafts with a smaller model that has the same vocabulary (Leviathan et al., "Fast Inference from Transformers via
    Speculative Decoding", 2023).

    The draft model has its own KV memory, of the same kind and for as many tokens as the target's, with a prefix cache.
    It prefills a sequence when drafts are first requested for it, in chunks so that other sequences do not wait long.
    Drafts are the likeliest tokens: since the target draws every token from its own distribution, sampled drafts would
    gain nothing. Drafting stops where the constraint allows no further token.

    The number of drafts depends on the acceptance rate and on the measured step times of both models.

    :param model: the draft model
    :param backend: holds the draft model's KV, under the ids of ``kv``
    :param kv: manages the draft model's KV memory
    :param vocab_size: vocabulary size of the draft model
    :param target_vocab_size: vocabulary size of the target
    :param gamma: maximum number of drafts per sequence and step
    :param max_tokens: the draft model's context length
    :param max_batched_tokens: maximum number of tokens of a prefill chunk
    :param times: step times of the target
    :param balance: time that drafts have gained and lost so far
    :ivar compilations: detects kernels that are compiled during a step; None: nothing is compiled
    """

    def __init__(
        self,
        model: CausalModel,
        backend: AttentionBackend,
        kv: KvManager,
        *,
        vocab_size: int,
        target_vocab_size: int,
        gamma: int,
        max_tokens: int,
        max_batched_tokens: int,
        times: StepTimes,
        balance: DraftBalance,
    ) -> None:
        self.compilations: LiveCompilations | None = None
        self._model = model
        self._greedy = model if isinstance(model, GreedyModel) else None
        self._backend = backend
        self._kv = kv
        self._vocab_size = vocab_size
        self._target_vocab_size = target_vocab_size
        self._gamma = gamma
        self._max_tokens = min(max_tokens, kv.max_sequence_tokens)
        self._max_batched_tokens = max_batched_tokens
        self._times = times
        self._own_times = StepTimes()
        self._seconds_per_token = 0.0  # prefill time per token; 0: not measured
        self._balance = balance
        self._acceptance = Acceptance(priors=(PRIOR,))
        self._first_pause = FirstPause()
        self._states: dict[int, DraftState] = {}

    @property
    def num_followed(self) -> int:
        """Return the number of sequences that have state here, such as KV."""
        return len(self._states)

    def propose(self, sequences: Sequence_[Sequence]) -> list[list[int]]:
        """Propose drafts for each sequence, as many as are expected to pay."""
        states = [self._state_of(sequence) for sequence in sequences]
        if not self._balance.allows:
            return [[] for _ in states]
        chances = [state.chances(self._most_drafts(state)) for state in states]
        counts = draft_counts(
            chances,
            self._times.expected,
            self._balance.left,
            lambda ahead: ahead * self._own_times.expected(len(states)),
        )
        chosen = [
            state
            for state, count, chance in zip(states, counts, chances, strict=True)
            if chance and (state.is_prefilling or state.choose(count)) and self._make_room(state)
        ]
        with torch.inference_mode():
            chosen = self._prefill(chosen, self._times.nearest(len(states)) or 0.0)
            start = time.monotonic()
            self._draft(chosen)
        self._balance.claim((state.sequence.seq_id for state in chosen), time.monotonic() - start)
        return [state.drafts for state in states]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Free the KV of sequences that have ended; it stays in the prefix cache."""
        for seq_id in seq_ids:
            state = self._states.pop(seq_id, None)
            if state is not None:
                state.take_in()
                if state.table.ids:
                    self._kv.free(state.table, state.sequence.token_ids, state.num_computed)

    def reset(self) -> None:
        """Clear the prefix cache."""
        self._kv.reset_prefix_cache()

    def _state_of(self, sequence: Sequence) -> DraftState:
        """Return the state of a sequence, updated with the tokens that it has got since."""
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = DraftState(sequence, Acceptance(self._acceptance), self._first_pause)
            self._states[sequence.seq_id] = state
        state.take_in()
        if state.table.ids:
            self._kv.commit(state.table, sequence.token_ids, state.num_computed)
        return state

    def _most_drafts(self, state: DraftState) -> int:
        """Return the maximum number of drafts for a sequence. The draft model does not compute the last draft, and the
        target adds one token after it.
        """
        sequence = state.sequence
        num_tokens = len(sequence.token_ids)
        if state.largest_token >= self._vocab_size:  # the draft model's vocabulary may be smaller
            return 0
        return min(self._gamma, sequence.max_length - num_tokens - 1, self._max_tokens - num_tokens + 1)

    def _make_room(self, state: DraftState) -> bool:
        """Allocate KV memory for a sequence's drafts, or for fewer drafts; return whether there is room for any."""
        token_ids, table = state.sequence.token_ids, state.table
        state.num_wanted = min(state.num_wanted, self._most_drafts(state))  # the sequence may have grown during prefill
        if not table.ids:
            prefix = self._kv.match(table, token_ids)
            if not self._kv.fits(prefix, len(token_ids) + state.num_wanted, num_growing=len(self._states)):
                return False
            self._kv.attach(table, prefix, token_ids)
            state.num_computed = prefix.num_tokens
        num_tokens = len(token_ids) + state.num_wanted - 1 - state.num_computed
        state.num_wanted -= num_tokens - self._kv.grow(table, state.num_computed, num_tokens)
        return state.num_wanted > 0

    def _prefill(self, states: list[DraftState], step_seconds: float) -> list[DraftState]:
        """Prefill sequences, within the time that a step allows.

        This happens here and not along with the target's prefill, since a sequence may end before it gets drafts.

        :param step_seconds: time of a step without drafts; 0: not known
        :returns: the sequences that are ready for drafting
        """
        ready: list[DraftState] = []
        left = FIRST_CHUNK
        if step_seconds and self._seconds_per_token:
            left = int(PREFILL_SHARE * step_seconds / self._seconds_per_token)
        left = min(max(left, LEAST_CHUNK), self._max_batched_tokens)
        most = max(self._gamma + 1, LEAST_CHUNK)  # this many tokens are computed along with the first draft
        for state in states:
            state.is_prefilling = state.num_uncomputed > most
            if state.is_prefilling and left:
                num_tokens = min(state.num_uncomputed - 1, left)
                start = time.monotonic()
                self._watched_step([state.row(num_tokens, num_logits=0)])
                self._seconds_per_token = (time.monotonic() - start) / num_tokens
                left -= num_tokens
                state.num_computed += num_tokens
                state.is_prefilling = state.num_uncomputed > most
            if not state.is_prefilling:
                ready.append(state)
        return ready

    def _draft(self, states: list[DraftState]) -> None:
        """Draft tokens, one per sequence and draft model step."""
        for state in states:
            state.follow_grammar()
        while states:
            start = time.monotonic()
            tokens = self._watched_step([state.row(state.num_uncomputed, num_logits=1) for state in states])
            self._own_times.note(len(states), time.monotonic() - start)
            for state, token in zip(states, tokens, strict=True):
                state.num_computed += state.num_uncomputed
                state.add(token, self._target_vocab_size)
            states = [state for state in states if len(state.drafts) < state.num_wanted]

    def _watched_step(self, rows: list[StepRow]) -> list[int]:
        with nullcontext() if self.compilations is None else self.compilations.watching():
            return self._step(rows)

    def _step(self, rows: list[StepRow]) -> list[int]:
        """Compute rows, wait for the device, and return the likeliest next token of each; nothing if the rows ask for
        no logits.
        """
        if copies := self._kv.take_copies():
            self._backend.copy([(copy.src, copy.dst, copy.num_tokens) for copy in copies])
        self._backend.release(self._kv.take_released())
        batch = make_input_batch(rows, self._model.device)
        context = StepContext(attention=self._backend.prepare(rows))
        hidden = self._model.forward(batch.token_ids, batch.positions, context)
        if not rows[0].num_logits:
            hidden[-1, 0].item()  # waits, so that the time of a prefill chunk is not that of its launch alone
            return []
        last = [first + row.num_new_tokens - 1 for first, row in zip(batch.first_tokens, rows, strict=True)]
        chosen = select_rows(hidden, last)
        found = argmax(self._model.logits(chosen)) if self._greedy is None else self._greedy.likeliest(chosen)
        tokens: list[int] = found.tolist()
        return tokens
