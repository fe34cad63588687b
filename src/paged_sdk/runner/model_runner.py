"""The one place where scheduler output meets tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.errors import ModelClosedError
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.runner.output import FinishedStep, PendingStep, RunnerOutput
from paged_sdk.runner.sampled_step import NOT_FINITE, Drawn, SampledStep
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.sampler import Sampled, Sampler, SampleRow
from paged_sdk.scheduler.output import ScheduledSequence, SchedulerOutput

__all__ = ["ModelRunner"]

# Logits of a prompt are made a few rows at a time: a row of 150,000 float32 is 0.6 MB.
_LOGITS_TILE: Final = 64

_NOTHING_LEFT: Final = "every token is banned"

_Logits: TypeAlias = tuple[int, int]
"""Which row of a step some logits are for, and how many of its drafts they follow."""


class ModelRunner:
    """Runs a model over the steps that a scheduler makes.

    :param backend: keeps the KV; its ids are the scheduler's
    :param sampler: chooses tokens on the host
    :param device_decoding: chooses those that need no host, and lets the next step begin before they are seen; None:
        all are chosen on the host
    """

    def __init__(
        self,
        model: CausalModel,
        backend: AttentionBackend,
        sampler: Sampler,
        device_decoding: DeviceDecoding | None = None,
    ) -> None:
        self._parts: _Parts | None = _Parts(model, backend, sampler, device_decoding)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Copy, compute and sample one step. Rows whose logits are not finite fail alone.

        :raises ModelClosedError: after :meth:`close`
        """
        if self._parts is None:
            raise ModelClosedError("the runner is closed")
        with torch.inference_mode():
            return self._parts.submit(output)

    def close(self) -> None:
        """Let go of weights, KV and sampler; nothing happens the second time."""
        self._parts = None


@frozen
class _Parts:
    """What holds the device's memory."""

    model: CausalModel
    backend: AttentionBackend
    sampler: Sampler
    device_decoding: DeviceDecoding | None

    def submit(self, output: SchedulerOutput) -> PendingStep:
        if output.copies:
            self.backend.copy([(copy.src, copy.dst, copy.num_tokens) for copy in output.copies])
        self.backend.release(output.released)
        self.sampler.forget(output.finished_seq_ids)
        if self.device_decoding is not None:
            self.device_decoding.forget(output.finished_seq_ids)
        scheduled = output.scheduled
        result = RunnerOutput(token_ids=[[]] * len(scheduled), logprobs=[None] * len(scheduled))
        if not scheduled:
            return FinishedStep(result)
        if self.device_decoding is not None:
            drawn = self.device_decoding.go_on(scheduled, self.model)
            if drawn is not None:
                return SampledStep(result, range(len(scheduled)), drawn, overlaps=True)
        hidden, first_tokens = self._forward(scheduled)
        self._add_prompt_logprobs(scheduled, first_tokens, hidden, result)
        wanted: list[_Logits] = []
        positions: list[int] = []
        for index, row in enumerate(scheduled):
            if row.num_samples and index not in result.failed:
                num_drafts = len(row.draft_token_ids)
                end = first_tokens[index] + row.num_new_tokens
                wanted += [(index, draft) for draft in range(num_drafts + 1)]
                positions += range(end - num_drafts - 1, end)
        if not wanted:
            return self._unsampled(hidden, result)
        logits = self.model.logits(select_rows(hidden, positions))
        return self._sample(scheduled, wanted, logits, result)

    def _forward(self, scheduled: Sequence[ScheduledSequence]) -> tuple[Tensor, Sequence[int]]:
        """The hidden states of a step's tokens, and the index of each row's first."""
        overlap = None
        if self.device_decoding is not None:
            hidden = self.device_decoding.decode(scheduled)
            if hidden is not None:
                return hidden, range(len(scheduled))
            overlap = self.device_decoding.overlap
        batch = make_input_batch(scheduled, self.model.device, overlap)
        context = StepContext(attention=self.backend.prepare(batch.spans))
        return self.model.forward(batch.token_ids, batch.positions, context), batch.first_tokens

    def _unsampled(self, hidden: Tensor, result: RunnerOutput) -> PendingStep:
        """A step of chunks alone. It is waited for all the same: else a long prompt's would all queue up on the device,
        before anything that is submitted meanwhile."""
        if self.device_decoding is None:
            return FinishedStep(result)
        nothing = Drawn(hidden.new_empty(0, dtype=torch.int64))
        return SampledStep(result, (), nothing, overlaps=not result.failed)

    def _sample(
        self, scheduled: Sequence[ScheduledSequence], wanted: list[_Logits], logits: Tensor, result: RunnerOutput
    ) -> PendingStep:
        """Sample each row where that can be done.

        :param wanted: what each row of the logits is for, those of one row of the step side by side
        :param logits: float32 ``[len(wanted), vocab_size]``
        """
        path = self.device_decoding
        if path is None:
            self._sample_on_host(scheduled, wanted, logits, result)
            return FinishedStep(result)
        device_rows = [path.row_of(scheduled[index]) for index, _ in wanted]
        served = [row for row in device_rows if row is not None]
        overlaps = len(served) == len(wanted)
        if not overlaps:
            on_host = [place for place, row in enumerate(device_rows) if row is None]
            self._sample_on_host(scheduled, [wanted[place] for place in on_host], select_rows(logits, on_host), result)
            if not served:
                return FinishedStep(result)
            on_device = [place for place, row in enumerate(device_rows) if row is not None]
            wanted, logits = [wanted[place] for place in on_device], select_rows(logits, on_device)
        drawn = path.sample(logits, [scheduled[index] for index, _ in wanted], served)
        return SampledStep(result, [index for index, _ in wanted], drawn, overlaps=overlaps and not result.failed)

    def _add_prompt_logprobs(
        self, scheduled: Sequence[ScheduledSequence], first_tokens: Sequence[int], hidden: Tensor, result: RunnerOutput
    ) -> None:
        """Every token of a prompt predicts the next one: collect how well, where that was asked for."""
        for index, row in enumerate(scheduled):
            sequence, top_n = row.sequence, row.sequence.request.sampling.prompt_logprobs
            last = min(row.start + row.num_new_tokens, sequence.num_prompt_tokens - 1)
            if top_n is None or last <= row.start:
                continue
            entries: list[RawLogprobs] = []
            for start in range(row.start, last, _LOGITS_TILE):
                end = min(start + _LOGITS_TILE, last)
                offset = first_tokens[index] - row.start
                logits = self.model.logits(hidden[offset + start : offset + end])
                if not _are_finite(logits).all():
                    result.failed[index] = NOT_FINITE
                    break
                entries += self.sampler.prompt_logprobs(logits, sequence.token_ids[start + 1 : end + 1], top_n)
            else:
                result.prompt_logprobs[index] = entries

    def _sample_on_host(
        self, scheduled: Sequence[ScheduledSequence], wanted: list[_Logits], logits: Tensor, result: RunnerOutput
    ) -> None:
        """Sample some rows, whose logits are given, and wait for the tokens.

        The first token of every row is drawn, then the second of those whose first was their draft, and so on: each
        token is drawn from its own distribution, after the text that it follows, and what the sampler keeps of a text
        only ever grows. So drafts change nothing but the time that it takes.
        """
        is_finite = _are_finite(logits).tolist()
        places = {target: place for place, target in enumerate(wanted)}
        tokens: dict[int, list[Sampled]] = {index: [] for index, _ in wanted}
        going, depth = list(tokens), 0
        while going:
            good = [index for index in going if is_finite[places[index, depth]]]
            if depth == 0 and len(good) < len(going):
                result.failed.update(dict.fromkeys(set(going) - set(good), NOT_FINITE))
            part = select_rows(logits, [places[index, depth] for index in good]) if good else logits[:0]
            sampled = self.sampler.sample(part, [_sample_row(scheduled[index], depth) for index in good])
            going = []
            for index, new in zip(good, sampled, strict=True):
                drafts = scheduled[index].draft_token_ids
                tokens[index] += new
                if depth < len(drafts) and new and new[0].token_id == drafts[depth]:
                    going.append(index)
            depth += 1
        for index, of_row in tokens.items():
            if not of_row:
                result.failed.setdefault(index, _NOTHING_LEFT)
            result.token_ids[index] = [token.token_id for token in of_row]
            logprobs = [token.logprobs for token in of_row if token.logprobs is not None]
            result.logprobs[index] = logprobs or None


def _are_finite(logits: Tensor) -> Tensor:
    """Per row, whether its largest logit is a number: NaN and Inf come out on top; -Inf everywhere is no row at all."""
    return logits.amax(-1).isfinite()


def _sample_row(row: ScheduledSequence, num_drafts: int) -> SampleRow:
    """What to sample after the first ``num_drafts`` drafts of a row."""
    sequence, token_ids = row.sequence, row.sequence.token_ids
    return SampleRow(
        seq_id=sequence.seq_id,
        params=sequence.request.sampling,
        token_ids=[*token_ids, *row.draft_token_ids[:num_drafts]] if num_drafts else token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        choice_index=sequence.choice_index,
        num_samples=row.num_samples,
        stop_token_ids=sequence.request.stop_token_ids,
    )
