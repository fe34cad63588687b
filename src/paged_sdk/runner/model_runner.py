"""The one place where scheduler output meets tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from attrs import define, frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.errors import ModelClosedError
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.device_decoding import DeviceDecoding, Way
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.runner.output import FinishedStep, PendingStep, RunnerOutput
from paged_sdk.runner.sampled_step import SampledStep
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.device_sampler import Drawn
from paged_sdk.sampling.failures import not_finite
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sampler import PreparedRows, SampledRows, Sampler
from paged_sdk.scheduler.output import ScheduledSequence, SchedulerOutput
from paged_sdk.types.step import StepRow

__all__ = ["ModelRunner"]

# Logits of a prompt are made a few rows at a time: a row of 150,000 float32 is 0.6 MB.
_LOGITS_TILE: Final = 64


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
        way = Way.LAUNCHED if self.device_decoding is None else self.device_decoding.way(scheduled)
        result = RunnerOutput(token_ids=[[]] * len(scheduled), logprobs=[None] * len(scheduled))
        if not scheduled:
            return FinishedStep(result)
        if self.device_decoding is not None and way is Way.REPEATED:
            drawn = self.device_decoding.repeat(scheduled, self.model)
            return SampledStep(result, scheduled, range(len(scheduled)), drawn, overlaps=True)
        targets = _targets(scheduled)
        on_host, on_device = self._place(targets)
        # On the CPU the forward pass is over once it is submitted: only what begins before it can run beside it.
        is_over = self.model.device.type == "cpu"
        prepared = self.sampler.prepare([target.row for target in on_host]) if is_over else None
        hidden, first_tokens = self._forward(output.message().rows, way)
        if prepared is None:
            prepared = self.sampler.prepare([target.row for target in on_host])
        self._add_prompt_logprobs(scheduled, first_tokens, hidden, result)
        if not targets:
            return self._unsampled(scheduled, hidden, result)
        positions = [first_tokens[target.index] + target.offset for target in targets]
        logits = self.model.logits(select_rows(hidden, positions))
        if not on_device:
            _note(scheduled, on_host, self.sampler.sample(logits, prepared), result)
            return FinishedStep(result)
        return self._sample(scheduled, logits, on_device, on_host, prepared, result)

    def _place(self, targets: list[_Target]) -> tuple[list[_Target], list[_Target]]:
        """Divide targets into those that the host samples and those that the device does."""
        path = self.device_decoding
        if path is None:
            return targets, []
        on_device = [target for target in targets if path.serves(target.row)]
        if not on_device:
            return targets, []
        places = {target.place for target in on_device}
        return [target for target in targets if target.place not in places], on_device

    def _forward(self, rows: Sequence[StepRow], way: Way) -> tuple[Tensor, Sequence[int]]:
        """Compute the hidden states of a step's tokens, and the index of each row's first."""
        path = self.device_decoding
        if path is not None and way is Way.RECORDED:
            return path.decode(rows), range(len(rows))
        batch = make_input_batch(rows, self.model.device, None if path is None else path.overlap)
        context = StepContext(attention=self.backend.prepare(rows))
        return self.model.forward(batch.token_ids, batch.positions, context), batch.first_tokens

    def _unsampled(self, scheduled: Sequence[ScheduledSequence], hidden: Tensor, result: RunnerOutput) -> PendingStep:
        """A step of chunks alone. It is waited for all the same: else a long prompt's would all queue up on the device,
        before anything that is submitted meanwhile."""
        if self.device_decoding is None:
            return FinishedStep(result)
        nothing = Drawn(hidden.new_empty(0, dtype=torch.int64))
        return SampledStep(result, scheduled, (), nothing, overlaps=not result.failed)

    def _sample(
        self,
        scheduled: Sequence[ScheduledSequence],
        logits: Tensor,
        on_device: list[_Target],
        on_host: list[_Target],
        prepared: PreparedRows,
        result: RunnerOutput,
    ) -> PendingStep:
        """Sample on the device, and beside that on the host what only the host can.

        :param logits: float32, a row for each target of both kinds
        :param prepared: the targets on the host
        """
        assert self.device_decoding is not None
        # The device's part goes first: it is only launched here, and runs while the host is busy with its own.
        its_logits, logits_on_host = logits, logits[:0]
        if on_host:
            its_logits = select_rows(logits, [target.place for target in on_device])
            logits_on_host = select_rows(logits, [target.place for target in on_host])
        indices = [target.index for target in on_device]
        rows = [scheduled[index] for index in indices]
        drawn = self.device_decoding.sample(its_logits, rows, [target.row for target in on_device])
        early_rows = sorted({target.index for target in on_host} | result.failed.keys())
        step = SampledStep(result, scheduled, indices, drawn, overlaps=True, early_rows=early_rows)
        _note(scheduled, on_host, self.sampler.sample(logits_on_host, prepared), result)
        return step

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
                if not logits.amax(-1).isfinite().all():  # NaN and Inf come out on top
                    result.failed[index] = not_finite(sequence.request)
                    break
                entries += self.sampler.prompt_logprobs(logits, sequence.token_ids[start + 1 : end + 1], top_n)
            else:
                result.prompt_logprobs[index] = entries


# Not frozen, which takes three times as long: a step makes one for each sequence.
@define(eq=False)
class _Target:
    """One token to choose.

    :ivar place: which of the step's targets it is
    :ivar index: which row of the step it is for
    :ivar depth: how many drafts of the row precede it
    :ivar offset: which of the row's new tokens it follows
    """

    place: int
    index: int
    depth: int
    offset: int
    row: SampleRow


def _targets(scheduled: Sequence[ScheduledSequence]) -> list[_Target]:
    """All tokens that a step is to choose, those of one row side by side: one after each of its drafts as well."""
    targets: list[_Target] = []
    for index, scheduled_row in enumerate(scheduled):
        if not scheduled_row.num_samples:
            continue
        sequence, drafts = scheduled_row.sequence, scheduled_row.draft_token_ids
        token_ids: list[int] = sequence.token_ids
        for depth in range(len(drafts) + 1):
            if depth:
                token_ids = [*sequence.token_ids, *drafts[:depth]]
            row = SampleRow(
                sequence.seq_id,
                sequence.request,
                token_ids,
                scheduled_row.known_end + depth,
                sequence.choice_index,
                scheduled_row.num_samples,
                len(drafts),
            )
            offset = scheduled_row.num_new_tokens - len(drafts) + depth - 1
            targets.append(_Target(len(targets), index, depth, offset, row))
    return targets


def _note(
    scheduled: Sequence[ScheduledSequence], targets: Sequence[_Target], sampled: SampledRows, result: RunnerOutput
) -> None:
    """Take in what the host has sampled.

    A row's tokens go on as long as each is the draft that the next one was sampled after: every token is drawn from its
    own distribution, after the text that it follows, so drafts change nothing but the time that it takes.
    """
    for place, target in enumerate(targets):
        index, depth = target.index, target.depth
        token_ids, logprobs = sampled.token_ids[place], sampled.logprobs[place]
        if not depth:
            result.token_ids[index], result.logprobs[index] = token_ids, logprobs
            if place in sampled.failed:
                result.failed.setdefault(index, sampled.failed[place])
        elif result.token_ids[index] == list(scheduled[index].draft_token_ids[:depth]):
            result.token_ids[index] += token_ids
            if logprobs is not None:
                result.logprobs[index] = [*(result.logprobs[index] or ()), *logprobs]
