"""The one place where scheduler output meets tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.context import StepContext
from paged_sdk.errors import ModelClosedError
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.input_batch import InputBatch, make_input_batch
from paged_sdk.runner.output import FinishedStep, PendingStep, RawLogprobs, RunnerOutput
from paged_sdk.runner.sampler import Sampler, SampleRow
from paged_sdk.scheduler.output import ScheduledSequence, SchedulerOutput

__all__ = ["ModelRunner"]

# Logits of a prompt are made a few rows at a time: a row of 150,000 float32 is 0.6 MB.
_LOGITS_TILE: Final = 64

_NOT_FINITE: Final = "the logits hold NaN or Inf"
_NOTHING_LEFT: Final = "every token is banned"


class ModelRunner:
    """Runs a model over the steps that a scheduler makes.

    :param backend: keeps the KV; its ids are the scheduler's
    """

    def __init__(self, model: CausalModel, backend: AttentionBackend, sampler: Sampler) -> None:
        self._parts: _Parts | None = _Parts(model, backend, sampler)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Copy, compute and sample one step. Rows whose logits are not finite fail alone.

        :raises ModelClosedError: after :meth:`close`
        """
        if self._parts is None:
            raise ModelClosedError("the runner is closed")
        with torch.inference_mode():
            return FinishedStep(self._parts.execute(output))

    def close(self) -> None:
        """Let go of weights, KV and sampler; nothing happens the second time."""
        self._parts = None


@frozen
class _Parts:
    """What holds the device's memory."""

    model: CausalModel
    backend: AttentionBackend
    sampler: Sampler

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        for copy in output.copies:
            self.backend.copy(copy.src, copy.dst, copy.num_tokens)
        self.backend.release(output.released)
        self.sampler.forget(output.finished_seq_ids)
        scheduled = output.scheduled
        result = RunnerOutput(token_ids=[[] for _ in scheduled], logprobs=[None for _ in scheduled])
        if scheduled:
            batch = make_input_batch(scheduled, self.model.device)
            context = StepContext(attention=self.backend.prepare(batch.spans))
            hidden = self.model.forward(batch.token_ids, batch.positions, context)
            self._add_prompt_logprobs(scheduled, batch, hidden, result)
            self._add_samples(scheduled, batch, hidden, result)
        return result

    def _add_prompt_logprobs(
        self, scheduled: Sequence[ScheduledSequence], batch: InputBatch, hidden: Tensor, result: RunnerOutput
    ) -> None:
        """Every token of a prompt predicts the next one: collect how well, where that was asked for."""
        for index, row in enumerate(scheduled):
            sequence, top_n = row.sequence, row.sequence.sampling.prompt_logprobs
            last = min(row.start + row.num_new_tokens, sequence.num_prompt_tokens - 1)
            if top_n is None or last <= row.start:
                continue
            entries: list[RawLogprobs] = []
            for start in range(row.start, last, _LOGITS_TILE):
                end = min(start + _LOGITS_TILE, last)
                offset = batch.first_tokens[index] - row.start
                logits = self.model.logits(hidden[offset + start : offset + end])
                if not _are_finite(logits).all():
                    result.failed[index] = _NOT_FINITE
                    break
                entries += self.sampler.prompt_logprobs(logits, sequence.token_ids[start + 1 : end + 1], top_n)
            else:
                result.prompt_logprobs[index] = entries

    def _add_samples(
        self, scheduled: Sequence[ScheduledSequence], batch: InputBatch, hidden: Tensor, result: RunnerOutput
    ) -> None:
        """Sample after the last token of each row that reaches the end of its sequence."""
        indices = [index for index, row in enumerate(scheduled) if row.num_samples and index not in result.failed]
        if not indices:
            return
        last_tokens = [batch.first_tokens[index] + scheduled[index].num_new_tokens - 1 for index in indices]
        logits = self.model.logits(hidden[torch.tensor(last_tokens).to(hidden.device)])
        finite = _are_finite(logits)
        if not finite.all():
            is_good = finite.tolist()
            result.failed.update((index, _NOT_FINITE) for index, good in zip(indices, is_good, strict=True) if not good)
            indices = [index for index, good in zip(indices, is_good, strict=True) if good]
            logits = logits[finite]
        sampled = self.sampler.sample(logits, [_sample_row(scheduled[index]) for index in indices])
        for index, tokens in zip(indices, sampled, strict=True):
            if not tokens:
                result.failed[index] = _NOTHING_LEFT
            result.token_ids[index] = [token.token_id for token in tokens]
            logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
            result.logprobs[index] = logprobs or None


def _are_finite(logits: Tensor) -> Tensor:
    """Per row, whether its largest logit is a number: NaN and Inf come out on top; -Inf everywhere is no row at all."""
    return logits.amax(-1).isfinite()


def _sample_row(row: ScheduledSequence) -> SampleRow:
    sequence = row.sequence
    return SampleRow(
        seq_id=sequence.seq_id,
        params=sequence.sampling,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        choice_index=sequence.choice_index,
        num_samples=row.num_samples,
        stop_token_ids=sequence.stop_token_ids,
    )
