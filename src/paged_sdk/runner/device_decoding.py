"""Decoding that leaves everything but the choice of rows to the device, so that it never waits for Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define
from torch import Tensor

from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.sampling.device_sampler import DeviceBatch, DeviceSampler, Drawn
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.sequence import Sequence as TokenSequence

__all__ = ["DeviceDecoding"]


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
