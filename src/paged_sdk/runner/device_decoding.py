"""Decoding that leaves everything but the choice of rows to the device, so that it never waits for Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.runner.sampled_step import Drawn
from paged_sdk.sampling.device_logprobs import LogprobRows
from paged_sdk.sampling.device_penalties import DevicePenalties, StepPenalties
from paged_sdk.sampling.device_sampler import DeviceRow, DeviceSampler
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.sequence import Sequence as TokenSequence

__all__ = ["DeviceDecoding"]


class DeviceDecoding:
    """Sampling on the device, tokens that go from step to step without the host, and recorded decode steps.

    :param graphs: recorded steps; None: layers are launched one operation at a time
    """

    def __init__(
        self, sampler: DeviceSampler, penalties: DevicePenalties, overlap: OverlapTokens, graphs: DecodeGraphs | None
    ) -> None:
        self.overlap = overlap
        self._sampler = sampler
        self._penalties = penalties
        self._graphs = graphs
        self._rows: dict[int, DeviceRow] = {}
        self._last: _Batch | None = None

    def go_on(self, scheduled: Sequence[ScheduledSequence], model: CausalModel) -> Drawn | None:
        """Run a whole step, if its rows are those of the last one, each with the token that it got there.

        Most steps are such: nothing about their rows has to be found out again.

        :returns: what it samples, as of :meth:`sample`; None: it is no such step, and has not begun
        """
        last, graphs = self._last, self._graphs
        if last is None or graphs is None or [row.sequence for row in scheduled] != last.sequences:
            return None
        # A row that was preempted meanwhile begins elsewhere.
        positions = [row.start for row in scheduled]
        if positions != last.next_positions:
            return None
        places = range(len(positions))
        logits = model.logits(graphs.forward([row.kv_ids for row in scheduled], positions, None, places))
        last.next_positions = [position + 1 for position in positions]
        last.num_output_tokens = [number + 1 for number in last.num_output_tokens]
        return self._draw(logits, last)

    def decode(self, scheduled: Sequence[ScheduledSequence]) -> Tensor | None:
        """Run the layers of a step by a recorded one.

        :returns: ``[len(scheduled), hidden_size]``, good until the next step; None: there is none that fits
        """
        graphs = self._graphs
        if graphs is None or len(scheduled) > graphs.largest or any(row.num_new_tokens != 1 for row in scheduled):
            return None
        unknown = [row.sequence.seq_id for row in scheduled if row.end > len(row.sequence.token_ids)]
        places = dict(zip(unknown, self.overlap.places(unknown), strict=True))
        sources = [places.get(row.sequence.seq_id, -1) for row in scheduled]
        token_ids = [
            row.sequence.token_ids[row.start] if source < 0 else 0
            for row, source in zip(scheduled, sources, strict=True)
        ]
        return graphs.forward([row.kv_ids for row in scheduled], [row.start for row in scheduled], token_ids, sources)

    def row_of(self, row: ScheduledSequence) -> DeviceRow | None:
        """By what the device samples for a row; None: the host has to."""
        sequence = row.sequence
        found = self._rows.get(sequence.seq_id)
        if row.draft_token_ids:
            return None  # how many of them are accepted, the host finds out
        if found is None and row.num_samples == 1:
            num_output_tokens = row.end - sequence.num_prompt_tokens
            if DeviceSampler.serves(sequence.request.sampling, num_output_tokens):
                found = self._rows[sequence.seq_id] = DeviceRow(sequence.request.sampling, sequence.choice_index)
        return found

    def sample(self, logits: Tensor, scheduled: Sequence[ScheduledSequence], rows: list[DeviceRow]) -> Drawn:
        """Choose a token for each of some rows, and leave the tokens for the next step.

        :param logits: float32 ``[len(rows), vocab_size]``; contents are lost
        """
        self._last = _Batch(
            sequences=[row.sequence for row in scheduled],
            seq_ids=[row.sequence.seq_id for row in scheduled],
            rows=rows,
            next_positions=[row.end for row in scheduled],
            num_output_tokens=[row.end - row.sequence.num_prompt_tokens for row in scheduled],
            penalties=self._penalties.of_step(scheduled),
            logprobs=_logprob_rows(scheduled),
        )
        return self._draw(logits, self._last)

    def warm_up(self, model: CausalModel) -> None:
        """Compile what follows a recorded step, so that no request waits for that."""
        if self._graphs is None:
            return
        for sampling in (SamplingParams.deterministic(), SamplingParams(temperature=1.0, top_k=8, top_p=0.9, seed=0)):
            logits = model.logits(self._graphs.hidden[:1])
            self._penalties.warm_up(logits)
            self._sampler.sample(logits, [DeviceRow(sampling, choice_index=0)], [0])

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is kept of sequences that have ended; unknown ones are fine."""
        for seq_id in seq_ids:
            self._rows.pop(seq_id, None)
            self._penalties.forget(seq_id)

    def _draw(self, logits: Tensor, batch: _Batch) -> Drawn:
        rows = batch.logprobs
        all_logprobs = None if rows is None else rows.all_logprobs(logits)
        if batch.penalties is not None:
            self._penalties.lower(logits, batch.penalties)
        tokens = self._sampler.sample(logits, batch.rows, batch.num_output_tokens)
        if batch.penalties is not None:
            self._penalties.count(batch.penalties, tokens)
        self.overlap.put(batch.seq_ids, tokens)
        if rows is None or all_logprobs is None:
            return Drawn(tokens)
        return Drawn(tokens, (rows, rows.look_up(all_logprobs, tokens)))


@define(kw_only=True, eq=False)
class _Batch:
    """The rows that tokens were last handed on of.

    :ivar next_positions: where the next step's tokens are
    :ivar num_output_tokens: of each text, before the token that was sampled
    :ivar penalties: None: no row has any
    :ivar logprobs: None: no row asks for any
    """

    sequences: list[TokenSequence]
    seq_ids: list[int]
    rows: list[DeviceRow]
    next_positions: list[int]
    num_output_tokens: list[int]
    penalties: StepPenalties | None
    logprobs: LogprobRows | None


def _logprob_rows(scheduled: Sequence[ScheduledSequence]) -> LogprobRows | None:
    top_ns = {
        index: row.sequence.request.sampling.top_n_logprobs
        for index, row in enumerate(scheduled)
        if row.sequence.request.sampling.top_n_logprobs is not None
    }
    return LogprobRows(list(top_ns), list(top_ns.values())) if top_ns else None
