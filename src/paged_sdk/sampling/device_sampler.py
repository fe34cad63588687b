"""Samples the next tokens of a batch on a device: launches processors, logprobs and the draw without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from attrs import define, frozen
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.sampling.device_draw import DeviceDraw
from paged_sdk.sampling.device_logprobs import LogprobRows, LogprobTensors
from paged_sdk.sampling.processor import ALL_TOKENS, DeviceProcessor, Processor
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sequence_settings import SequenceSettings
from paged_sdk.sampling.truncation import is_greedy, num_candidates
from paged_sdk.scheduler.request import Request

__all__ = ["DeviceBatch", "DeviceSampler", "Drawn"]

_COPIES_OF_LOGITS: Final = 4
"""Copies of a step's logits at once, at most: the rows separated for host and device (one), those that the host changes
(one), and the rows with logprobs before and after the softmax (two)."""
_ALIGNMENT: Final = 16


@frozen(eq=False)
class Drawn:
    """Holds the tokens chosen on the device.

    :ivar tokens: ``[num_rows]`` int64; -1: no token could be chosen
    :ivar logprobs: the rows with logprobs, and their logprobs; None: no row has any
    """

    tokens: Tensor
    logprobs: tuple[LogprobRows, LogprobTensors] | None = None


@define(eq=False)
class DeviceBatch:
    """Holds rows that are sampled together in one step or several consecutive ones.

    :ivar num_output_tokens: the number of output tokens of each sequence before the token to choose
    :ivar steps: each processor that some row needs, with what its ``begin`` returned
    :ivar logprobs: the rows with logprobs; None: no row has any
    """

    rows: list[SequenceSettings]
    num_output_tokens: list[int]
    steps: list[tuple[DeviceProcessor[Any], Any]]
    logprobs: LogprobRows | None

    @property
    def takes_likeliest(self) -> bool:
        """Tell whether an argmax of the raw logits is enough: every row is greedy, without processors or logprobs."""
        return self.logprobs is None and not self.steps and all(row.is_greedy for row in self.rows)


class DeviceSampler:
    """Samples tokens on the device, as :class:`~paged_sdk.sampling.sampler.Sampler` does on the host.

    :param processors: all logits processors, in order; rows that need one without a :class:`DeviceProcessor` are
        sampled on the host
    :param max_num_seqs: the largest number of rows in a step
    :param vocab_size: columns of the logits
    :param device: the device of the logits
    """

    def __init__(
        self, processors: Sequence[Processor[Any]], max_num_seqs: int, vocab_size: int, device: torch.device
    ) -> None:
        forms = [(each, each.on_device(max_num_seqs, vocab_size, device)) for each in processors]
        self._processors = [form for _, form in forms if form is not None]
        self._on_host = [processor for processor, form in forms if form is None]
        self._draw = DeviceDraw(device, vocab_size)
        self._vocab_size = vocab_size
        self._rows: dict[int, SequenceSettings] = {}

    @staticmethod
    def num_bytes(processors: Iterable[Processor[Any]], max_num_seqs: int, vocab_size: int) -> int:
        """Return how many bytes of device memory sampling takes beyond the logits: the state of the processors, and
        within a step up to four copies of the logits.
        """
        kept = sum(processor.device_bytes(max_num_seqs, vocab_size) for processor in processors)
        return kept + _COPIES_OF_LOGITS * max_num_seqs * vocab_size * torch.float32.itemsize

    def serves(self, row: SampleRow) -> bool:
        """Tell whether a row can be sampled on the device: it has one sample, its step verifies no drafts (the host
        counts accepted drafts), and no processor that runs only on the host applies to its token.
        """
        if row.num_samples != 1 or row.num_drafts:
            return False
        # A sequence that no longer needs the host never needs it again, so once sampled here it stays here.
        return row.seq_id in self._rows or self._num_needing_host(row.request) <= row.num_output_tokens

    def num_on_host(self, request: Request) -> int:
        """Return up to which output token of a sequence the host may sample, so that drafts may be verified: all tokens
        if host and device choose the same ones, otherwise those that need the host.
        """
        params = request.sampling
        if is_greedy(params) or not num_candidates(params, self._vocab_size):
            return ALL_TOKENS
        return self._num_needing_host(request)

    def _num_needing_host(self, request: Request) -> int:
        return max((processor.applies_until(request) for processor in self._on_host), default=0)

    def begin(self, rows: Sequence[SampleRow]) -> DeviceBatch:
        """Prepare a step, and the following steps of the same rows, each with one more token.

        :param rows: rows that :meth:`serves` accepts
        """
        steps = [(processor, processor.begin(rows)) for processor in self._processors]
        return DeviceBatch(
            rows=[self._row(row) for row in rows],
            num_output_tokens=[row.num_output_tokens for row in rows],
            steps=[(processor, step) for processor, step in steps if step is not None],
            logprobs=_logprob_rows(rows),
        )

    def sample(self, logits: Tensor, batch: DeviceBatch) -> Drawn:
        """Sample a token for each row, and advance the batch's state by it.

        :param logits: float32 ``[len(batch.rows), vocab_size]``, last dimension contiguous; overwritten
        """
        rows = batch.logprobs
        all_logprobs = None if rows is None else rows.all_logprobs(logits)
        for processor, step in batch.steps:
            processor.apply(logits, step)
        tokens = self._draw.draw(logits, batch.rows, batch.num_output_tokens)
        for processor, step in batch.steps:
            processor.advance(step, tokens)
        batch.num_output_tokens = [number + 1 for number in batch.num_output_tokens]
        if rows is None or all_logprobs is None:
            return Drawn(tokens)
        return Drawn(tokens, (rows, rows.look_up(all_logprobs, tokens)))

    def take(self, likeliest: Tensor, batch: DeviceBatch) -> Drawn:
        """Take the argmax that a recorded step has computed, and advance the batch, if it :attr:`takes_likeliest`."""
        batch.num_output_tokens = [number + 1 for number in batch.num_output_tokens]
        return Drawn(likeliest)

    def warm_up(self, logits: Tensor) -> None:
        """Compile all sampling kernels, so that no request waits for compilation.

        The device's rows may be a view of the step's logits, after the rows that the host samples. If a row is not a
        multiple of 16 bytes (49,155 logits are 12 bytes more), such a view is not 16-byte aligned, and Triton compiles
        the kernels a second time for it.

        :param logits: as for :meth:`sample`; overwritten
        """
        self._launch_all(logits)
        if logits.shape[1] * logits.itemsize % _ALIGNMENT:
            self._launch_all(torch.cat([logits[:1], logits])[1:])

    def _launch_all(self, logits: Tensor) -> None:
        num_rows = len(logits)
        for processor in self._processors:
            processor.warm_up(logits)
        for params in (SamplingParams.deterministic(), SamplingParams(temperature=1.0, top_k=8, top_p=0.9, seed=0)):
            self._draw.draw(logits, [SequenceSettings(params, choice_index=0)] * num_rows, [0] * num_rows)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended; unknown ids are allowed."""
        for seq_id in seq_ids:
            self._rows.pop(seq_id, None)
            for processor in self._processors:
                processor.forget(seq_id)

    def _row(self, row: SampleRow) -> SequenceSettings:
        found = self._rows.get(row.seq_id)
        if found is None:
            found = self._rows[row.seq_id] = SequenceSettings(row.request.sampling, row.choice_index)
        return found


def _logprob_rows(rows: Sequence[SampleRow]) -> LogprobRows | None:
    top_ns = {
        index: row.request.sampling.top_n_logprobs
        for index, row in enumerate(rows)
        if row.request.sampling.top_n_logprobs is not None
    }
    return LogprobRows(list(top_ns), list(top_ns.values())) if top_ns else None
