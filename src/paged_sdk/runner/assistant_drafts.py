"""Proposes drafts made by an assistant, which reads its target's hidden states, keys and values."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.step import StepContext
from paged_sdk.runner.assistant import Assistant
from paged_sdk.runner.assistant_state import AssistantState
from paged_sdk.runner.computed_step import ComputedStep
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.types.step import StepRow

__all__ = ["AssistantDrafts"]


class AssistantDrafts(LayerDrafts[Assistant, AssistantState]):
    """Drafts with an assistant.

    It attends over its target's keys and values of all tokens but the last one, at the same position for all drafts. So
    prompts cost it nothing, and it writes nothing that would have to be copied, shared or freed.
    """

    def ask(self, rows: Iterable[StepRow]) -> None:
        """Do nothing: where the target samples a token, the hidden state is computed anyway."""

    def take(self, step: ComputedStep) -> None:
        """Take the hidden states at the tokens after which the target samples one."""
        for row, first, of_row in zip(step.rows, step.batch.first_tokens, step.scheduled, strict=True):
            sequence, end = of_row.sequence, first + row.num_new_tokens
            if self._has_failed or row.num_logits <= row.num_drafts or not sequence.request.generates:
                continue
            state = self._states.get(row.seq_id)
            if state is None:
                state = AssistantState(sequence, Acceptance(self._acceptance), self._first_pause)
                self._states[row.seq_id] = state
            # A copy: the other tokens' states may be those of a long prompt.
            state.hidden, state.end = step.hidden[end - 1 - row.num_drafts : end].clone(), row.end

    def _shorten(self, state: AssistantState) -> None:
        """Do nothing: which state is the last one depends on the tokens that the sequence has got."""

    def _is_ready(self, state: AssistantState) -> bool:
        return state.last_hidden is not None

    def _draft(self, states: list[AssistantState]) -> None:
        module = self.layers.module
        lasts = [last for last in (state.last_hidden for state in states) if last is not None]
        assert len(lasts) == len(states), "a text is not ready"
        inputs = self.layers.target.normed(torch.cat(lasts))
        tokens = [state.sequence.token_ids[-1] for state in states]
        together = self._round(states)
        while True:
            start = time.monotonic()
            hidden = module.forward(torch.tensor(tokens), inputs, together.positions, together.context)
            left = self._add(states, module.likeliest(hidden), start)
            if not left:
                return
            if len(left) < len(states):
                states, hidden = [states[place] for place in left], select_rows(hidden, left)
                together = self._round(states)
            tokens, inputs = [state.drafts[-1] for state in states], module.next_states(hidden)

    def _round(self, states: Sequence_[AssistantState]) -> _Round:
        """Make what the runs for some sequences' drafts share."""
        ends = [len(state.sequence.token_ids) - 1 for state in states]
        rows = [
            StepRow(
                seq_id=state.sequence.seq_id,
                start=end - 1,
                token_ids=state.sequence.token_ids[end - 1 : end],
                kv_ids=state.sequence.table.ids,
                num_prompt_tokens=0,  # so that prompts' last tokens are computed like generated ones
                kv_version=state.sequence.table.version,
                num_logits=1,
            )
            for state, end in zip(states, ends, strict=True)
        ]
        # A row's one token stands for the last one: it sees the keys before that, from that one's position.
        return _Round(torch.tensor(ends), StepContext(attention=self.layers.backend.prepare(rows)))


@frozen(eq=False)
class _Round:
    """Holds what further drafts of the same sequences share.

    :ivar positions: of the texts' last tokens, int64 ``[num_rows]``
    """

    positions: Tensor
    context: StepContext
