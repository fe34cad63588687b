"""Decodes on a device, where only the choice of rows is left to the host, so that it never waits for Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from attrs import define
from torch import Tensor

from paged_sdk.kernels.lora_slots import AdapterSlots
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.sampling.device_sampler import DeviceBatch, DeviceSampler, Drawn
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.step import AWAITED, StepRow

__all__ = ["DeviceDecoding", "Way"]


class Way(Enum):
    """Says how a step is run on a device. :meth:`DeviceDecoding.way` decides."""

    REPEATED = "repeated"
    """A recorded graph runs it, and it is sampled like the step before: it has the same rows, each with the token that
    it got there, so nothing about them has to be worked out again. Most steps are like this."""
    RECORDED = "recorded"
    """A recorded graph runs its layers: every row has one token."""
    LAUNCHED = "launched"
    """Its operations are launched one at a time."""


class DeviceDecoding:
    """Runs recorded decode steps and samples on the device; tokens go from step to step without the host.

    :param sampler: chooses tokens on the device
    :param overlap: keeps the sampled tokens on the device for the next step
    :param graphs: recorded steps; None: layers are launched one operation at a time
    :param slots: where recorded steps find the adapters of their rows; None: they know no adapters
    """

    def __init__(
        self,
        sampler: DeviceSampler,
        overlap: OverlapTokens,
        graphs: DecodeGraphs | None,
        slots: AdapterSlots | None = None,
    ) -> None:
        self.overlap = overlap
        self._slots = slots
        self._sampler = sampler
        self._graphs = graphs
        self._last: _Batch | None = None

    def way(self, scheduled: Sequence[ScheduledSequence]) -> Way:
        """Decide how a step is run."""
        graphs, last = self._graphs, self._last
        if graphs is None or len(scheduled) > graphs.largest:
            return Way.LAUNCHED
        # The last token of its text, which is sampled, alone says by its position how long the text is.
        # What was recorded takes a token's place in its sequence as its position.
        if any(
            row.num_new_tokens != 1
            or not row.num_samples
            or ((request := row.sequence.request).adapter is not None and not self._holds(request.adapter))
            or (request.media is not None and request.media.positions is not None)
            for row in scheduled
        ):
            return Way.LAUNCHED
        if last is None or [row.sequence for row in scheduled] != last.sequences:
            return Way.RECORDED
        # A row that was preempted meanwhile starts at another position.
        return Way.REPEATED if [row.start for row in scheduled] == last.next_positions else Way.RECORDED

    def repeat(self, scheduled: Sequence[ScheduledSequence], model: CausalModel) -> Drawn:
        """Run and sample a whole step of the way :attr:`Way.REPEATED`.

        :returns: the sampled tokens, as :meth:`sample` returns them
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
            last.places,
        )
        logits = model.logits(hidden)
        last.next_positions = [position + 1 for position in last.next_positions]
        return self._draw(logits, last)

    def decode(self, rows: Sequence[StepRow]) -> Tensor:
        """Run the layers of a step of the way :attr:`Way.RECORDED`.

        :returns: ``[len(rows), hidden_size]``, valid until the next step
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
            [self._adapter_place(row.adapter, row.adapter_start <= row.start) for row in rows],
        )

    def serves(self, row: SampleRow) -> bool:
        """Say whether the device can sample a row."""
        return self._sampler.serves(row)

    def sample(self, logits: Tensor, scheduled: Sequence[ScheduledSequence], rows: Sequence[SampleRow]) -> Drawn:
        """Choose a token for each of some rows, and keep the tokens on the device for the next step.

        :param logits: float32 ``[len(rows), vocab_size]``; overwritten
        :param rows: the rows of ``scheduled``, each of which :meth:`serves` accepts
        """
        self._last = _Batch(
            sequences=[row.sequence for row in scheduled],
            seq_ids=[row.seq_id for row in rows],
            sampled=self._sampler.begin(rows),
            next_positions=[row.end for row in scheduled],
            places=[self._next_place(row) for row in scheduled],
        )
        return self._draw(logits, self._last)

    def warm_up(self, model: CausalModel) -> None:
        """Compile the kernels that run after a recorded step, so that no request waits for that."""
        if self._graphs is not None:
            self._sampler.warm_up(model.logits(self._graphs.hidden[:1]))

    def forget_step(self) -> None:
        """Repeat nothing: the last step has failed somewhere on its way."""
        self._last = None

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended; unknown ids are allowed."""
        self._sampler.forget(seq_ids)

    def _holds(self, adapter: AdapterUse) -> bool:
        """Say whether recorded steps find an adapter."""
        return self._slots is not None and self._slots.place(adapter.number) is not None

    def _adapter_place(self, number: int | None, is_adapted: bool) -> int:
        place = None if self._slots is None or number is None or not is_adapted else self._slots.place(number)
        return -1 if place is None else place

    def _next_place(self, row: ScheduledSequence) -> int:
        """Return the place of the adapter that the token after a row goes through."""
        request = row.sequence.request
        number = None if request.adapter is None else request.adapter.number
        return self._adapter_place(number, request.adapter_start <= row.end)

    def _draw(self, logits: Tensor, batch: _Batch) -> Drawn:
        drawn = self._sampler.sample(logits, batch.sampled)
        self.overlap.put(batch.seq_ids, drawn.tokens)
        return drawn


@define(kw_only=True, eq=False)
class _Batch:
    """Holds the rows of the last step whose tokens were kept on the device.

    :ivar sampled: the same rows as the sampler keeps them
    :ivar next_positions: the positions of the next step's tokens
    :ivar places: of the adapters that these go through, in the slots; -1: none
    """

    sequences: list[TokenSequence]
    seq_ids: list[int]
    sampled: DeviceBatch
    next_positions: list[int]
    places: list[int]
