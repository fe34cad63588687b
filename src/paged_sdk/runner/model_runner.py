"""Runs scheduled steps on a model's tensors; no other module joins scheduler output and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import EngineDeadError, ModelClosedError
from paged_sdk.guard import clear_frames, request_failure
from paged_sdk.kernels.step import InsertedRows, StepContext
from paged_sdk.models.causal_model import CausalModel, RankingModel
from paged_sdk.models.fused_decoder import fused_spans
from paged_sdk.runner.device import is_lack_of_memory, return_cached_memory
from paged_sdk.runner.device_decoding import DeviceDecoding, Way
from paged_sdk.runner.finite_chunks import check_chunks
from paged_sdk.runner.host_rows import HostRows
from paged_sdk.runner.image_vectors import ImageVectors
from paged_sdk.runner.input_batch import make_input_batch, token_parts
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.output import FinishedStep, PendingStep, RunnerOutput, StepMemoryError
from paged_sdk.runner.prompt_logprobs import add_prompt_logprobs
from paged_sdk.runner.prompt_reader import PromptReader
from paged_sdk.runner.sampled_step import SampledStep
from paged_sdk.runner.step_results import Recorded
from paged_sdk.runner.step_states import StepStates
from paged_sdk.runner.targets import Target, targets_of
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.device_sampler import Drawn
from paged_sdk.sampling.processor import ALL_TOKENS
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.output import ScheduledSequence, SchedulerOutput
from paged_sdk.scheduler.request import Request
from paged_sdk.types.step import Step, StepRow

__all__ = ["ModelRunner", "OtherRanks", "Requantized", "Requantizer"]


@frozen(kw_only=True)
class Requantized:
    """Holds the result of requantizing a runner's weights.

    :ivar error: why requantizing failed and the old weights were kept; None on success
    """

    model: CausalModel
    backend: AttentionBackend
    device_decoding: DeviceDecoding | None
    error: Exception | None = None


class OtherRanks(Protocol):
    """Drives the processes that hold the other shards of a tensor-parallel model."""

    def run(self, step: Step, inserted: InsertedRows | None) -> None:
        """Start a step on the other ranks; this process must compute it too.

        :param inserted: vectors that replace embeddings of the step's tokens
        :raises EngineDeadError: another rank has ended
        """
        ...

    def choose(self, way: str) -> None:
        """Make the other ranks run the next step in this way (a value of :class:`Way`) instead of eagerly."""
        ...

    def check(self) -> None:
        """Check that no rank has ended, so that the results computed since are complete.

        :raises EngineDeadError: another rank has ended
        """
        ...

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        ...


class Requantizer(Protocol):
    """Quantizes a model's weights to another type."""

    def __call__(self, isq: IsqType, check_cancelled: Callable[[], None]) -> Requantized:
        """Requantize the weights; the caller must hold no other reference to them. See
        :meth:`paged_sdk.runner.output.Runner.requantize`.

        :raises Exception: requantizing failed, and the old weights could not be restored
        """
        ...


class ModelRunner:
    """Runs a model over the steps that a scheduler makes.

    :param backend: holds the KV, under the scheduler's ids
    :param sampler: samples on the host
    :param device_decoding: samples on the device where possible, so that steps overlap; None: all tokens are sampled on
        the host
    :param requantizer: quantizes the weights to another type; None: not supported
    :param adapters: the adapters of rows; None: no adapters
    :param images: provides the vectors of prompts' images; None: no images
    :param others: the other ranks of a tensor-parallel model; None: this process holds the whole model
    """

    def __init__(
        self,
        model: CausalModel,
        backend: AttentionBackend,
        sampler: Sampler,
        device_decoding: DeviceDecoding | None = None,
        requantizer: Requantizer | None = None,
        adapters: AdapterBank | None = None,
        images: ImageVectors | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        self._parts: _Parts | None = _Parts(model, backend, sampler, device_decoding, adapters, images, others)
        self._requantizer = requantizer

    @property
    def samples_on_device(self) -> bool:
        """Tell whether tokens are sampled on the device where possible."""
        return self._parts is not None and self._parts.device_decoding is not None

    def num_on_host(self, request: Request) -> int:
        """Return the number of first output tokens of a request that may be sampled on the host, as drafts require."""
        path = None if self._parts is None else self._parts.device_decoding
        return ALL_TOKENS if path is None else path.num_on_host(request)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Copy blocks, then compute and sample one step. Rows whose logits are not finite fail alone.

        :raises StepMemoryError: the step ran out of memory
        :raises ModelClosedError: after :meth:`close`
        """
        if self._parts is None:
            raise ModelClosedError("the runner is closed")
        with torch.inference_mode():
            return self._parts.submit(output)

    def requantize(self, isq: IsqType, check_cancelled: Callable[[], None]) -> None:
        """Implement :meth:`paged_sdk.runner.output.Runner.requantize`."""
        if self._parts is None or self._requantizer is None:
            raise ModelClosedError("the runner is closed")
        sampler, adapters = self._parts.sampler, self._parts.adapters
        images, others = self._parts.images, self._parts.others
        self._parts = None  # so that old weights are freed while new ones are made
        # Otherwise new weights would be allocated in pieces of the old KV pool, which leaves no contiguous memory for
        # the new pool, and the memory of recorded steps would stay cached and unused.
        return_cached_memory()
        try:
            made = self._requantizer(isq, check_cancelled)
        except Exception as error:
            _close(images, others, adapters)
            if isinstance(error, ModelClosedError):
                raise
            raise EngineDeadError(f"the weights could not be quantized again: {error!r}") from error
        if adapters is not None:
            adapters.hold(fused_spans(made.model))
        self._parts = _Parts(made.model, made.backend, sampler, made.device_decoding, adapters, images, others)
        if made.error is not None:
            raise made.error

    def close(self) -> None:
        """Free weights, KV and sampler; a second call does nothing."""
        if self._parts is not None:
            _close(self._parts.images, self._parts.others, self._parts.adapters)
        self._parts = self._requantizer = None
        return_cached_memory()


def _close(*parts: ImageVectors | OtherRanks | AdapterBank | None) -> None:
    for part in parts:
        if part is not None:
            part.close()


class _CheckedStep:
    """Provides the results of a tensor-parallel step, after checking that no rank has ended."""

    def __init__(self, step: PendingStep, others: OtherRanks) -> None:
        self._step = step
        self._others = others
        self.overlaps = step.overlaps
        self.early_rows = step.early_rows
        self.withheld_rows = step.withheld_rows

    def early_result(self) -> RunnerOutput:
        """Return the results of the early rows."""
        output = self._step.early_result()
        self._others.check()
        return output

    def result(self) -> RunnerOutput:
        """Return the results of all rows.

        :raises EngineDeadError: another rank has ended meanwhile
        """
        output = self._step.result()
        self._others.check()
        return output


@frozen
class _Parts:
    """Holds everything that uses the device's memory."""

    model: CausalModel
    backend: AttentionBackend
    sampler: Sampler
    device_decoding: DeviceDecoding | None
    adapters: AdapterBank | None
    images: ImageVectors | None
    others: OtherRanks | None
    reader: PromptReader = field(factory=PromptReader)
    takes_token_types: bool = field(init=False)

    @takes_token_types.default
    def _ask_model(self) -> bool:
        # Asked once, so that steps of other models do not search their rows for pairs.
        head = self.model.rank_head if isinstance(self.model, RankingModel) else None
        return head is not None and head.takes_token_types

    def submit(self, output: SchedulerOutput) -> PendingStep:
        num_rows = len(output.scheduled)
        result = RunnerOutput(token_ids=[[]] * num_rows, logprobs=[None] * num_rows)
        step = inserted = None
        way = Way.LAUNCHED if self.device_decoding is None else self.device_decoding.way(output.scheduled)
        if self.others is not None:
            step = output.message()
            inserted = self._inserted(step.rows, output.scheduled, result)
            if way is not Way.LAUNCHED:
                self.others.choose(way.value)
            self.others.run(step, inserted)
        with self._watching():
            if output.copies:
                self.backend.copy([(copy.src, copy.dst, copy.num_tokens) for copy in output.copies])
            self.backend.release(output.released)
        self.sampler.forget(output.finished_seq_ids)
        self.reader.forget(output.finished_seq_ids)
        if self.device_decoding is not None:
            self.device_decoding.forget(output.finished_seq_ids)
        try:
            with self._watching():
                pending = self._run(output, way, step, inserted, result)
            return pending if self.others is None else _CheckedStep(pending, self.others)
        except (RuntimeError, MemoryError) as error:
            # Other ranks have computed the step regardless. The copies above are not covered: it would not be known
            # which of them were made.
            if self.others is not None or not is_lack_of_memory(error):
                raise
            if self.device_decoding is not None:
                self.device_decoding.forget_step()
            clear_frames(error)
            return_cached_memory()
            raise StepMemoryError(f"no memory for a step of {len(output.scheduled)} rows") from error

    def _watching(self) -> AbstractContextManager[None]:
        compilations = None if self.device_decoding is None else self.device_decoding.compilations
        return nullcontext() if compilations is None else compilations.watching()

    def _run(
        self, output: SchedulerOutput, way: Way, step: Step | None, inserted: InsertedRows | None, result: RunnerOutput
    ) -> PendingStep:
        """Compute and sample a step.

        :param step: the step as sent to the other ranks, if there are any
        :param inserted: the vectors sent to the other ranks, if there are any
        :param result: receives the results; may already hold failed rows
        """
        scheduled = output.scheduled
        if not scheduled:
            return FinishedStep(result)
        late = LateResults(scheduled, result, waits=self.device_decoding is None)
        if self.device_decoding is not None and way is Way.REPEATED:
            drawn = self.device_decoding.repeat(scheduled)
            return SampledStep(late, range(len(scheduled)), drawn, overlaps=True)
        targets = targets_of(scheduled)
        on_host, on_device = self._place(targets)
        # On the CPU the forward pass blocks; on other devices the host prepares sampling while it runs.
        is_over = self.model.device.type == "cpu"
        host = HostRows.prepare(self.sampler, scheduled, on_host) if is_over else None
        rows = (step or output.message()).rows
        states, recorded = self._forward(rows, way, scheduled, inserted, result)
        if host is None:
            host = HostRows.prepare(self.sampler, scheduled, on_host)
        add_prompt_logprobs(late, states)
        self.reader.read(late, states)
        check_chunks(late, states)
        if not targets:
            return self._unsampled(late, states.hidden)
        if host.prepared.settled:
            settled = host.settled
            targets = [target for target in targets if target.place not in settled]
            for place, target in enumerate(targets):
                target.place = place
        positions = [states.first_tokens[target.index] + target.offset for target in targets]
        make_logits = partial(states.logits, positions)
        if recorded is not None and recorded.positions != positions:
            recorded = None  # it has computed the logits of other tokens
        logits = states.hidden[:0] if not positions else make_logits() if recorded is None else recorded.logits
        likeliest = None if recorded is None or on_host else recorded.likeliest
        return self._sample(logits, on_device, host, make_logits, late, likeliest)

    def _place(self, targets: list[Target]) -> tuple[list[Target], list[Target]]:
        """Divide targets into those sampled on the host and those sampled on the device."""
        path = self.device_decoding
        if path is None:
            return targets, []
        on_device = [target for target in targets if path.serves(target.row)]
        if not on_device:
            return targets, []
        places = {target.place for target in on_device}
        return [target for target in targets if target.place not in places], on_device

    def _forward(
        self,
        rows: Sequence[StepRow],
        way: Way,
        scheduled: Sequence[ScheduledSequence],
        inserted: InsertedRows | None,
        result: RunnerOutput,
    ) -> tuple[StepStates, Recorded | None]:
        """Compute the hidden states of a step's tokens.

        :param inserted: the vectors sent to the other ranks, if there are any
        :returns: the hidden states, and the results of a recorded step (None if launched)
        """
        path = self.device_decoding
        if path is not None and way is not Way.LAUNCHED:
            recorded, first_tokens = path.run(way, rows)
            return StepStates(model=self.model, hidden=recorded.hidden, first_tokens=first_tokens), recorded
        batch = make_input_batch(rows, self.model.device, None if path is None else path.overlap)
        adapted = None if self.adapters is None else self.adapters.rows(rows)
        if self.others is None:
            inserted = self._inserted(rows, scheduled, result)
        context = StepContext(
            attention=self.backend.prepare(rows),
            is_long=batch.is_long,
            adapted=adapted,
            inserted=inserted,
            parts=token_parts(rows, self.model.device) if self.takes_token_types else None,
        )
        hidden = self.model.forward(batch.token_ids, batch.positions, context)
        return StepStates(model=self.model, hidden=hidden, first_tokens=batch.first_tokens, adapted=adapted), None

    def _inserted(
        self, rows: Sequence[StepRow], scheduled: Sequence[ScheduledSequence], result: RunnerOutput
    ) -> InsertedRows | None:
        """Return the vectors that replace embeddings of image tokens. A row whose image cannot be encoded fails."""
        if self.images is None or all(row.media is None for row in rows):
            return None

        def fail(row: int, error: Exception) -> None:
            result.failed[row] = request_failure(error, scheduled[row].sequence.request.request_id)

        return self.images.of(rows, list(accumulate((row.num_new_tokens for row in rows), initial=0)), fail)

    def _unsampled(self, late: LateResults, hidden: Tensor) -> PendingStep:
        """Finish a step that samples nothing. The engine still waits for it: otherwise all chunks of a long prompt
        would queue up on the device, ahead of requests that are submitted meanwhile."""
        if self.device_decoding is None:
            return FinishedStep(late.output)
        return SampledStep(late, (), _nothing(hidden), overlaps=not late.output.failed)

    def _sample(
        self,
        logits: Tensor,
        on_device: Sequence[Target],
        host: HostRows,
        make_logits: Callable[[], Tensor],
        late: LateResults,
        likeliest: Tensor | None,
    ) -> PendingStep:
        """Sample on the device, and on the host the rows that need it.

        :param logits: float32, one row per target, host's and device's, that is not settled
        :param host: the targets sampled on the host
        :param make_logits: computes ``logits`` again
        :param likeliest: the likeliest tokens, if known
        """
        path, scheduled, result = self.device_decoding, host.scheduled, late.output
        if not on_device:
            host.sample(lambda: logits, lambda: _rows(make_logits(), host.places), result)
            # Late results must be completed after those of the previous step, which may still be pending.
            return FinishedStep(result) if late.is_done else SampledStep(late, (), _nothing(logits), overlaps=False)
        assert path is not None
        indices = [target.index for target in on_device]
        its_logits = logits if not host.targets else select_rows(logits, [target.place for target in on_device])
        # Launch the device's part first: it runs while the host samples its own rows.
        drawn = path.sample(
            its_logits, [scheduled[index] for index in indices], [target.row for target in on_device], likeliest
        )
        rows = host.rows
        if not path.may_withhold(len(rows), len(on_device)):
            early_rows = sorted({*rows, *result.failed})
            step = SampledStep(late, indices, drawn, overlaps=True, early_rows=early_rows)
            host.sample(lambda: _rows(logits, host.places), lambda: _rows(make_logits(), host.places), result)
            return step
        kept = _rows(logits, host.places).clone()  # the next step may overwrite the logits
        mark = path.beside.mark()

        def sample_withheld() -> None:
            with torch.inference_mode(), self._watching(), path.beside.beside(mark):
                host.sample_later(kept, result)

        return SampledStep(
            late,
            indices,
            drawn,
            overlaps=True,
            early_rows=sorted(result.failed.keys() - set(rows)),
            withheld_rows=rows,
            sample_withheld=sample_withheld,
        )


def _rows(logits: Tensor, places: Sequence[int]) -> Tensor:
    return select_rows(logits, places) if places else logits[:0]


def _nothing(tensor: Tensor) -> Drawn:
    """Return no tokens, on the device of a tensor."""
    return Drawn(tensor.new_empty(0, dtype=torch.int64))
