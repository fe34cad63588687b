"""Decoding that leaves everything but the choice of rows to the device, so that it never waits for Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from attrs import define
from torch import Tensor

from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.sampling.device_sampler import DeviceBatch, DeviceSampler, Drawn
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.types.step import AWAITED, StepRow

__all__ = ["DeviceDecoding", "Way"]


class Way(Enum):
    """How a step is run on a device. :meth:`DeviceDecoding.way` decides."""

    REPEATED = "repeated"
    """By a recording, and sampled as the step before: its rows are the same, each with the token that it got there.
    Nothing about them has to be found out again. Most steps are such."""
    RECORDED = "recorded"
    """Its layers by a recording: every row has one token."""
    LAUNCHED = "launched"
    """One operation at a time."""


class DeviceDecoding:
    """Sampling on the device, tokens that go from step to step without the host, and recorded decode steps.

    :param sampler: of the device
    :param overlap: where tokens are handed on
    :param graphs: recorded steps; None: layers are launched one operation at a time
    """

    def __init__(self, sampler: DeviceSampler, overlap: OverlapTokens, graphs: DecodeGraphs | None) -> None:
        self.overlap = overlap
        self._sampler = sampler
        self._graphs = graphs
        self._last: _Batch | None = None

    def way(self, scheduled: Sequence[ScheduledSequence]) -> Way:
        """Decide how a step is run."""
        graphs, last = self._graphs, self._last
        if graphs is None or len(scheduled) > graphs.largest:
            return Way.LAUNCHED
        if any(row.num_new_tokens != 1 for row in scheduled):
            return Way.LAUNCHED
        if last is None or [row.sequence for row in scheduled] != last.sequences:
            return Way.RECORDED
        # A row that was preempted meanwhile begins elsewhere.
        return Way.REPEATED if [row.start for row in scheduled] == last.next_positions else Way.RECORDED

    def repeat(self, scheduled: Sequence[ScheduledSequence], model: CausalModel) -> Drawn:
        """Run and sample a whole step of the way :attr:`Way.REPEATED`.

        :returns: what it samples, as of :meth:`sample`
        """
        last = self._last
        assert self._graphs is not None, "no step is recorded"
        assert last is not None, "there is no step to repeat"
        hidden = self._graphs.forward(
            [row.sequence.seq_id for row in scheduled],
            [row.sequence.table.version for row in scheduled],
            [row.kv_ids for row in scheduled],
            last.next_positions,
            None,
            range(len(scheduled)),
        )
        logits = model.logits(hidden)
        last.next_positions = [position + 1 for position in last.next_positions]
        return self._draw(logits, last)

    def decode(self, rows: Sequence[StepRow]) -> Tensor:
        """Run the layers of a step of the way :attr:`Way.RECORDED`.

        :returns: ``[len(rows), hidden_size]``, good until the next step
        """
        assert self._graphs is not None, "no step is recorded"
        awaited = [row.seq_id for row in rows if row.token_ids[0] == AWAITED]
        places = dict(zip(awaited, self.overlap.places(awaited), strict=True))
        return self._graphs.forward(
            [row.seq_id for row in rows],
            [row.kv_version for row in rows],
            [row.kv_ids for row in rows],
            [row.start for row in rows],
            [max(row.token_ids[0], 0) for row in rows],
            [places.get(row.seq_id, -1) for row in rows],
        )

    def serves(self, row: SampleRow) -> bool:
        """Whether the device can sample a row."""
        return self._sampler.serves(row)

    def sample(self, logits: Tensor, scheduled: Sequence[ScheduledSequence], rows: Sequence[SampleRow]) -> Drawn:
        """Choose a token for each of some rows, and leave the tokens for the next step.

        :param logits: float32 ``[len(rows), vocab_size]``; contents are lost
        :param rows: of ``scheduled``, all of them served
        """
        self._last = _Batch(
            sequences=[row.sequence for row in scheduled],
            seq_ids=[row.seq_id for row in rows],
            sampled=self._sampler.begin(rows),
            next_positions=[row.end for row in scheduled],
        )
        return self._draw(logits, self._last)

    def warm_up(self, model: CausalModel) -> None:
        """Compile what follows a recorded step, so that no request waits for that."""
        if self._graphs is not None:
            self._sampler.warm_up(model.logits(self._graphs.hidden[:1]))

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is kept of sequences that have ended; unknown ones are fine."""
        self._sampler.forget(seq_ids)

    def _draw(self, logits: Tensor, batch: _Batch) -> Drawn:
        drawn = self._sampler.sample(logits, batch.sampled)
        self.overlap.put(batch.seq_ids, drawn.tokens)
        return drawn


@define(kw_only=True, eq=False)
class _Batch:
    """The rows that tokens were last handed on of.

    :ivar sampled: the same rows as the sampler knows them
    :ivar next_positions: where the next step's tokens are
    """

    sequences: list[TokenSequence]
    seq_ids: list[int]
    sampled: DeviceBatch
    next_positions: list[int]
