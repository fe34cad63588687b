"""Proposes drafts made by a model's own layer for multi-token prediction."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.kernels.step import InsertedRows, StepContext
from paged_sdk.runner.first_pause import FirstPause
from paged_sdk.runner.input_batch import InputBatch, make_input_batch
from paged_sdk.runner.mtp_layer import MOST_DRAFTS, MtpLayer, ScratchBlocks
from paged_sdk.runner.mtp_state import MtpState
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.speculative.draft_counts import draft_counts
from paged_sdk.types.step import StepRow

__all__ = ["MtpDrafts"]

PRIORS: Final = (0.85, 0.75, 0.65, 0.55)
"""Prior acceptance rates of the first draft, of the second if the first is right, and so on: less than a user of vLLM
saw of Qwen3.6-27B (0.92, 0.91, 0.77, 0.83), since small models are right less often."""
MOST_KEPT: Final = 32
"""Tokens after which hidden states wait no longer for the layer, unless they fill a block sooner: as many as a tile of
a matrix product has rows."""


class MtpDrafts:
    """Drafts with a model's own layer for multi-token prediction.

    The layer attends over keys and values of its own, in blocks with the ids of the model's, so that they are shared,
    copied and freed with them. Those of a token depend on the token after it. So of prompts, the layer computes all but
    the last token in the step in which the model does; the last one, and generated tokens, when it drafts next, or when
    they have filled a block. Where others continue a shared block, its last token's key is that of the first text, or
    missing if that ended there; this changes drafts, but never what is generated.

    Drafts are the likeliest tokens: see :class:`~paged_sdk.runner.draft_model.DraftModel`. Their number depends on how
    many were right, and on the measured times of the model's steps and of the layer's.

    :param layer: the layer beside its model
    :param scratch: where drafts' KV is, if KV is in blocks; None: it is contiguous
    :param vocab_size: vocabulary size of the model
    :param gamma: maximum number of drafts per sequence and step
    :param max_tokens: the model's context length
    :param times: step times of the model
    :param balance: time that drafts have gained and lost so far
    """

    def __init__(
        self,
        layer: MtpLayer,
        *,
        scratch: ScratchBlocks | None,
        vocab_size: int,
        gamma: int,
        max_tokens: int,
        times: StepTimes,
        balance: DraftBalance,
    ) -> None:
        self._layer: MtpLayer | None = layer
        self._scratch = scratch
        self._vocab_size = vocab_size
        self._gamma = min(gamma, MOST_DRAFTS)
        self._span = MOST_KEPT if scratch is None else min(MOST_KEPT, scratch.block_size)
        self._max_tokens = max_tokens
        self._times = times
        self._own_times = StepTimes()
        self._balance = balance
        self._acceptance = Acceptance(priors=PRIORS)
        self._first_pause = FirstPause()
        self._states: dict[int, MtpState] = {}
        self._forked: dict[int, tuple[int, Tensor]] = {}  # by first choice: length and last state of the prompt
        self._has_failed = False
        self._none = torch.empty(0, layer.module.weights.config.hidden_size)

    @property
    def num_followed(self) -> int:
        """Return the number of sequences that have state here."""
        return len(self._states)

    @property
    def layer(self) -> MtpLayer:
        """Return the layer, whose KV is to be copied and freed with the model's."""
        assert self._layer is not None, "weights are being made anew"
        return self._layer

    def let_go(self) -> None:
        """Drop the layer, the model and all states, until :meth:`hold`."""
        self._layer = None
        self._states.clear()
        self._forked.clear()

    def hold(self, layer: MtpLayer) -> None:
        """Take another layer, of the same shape, with its model."""
        self._layer = layer
        self._own_times.clear()

    def ask(self, rows: Iterable[StepRow]) -> None:
        """Have the model compute the hidden states of all tokens of a step."""
        for row in () if self._has_failed else rows:
            row.num_logits = row.num_new_tokens

    def take(
        self,
        rows: Sequence_[StepRow],
        scheduled: Sequence_[ScheduledSequence],
        batch: InputBatch,
        hidden: Tensor,
        inserted: InsertedRows | None,
    ) -> None:
        """Take the hidden states that a step has computed.

        :param hidden: ``[num_tokens, hidden_size]``, defined for all tokens
        :param inserted: vectors that replace embeddings of the step's tokens
        """
        if self._has_failed:
            return
        prompts: list[_Prompt] = []
        late: list[MtpState] = []
        normed = self.layer.target.normed(hidden)
        for row, first, of_row in zip(rows, batch.first_tokens, scheduled, strict=True):
            sequence = of_row.sequence
            state = self._state_of(sequence, row.start)
            states = normed[first : first + row.num_new_tokens]
            if row.num_drafts or (row.num_new_tokens == 1 and row.start >= row.num_prompt_tokens):
                state.keep(states)
                if state.end // self._span > row.start // self._span:
                    late.append(state)
                continue
            if len(state.kept) > 1:  # it lost its KV, and found a part of it again
                self._catch_up([state], [len(state.kept) - 1])
            before = state.kept
            prompts.append(_Prompt(row, first + 1 - len(before), torch.cat((before, states[:-1]))))
            state.kept = self._none
            state.begin_at(row.end - 1)
            state.keep(states[-1:])
            if of_row.num_samples > 1:
                self._forked[row.seq_id] = row.end, state.kept
            if not sequence.request.generates and row.end == sequence.num_prompt_tokens:
                del self._states[row.seq_id]  # it computes nothing more
        prompts = [each for each in prompts if len(each.states)]
        if prompts:
            self._compute_prompts(prompts, batch, inserted)
        late = [state for state in late if state.num_ready > 0]
        if late:
            self._catch_up(late, [state.num_ready for state in late])

    def _state_of(self, sequence: Sequence, start: int) -> MtpState:
        """Return the state of a sequence whose next row is from ``start`` on."""
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = MtpState(sequence, Acceptance(self._acceptance), self._first_pause, self._none)
            self._states[sequence.seq_id] = state
            length, kept = self._forked.get(sequence.seq_id - sequence.choice_index, (0, self._none))
            # By now the choice has a copy of the prompt's last block. A full one it shares with the others.
            is_own = self._scratch is None or length % self._scratch.block_size > 0
            if length == start and is_own:
                state.begin_at(start - 1)
                state.keep(kept)
        state.begin_at(start)
        return state

    def _catch_up(self, states: Sequence_[MtpState], counts: Sequence_[int]) -> None:
        """Run the layer over the first kept tokens of sequences, for their KV alone."""
        rows = [self._row(state, count, num_logits=0) for state, count in zip(states, counts, strict=True)]
        self._compute(rows, self._taken(states, counts))

    def propose(self, sequences: Sequence_[Sequence]) -> list[list[int]]:
        """Propose drafts for each sequence, as many as are expected to pay."""
        states = [self._states.get(sequence.seq_id) for sequence in sequences]
        followed = [state for state in states if state is not None]
        for state in followed:
            state.compare()
            state.begin_at(min(state.end, len(state.sequence.token_ids) - 1))
        if not followed or not self._balance.allows:
            return [[] for _ in states]
        chances = [state.chances(self._most_drafts(state)) for state in followed]
        counts = draft_counts(
            chances,
            self._times.expected,
            self._balance.left,
            lambda ahead: ahead * self._own_times.expected(len(followed)),
        )
        chosen = [
            state
            for state, count, chance in zip(followed, counts, chances, strict=True)
            if chance and state.choose(count)
        ]
        start = time.monotonic()
        if chosen:
            try:
                with torch.inference_mode():
                    self._draft(chosen)
            except BaseException:
                self._has_failed = True  # nobody asks again
                self._states.clear()
                self._forked.clear()
                raise
        self._balance.claim((state.sequence.seq_id for state in chosen), time.monotonic() - start)
        return [[] if state is None else state.drafts for state in states]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)
            self._forked.pop(seq_id, None)

    def reset(self) -> None:
        """Do nothing: no text that has ended is remembered."""

    def _most_drafts(self, state: MtpState) -> int:
        """Return the maximum number of drafts for a sequence. The target adds one token after the last draft."""
        num_tokens = len(state.sequence.token_ids)
        if state.num_ready < 1 or state.first + state.num_ready != num_tokens - 1:
            return 0  # the model's state at the token before the last is not here
        return min(self._gamma, state.sequence.max_length - num_tokens - 1, self._max_tokens - num_tokens)

    def _draft(self, states: list[MtpState]) -> None:
        """Draft tokens, one per sequence and run of the layer."""
        for state in states:
            state.follow_grammar()
        ends = [len(state.sequence.token_ids) - 1 for state in states]
        tables = [self._table(state, end, place) for place, (state, end) in enumerate(zip(states, ends, strict=True))]
        rows = [
            self._row(state, state.num_ready, num_logits=1, kv_ids=table)
            for state, table in zip(states, tables, strict=True)
        ]
        inputs = self._taken(states, [state.num_ready for state in states])
        places = list(range(len(states)))
        while True:
            start = time.monotonic()
            hidden = self._compute(rows, inputs)
            tokens = self.layer.module.likeliest(hidden)
            self._own_times.note(len(rows), time.monotonic() - start)
            for place, token in zip(places, tokens, strict=True):
                states[place].add(token, self._vocab_size)
            left = [at for at, place in enumerate(places) if len(states[place].drafts) < states[place].num_wanted]
            if not left:
                return
            inputs = self.layer.module.normed(hidden if len(left) == len(places) else select_rows(hidden, left))
            places = [places[at] for at in left]
            rows = [
                evolve(
                    rows[at],
                    start=ends[place] + len(states[place].drafts) - 1,
                    token_ids=states[place].drafts[-1:],
                )
                for at, place in zip(left, places, strict=True)
            ]

    def _table(self, state: MtpState, num_tokens: int, place: int) -> list[int]:
        """Return where the KV of a sequence's first tokens and of drafts after them is."""
        kv_ids = state.sequence.table.ids
        return kv_ids if self._scratch is None else self._scratch.extended(kv_ids, num_tokens, place)

    def _row(
        self, state: MtpState, num_tokens: int, *, num_logits: int, kv_ids: Sequence_[int] | None = None
    ) -> StepRow:
        """Make a row of the first tokens that the layer has not computed. Its token ids are those after them."""
        sequence, first = state.sequence, state.first
        return StepRow(
            seq_id=sequence.seq_id,
            start=first,
            token_ids=sequence.token_ids[first + 1 : first + 1 + num_tokens],
            kv_ids=sequence.table.ids if kv_ids is None else kv_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            kv_version=sequence.table.version,
            num_logits=num_logits,
            is_long=sequence.is_long,
            media=sequence.request.media,
        )

    @staticmethod
    def _taken(states: Sequence_[MtpState], counts: Sequence_[int]) -> Tensor:
        """Return the first kept states of sequences, and no longer keep them."""
        found = [state.kept[:count] for state, count in zip(states, counts, strict=True)]
        for state, count in zip(states, counts, strict=True):
            state.kept = state.kept[count:]
        return torch.cat(found)

    def _compute(self, rows: Sequence_[StepRow], states: Tensor) -> Tensor:
        """Run the layer over rows whose token ids are those after their tokens.

        :param states: the model's or the layer's hidden states of the rows' tokens, normed
        :returns: ``[num_rows, hidden_size]``: the layer's hidden state of each row's last token; undefined if the rows
            ask for none
        """
        batch = make_input_batch(rows, self.layer.target.device)
        context = StepContext(attention=self.layer.backend.prepare(rows), is_long=batch.is_long)
        hidden = self.layer.module.forward(
            self.layer.module.embedded(batch.token_ids), states, batch.positions, context
        )
        lasts = [first + row.num_new_tokens - 1 for first, row in zip(batch.first_tokens, rows, strict=True)]
        return hidden if len(lasts) == len(hidden) else select_rows(hidden, lasts)

    def _compute_prompts(self, prompts: Sequence_[_Prompt], batch: InputBatch, inserted: InsertedRows | None) -> None:
        """Run the layer over tokens of prompts, for their KV alone."""
        rows = [each.own_row for each in prompts]
        after = torch.cat([torch.arange(each.first, each.first + len(each.states)) for each in prompts])
        part = None if inserted is None else inserted.part(after)
        own = make_input_batch(rows, self.layer.target.device)
        context = StepContext(attention=self.layer.backend.prepare(rows), is_long=own.is_long)
        embedded = self.layer.module.embedded(batch.token_ids[after], part)
        self.layer.module.forward(embedded, torch.cat([each.states for each in prompts]), own.positions, context)


@frozen(eq=False)
class _Prompt:
    """Holds tokens of a prompt for the layer to compute.

    :ivar row: the model's row
    :ivar first: index within the step of the token after the first of them
    :ivar states: the model's hidden states, normed, ``[n, hidden_size]``
    """

    row: StepRow
    first: int
    states: Tensor

    @property
    def own_row(self) -> StepRow:
        """Return the layer's row: each token stands for the one before it."""
        token_ids = self.row.token_ids[self.row.num_new_tokens - len(self.states) :]
        start = self.row.end - 1 - len(self.states)
        return evolve(self.row, start=start, token_ids=token_ids, num_logits=0, state_slot=0)
