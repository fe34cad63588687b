"""Chooses the next tokens of a batch on a device: launches processors, logprobs and the draw without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from attrs import define, frozen
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.sampling.device_draw import DeviceDraw, DeviceRow
from paged_sdk.sampling.device_logprobs import LogprobRows, LogprobTensors
from paged_sdk.sampling.processor import ALL_TOKENS, DeviceProcessor, Processor
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.truncation import is_greedy, num_candidates
from paged_sdk.scheduler.request import Request

__all__ = ["DeviceBatch", "DeviceSampler", "Drawn"]

_COPIES_OF_LOGITS: Final = 4
_ALIGNMENT: Final = 16


@frozen(eq=False)
class Drawn:
    """Holds the tokens that were chosen on the device.

    :ivar tokens: ``[num_rows]`` int64; -1: no token could be chosen
    :ivar logprobs: the rows that ask for logprobs, and their logprobs; None: no row does
    """

    tokens: Tensor
    logprobs: tuple[LogprobRows, LogprobTensors] | None = None


@define(eq=False)
class DeviceBatch:
    """Holds rows that are sampled together, step by step.

    :ivar num_output_tokens: how many tokens each text has before the one to choose
    :ivar steps: what each processor that some row needs has prepared for the rows
    :ivar logprobs: the rows that ask for logprobs; None: no row does
    """

    rows: list[DeviceRow]
    num_output_tokens: list[int]
    steps: list[tuple[DeviceProcessor[Any], Any]]
    logprobs: LogprobRows | None

    @property
    def takes_likeliest(self) -> bool:
        """Say whether all that is wanted of each row is the token with the largest logit."""
        return self.logprobs is None and not self.steps and all(row.is_greedy for row in self.rows)


class DeviceSampler:
    """Chooses tokens on the device, as :class:`~paged_sdk.sampling.sampler.Sampler` does on the host.

    :param processors: all of them, in order; those that have no form on the device leave their rows to the host
    :param max_num_seqs: the most rows that a step has
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
        self._rows: dict[int, DeviceRow] = {}

    @staticmethod
    def num_bytes(processors: Iterable[Processor[Any]], max_num_seqs: int, vocab_size: int) -> int:
        """Return how many bytes of a device a sampler keeps, and what a step takes beside its logits: rows of them for
        the host and for the device apart, a copy that the host changes, and for logprobs the rows that ask for them,
        before and after the softmax.
        """
        kept = sum(processor.device_bytes(max_num_seqs, vocab_size) for processor in processors)
        return kept + _COPIES_OF_LOGITS * max_num_seqs * vocab_size * torch.float32.itemsize

    def serves(self, row: SampleRow) -> bool:
        """Say whether a row can be sampled here. It can if it has one sample, its step verifies no drafts (the host
        counts the accepted ones), and no processor that needs the host applies to its token.
        """
        if row.num_samples != 1 or row.num_drafts:
            return False
        # A text that no longer needs the host never does again, so one that was sampled here stays here.
        return row.seq_id in self._rows or self._num_needing_host(row.request) <= row.num_output_tokens

    def num_on_host(self, request: Request) -> int:
        """Return how many tokens of a text, from the first on, the host may choose, so that drafts of them may be
        verified: those that need the host, or all where it chooses the same ones.
        """
        params = request.sampling
        if is_greedy(params) or not num_candidates(params, self._vocab_size):
            return ALL_TOKENS
        return self._num_needing_host(request)

    def _num_needing_host(self, request: Request) -> int:
        return max((processor.applies_until(request) for processor in self._on_host), default=0)

    def begin(self, rows: Sequence[SampleRow]) -> DeviceBatch:
        """Prepare a step, and the following ones with the same rows, each with one more token.

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
        """Choose a token for each row, and append it to the batch's state.

        :param logits: float32 ``[len(batch.rows), vocab_size]``, columns adjacent; overwritten
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
        """Choose, of a batch that takes the likeliest tokens, those that a recorded step has found."""
        batch.num_output_tokens = [number + 1 for number in batch.num_output_tokens]
        return Drawn(likeliest)

    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernels that are launched, so that no request waits for that.

        Rows after those that the host samples are a view of a step's logits. Unless rows are a multiple of 16 bytes, it
        begins where Triton compiles kernels anew: 49,155 numbers are 12 more than one.

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
            self._draw.draw(logits, [DeviceRow(params, choice_index=0)] * num_rows, [0] * num_rows)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended; unknown ids are allowed."""
        for seq_id in seq_ids:
            self._rows.pop(seq_id, None)
            for processor in self._processors:
                processor.forget(seq_id)

    def _row(self, row: SampleRow) -> DeviceRow:
        found = self._rows.get(row.seq_id)
        if found is None:
            found = self._rows[row.seq_id] = DeviceRow(row.request.sampling, row.choice_index)
        return found


def _logprob_rows(rows: Sequence[SampleRow]) -> LogprobRows | None:
    top_ns = {
        index: row.request.sampling.top_n_logprobs
        for index, row in enumerate(rows)
        if row.request.sampling.top_n_logprobs is not None
    }
    return LogprobRows(list(top_ns), list(top_ns.values())) if top_ns else None
