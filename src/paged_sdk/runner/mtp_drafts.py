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
from paged_sdk.runner.computed_step import ComputedStep
from paged_sdk.runner.drafted_model import DraftedModel
from paged_sdk.runner.input_batch import InputBatch, make_input_batch
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.runner.mtp_layer import MtpLayer
from paged_sdk.runner.mtp_state import MtpState
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.types.step import StepRow

__all__ = ["MtpDrafts"]

MOST_KEPT: Final = 32
"""Tokens after which hidden states wait no longer for the layer, unless they fill a block sooner: as many as a tile of
a matrix product has rows."""


class MtpDrafts(LayerDrafts[MtpLayer, MtpState]):
    """Drafts with a model's own layer for multi-token prediction.

    The layer attends over keys and values of its own, in blocks with the ids of the model's, so that they are shared,
    copied and freed with them. Those of a token depend on the token after it. So of prompts, the layer computes all but
    the last token in the step in which the model does; the last one, and generated tokens, when it drafts next, or when
    they have filled a block. Where others continue a shared block, its last token's key is that of the first text, or
    missing if that ended there; this changes drafts, but never what is generated.
    """

    def __init__(self, layers: MtpLayer, model: DraftedModel) -> None:
        super().__init__(layers, model)
        self._scratch = layers.scratch
        self._span = MOST_KEPT if layers.scratch is None else min(MOST_KEPT, layers.scratch.block_size)
        self._forked: dict[int, tuple[int, Tensor]] = {}  # by first choice: length and last state of the prompt
        self._none = torch.empty(0, layers.module.weights.config.hidden_size)

    def ask(self, rows: Iterable[StepRow]) -> None:
        """Have the model compute the hidden states of all tokens of a step."""
        for row in () if self._has_failed else rows:
            row.num_logits = row.num_new_tokens

    def take(self, step: ComputedStep) -> None:
        """Take the hidden states of a step's tokens, and run the layer over those of prompts."""
        if self._has_failed:
            return
        prompts: list[_Prompt] = []
        late: list[MtpState] = []
        normed = self.layers.target.normed(step.hidden)
        for row, first, of_row in zip(step.rows, step.batch.first_tokens, step.scheduled, strict=True):
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
            self._compute_prompts(prompts, step.batch, step.inserted)
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

    def _shorten(self, state: MtpState) -> None:
        state.begin_at(min(state.end, len(state.sequence.token_ids) - 1))

    def _is_ready(self, state: MtpState) -> bool:
        return state.num_ready >= 1 and state.first + state.num_ready == len(state.sequence.token_ids) - 1

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended."""
        ended = list(seq_ids)
        super().forget(ended)
        for seq_id in ended:
            self._forked.pop(seq_id, None)

    def _drop_states(self) -> None:
        super()._drop_states()
        self._forked.clear()

    def _draft(self, states: list[MtpState]) -> None:
        ends = [len(state.sequence.token_ids) - 1 for state in states]
        tables = [self._table(state, end, place) for place, (state, end) in enumerate(zip(states, ends, strict=True))]
        rows = [
            self._row(state, state.num_ready, num_logits=1, kv_ids=table)
            for state, table in zip(states, tables, strict=True)
        ]
        inputs = self._taken(states, [state.num_ready for state in states])
        while True:
            start = time.monotonic()
            hidden = self._compute(rows, inputs)
            left = self._add(states, self.layers.module.likeliest(hidden), start)
            if not left:
                return
            inputs = self.layers.module.normed(hidden if len(left) == len(states) else select_rows(hidden, left))
            states, ends = [states[at] for at in left], [ends[at] for at in left]
            rows = [
                evolve(rows[at], start=end + len(state.drafts) - 1, token_ids=state.drafts[-1:])
                for at, state, end in zip(left, states, ends, strict=True)
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
        batch = make_input_batch(rows, self.layers.target.device)
        context = StepContext(attention=self.layers.backend.prepare(rows), is_long=batch.is_long)
        hidden = self.layers.module.forward(
            self.layers.module.embedded(batch.token_ids), states, batch.positions, context
        )
        lasts = [first + row.num_new_tokens - 1 for first, row in zip(batch.first_tokens, rows, strict=True)]
        return hidden if len(lasts) == len(hidden) else select_rows(hidden, lasts)

    def _compute_prompts(self, prompts: Sequence_[_Prompt], batch: InputBatch, inserted: InsertedRows | None) -> None:
        """Run the layer over tokens of prompts, for their KV alone."""
        rows = [each.own_row for each in prompts]
        after = torch.cat([torch.arange(each.first, each.first + len(each.states)) for each in prompts])
        part = None if inserted is None else inserted.part(after)
        own = make_input_batch(rows, self.layers.target.device)
        context = StepContext(attention=self.layers.backend.prepare(rows), is_long=own.is_long)
        embedded = self.layers.module.embedded(batch.token_ids[after], part)
        self.layers.module.forward(embedded, torch.cat([each.states for each in prompts]), own.positions, context)


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
