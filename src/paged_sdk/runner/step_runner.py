"""Computes and samples scheduled steps; no other module joins scheduler output and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.guard import clear_frames, request_failure
from paged_sdk.kernels.step import InsertedRows, StepContext
from paged_sdk.models.causal_model import CausalModel, GreedyModel, RankingModel
from paged_sdk.runner.computed_step import ComputedStep
from paged_sdk.runner.device import is_lack_of_memory, return_cached_memory
from paged_sdk.runner.device_decoding import DeviceDecoding, Way
from paged_sdk.runner.finite_chunks import check_chunks
from paged_sdk.runner.host_rows import HostRows
from paged_sdk.runner.image_vectors import ImageVectors
from paged_sdk.runner.input_batch import make_input_batch, token_parts
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.runner.other_ranks import OtherRanks
from paged_sdk.runner.output import FinishedStep, PendingStep, RunnerOutput, StepMemoryError
from paged_sdk.runner.prompt_logprobs import add_prompt_logprobs
from paged_sdk.runner.prompt_reader import PromptReader
from paged_sdk.runner.sampled_step import SampledStep
from paged_sdk.runner.step_results import Recorded
from paged_sdk.runner.step_states import StepStates
from paged_sdk.runner.stored_blocks import StoredBlocks
from paged_sdk.runner.targets import Target, targets_of
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.device_sampler import Drawn
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.output import ScheduledSequence, SchedulerOutput
from paged_sdk.types.step import Step, StepRow

__all__ = ["StepRunner"]


@frozen
class StepRunner:
    """Runs the steps of a model, and holds everything that uses the device's memory.

    See :class:`~paged_sdk.runner.model_runner.ModelRunner` for the parameters.
    """

    model: CausalModel
    backend: AttentionBackend
    sampler: Sampler
    device_decoding: DeviceDecoding | None
    adapters: AdapterBank | None
    images: ImageVectors | None
    others: OtherRanks | None
    blocks: StoredBlocks | None = None
    drafts: LayerDrafts[Any, Any] | None = None
    reader: PromptReader = field(init=False)
    greedy: GreedyModel | None = field(init=False)
    takes_token_types: bool = field(init=False)

    @reader.default
    def _make_reader(self) -> PromptReader:
        return PromptReader(self.adapters)

    @greedy.default
    def _as_greedy(self) -> GreedyModel | None:
        return self.model if self.device_decoding is None and isinstance(self.model, GreedyModel) else None

    @takes_token_types.default
    def _ask_model(self) -> bool:
        # Asked once, so that steps of other models do not search their rows for pairs.
        head = self.model.rank_head if isinstance(self.model, RankingModel) else None
        return head is not None and head.takes_token_types

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Implement :meth:`~paged_sdk.runner.model_runner.ModelRunner.submit`."""
        num_rows = len(output.scheduled)
        result = RunnerOutput(token_ids=[[] for _ in range(num_rows)], logprobs=[None] * num_rows)
        step = inserted = None
        way = Way.LAUNCHED if self.device_decoding is None else self.device_decoding.way(output.scheduled)
        if self.others is not None:
            step = output.message()
            inserted = self._inserted(step.rows, output.scheduled, result)
            if way is not Way.LAUNCHED:
                self.others.choose(way.value)
            self.others.run(step, inserted)
        with self._watching():
            backends = (self.backend,) if self.drafts is None else (self.backend, *self.drafts.layers.own_backends)
            if output.copies:
                copies = [(copy.src, copy.dst, copy.num_tokens) for copy in output.copies]
                for backend in backends:
                    backend.copy(copies)
            if output.state_copies:
                self.backend.copy_states([(copy.src, copy.dst) for copy in output.state_copies])
            for backend in backends:
                backend.release(output.released)
            if self.blocks is not None:
                self.blocks.restore(output.restores)
        self.sampler.forget(output.finished_seq_ids)
        self.reader.forget(output.finished_seq_ids)
        if self.drafts is not None:
            self.drafts.forget(output.finished_seq_ids)  # also if nobody asks it for drafts any more
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
        add_prompt_logprobs(late, states, self.sampler.make_logprob_table)
        self.reader.read(late, states)
        check_chunks(late, states)
        if not targets:
            return self._unsampled(late, states.hidden)
        if host.prepared.known_tokens:
            settled = host.settled
            targets = [target for target in targets if target.place not in settled]
            for place, target in enumerate(targets):
                target.place = place
        positions = [states.first_tokens[target.index] + target.offset for target in targets]
        if self.greedy is not None and host.prepared.is_plain:
            host.take(self.greedy.likeliest(*states.inputs_of_logits(positions)), result)
            return FinishedStep(result)
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
        if self.drafts is not None:
            self.drafts.ask(rows)
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
        if self.drafts is not None:
            self.drafts.take(ComputedStep(rows, scheduled, batch, hidden, inserted))
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


def _rows(logits: Tensor, places: Sequence[int]) -> Tensor:
    return select_rows(logits, places) if places else logits[:0]


def _nothing(tensor: Tensor) -> Drawn:
    """Return no tokens, on the device of a tensor."""
    return Drawn(tensor.new_empty(0, dtype=torch.int64))
