"""Runs recorded steps and samples on the device, so that decoding never waits for the host: it only selects rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from attrs import define, field
from torch import Tensor

from paged_sdk.kernels.lora_slots import AdapterSlots
from paged_sdk.kernels.side_stream import SideStream
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.live_compilations import LiveCompilations
from paged_sdk.runner.mixed_graphs import LONGEST_CHUNK_CONTEXT, MixedGraphs
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.runner.step_results import Recorded
from paged_sdk.sampling.device_sampler import DeviceBatch, DeviceSampler, Drawn
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.step import AWAITED, StepRow

__all__ = ["DeviceDecoding", "Way"]

_MOST_WITHHELD: Final = 1
"""Maximum number of withheld rows per row sampled on the device. With more, all rows wait for the host.

A withheld sequence gets a token in every second step. If half of the sequences are withheld, steps yield three quarters
of the tokens, which pays if sampling on the host takes at least a third of the device's time: some 30 rows with masks
in a step of 10 ms. The fewer sequences are withheld, the less is lost.
"""


class Way(Enum):
    """Says how a step is run on a device. :meth:`DeviceDecoding.way` decides."""

    REPEATED = "repeated"
    """A recorded graph runs the step, with the rows and sampling settings of the step before and the tokens that it
    sampled: nothing has to be prepared again. Most steps are like this."""
    RECORDED = "recorded"
    """A recorded graph runs the layers: every row has one token."""
    MIXED = "mixed"
    """A recorded graph runs the layers: some rows are chunks of prompts, or have drafts."""
    LAUNCHED = "launched"
    """Operations are launched one at a time (eager)."""


class DeviceDecoding:
    """Runs recorded steps and samples on the device; tokens pass from step to step without the host.

    :param sampler: samples on the device
    :param overlap: keeps the sampled tokens on the device for the next step
    :param graphs: recorded decode steps; None: decodes are launched one operation at a time
    :param mixed: recorded steps whose rows have any number of tokens; None: only decodes are recorded
    :param slots: table in which recorded steps find the adapters of their rows; None: rows with adapters are launched
    :ivar beside: the side stream on which host-sampled rows are sampled while the next step runs
    :ivar compilations: detects kernels that are compiled during a step; None: nothing is compiled
    """

    def __init__(
        self,
        sampler: DeviceSampler,
        overlap: OverlapTokens,
        graphs: DecodeGraphs | None,
        mixed: MixedGraphs | None = None,
        slots: AdapterSlots | None = None,
    ) -> None:
        self.overlap = overlap
        self.beside: SideStream = SideStream(overlap.tokens.device)
        self.compilations: LiveCompilations | None = None
        self._slots = slots
        self._sampler = sampler
        self._graphs = graphs
        self._mixed = mixed
        self._last: _Batch | None = None
        self._num_withheld = self._num_withheld_before = 0
        self._is_recorded = False

    def way(self, scheduled: Sequence[ScheduledSequence]) -> Way:
        """Decide how a step is run. Call this first, for every step."""
        self._num_withheld_before, self._num_withheld = self._num_withheld, 0
        way = self._choose(scheduled)
        self._is_recorded = way is not Way.LAUNCHED
        return way

    def _choose(self, scheduled: Sequence[ScheduledSequence]) -> Way:
        if not scheduled:
            return Way.LAUNCHED
        last, graphs = self._last, self._graphs
        are_decodes = (
            graphs is not None
            and len(scheduled) <= graphs.largest
            and {row.num_new_tokens for row in scheduled} == {1}
            and 0 not in {row.num_samples for row in scheduled}
        )
        if (
            are_decodes
            and last is not None
            and last.is_recorded  # a decode row stays recordable
            and [row.sequence for row in scheduled] == last.sequences
            # A sequence that was preempted meanwhile starts at another position.
            and [row.start for row in scheduled] == last.next_positions
        ):
            return Way.REPEATED
        for row in scheduled:
            request = row.sequence.request
            is_plain = request.adapter is None and request.media is None and not row.sequence.is_long
            if not is_plain and not self._is_recordable(row):
                return Way.LAUNCHED
        if are_decodes:
            return Way.RECORDED
        return Way.MIXED if self._is_mixed(scheduled) else Way.LAUNCHED

    def repeat(self, scheduled: Sequence[ScheduledSequence]) -> Drawn:
        """Run and sample a step in the way :attr:`Way.REPEATED`.

        :returns: the sampled tokens, as :meth:`sample` returns them
        """
        last = self._last
        assert self._graphs is not None, "no step is recorded"
        assert last is not None, "there is no step to repeat"
        recorded = self._graphs.forward(
            [row.sequence.seq_id for row in scheduled],
            [row.sequence.table.version for row in scheduled],
            [row.kv_ids for row in scheduled],
            last.next_positions,
            None,
            range(len(scheduled)),
            last.places,
        )
        last.next_positions = [position + 1 for position in last.next_positions]
        return self._draw(recorded.logits, last, recorded.likeliest)

    def run(self, way: Way, rows: Sequence[StepRow]) -> tuple[Recorded, Sequence[int]]:
        """Run the layers of a step in the way :attr:`Way.RECORDED` or :attr:`Way.MIXED`.

        :returns: the results, and the index of each row's first token
        """
        self._last = None  # the step overwrites the tokens of the last one
        awaited = [row.seq_id for row in rows if row.token_ids[-1] == AWAITED]
        found = dict(zip(awaited, self.overlap.places(awaited), strict=True))
        sources = [found.get(row.seq_id, -1) for row in rows]
        if way is Way.MIXED:
            assert self._mixed is not None, "no step with chunks of prompts is recorded"
            return self._mixed.forward(rows, sources, [self._adapter_place(row.adapter) for row in rows])
        assert self._graphs is not None, "no step is recorded"
        recorded = self._graphs.forward(
            [row.seq_id for row in rows],
            [row.kv_version for row in rows],
            [row.kv_ids for row in rows],
            [row.start for row in rows],
            [max(row.token_ids[0], 0) for row in rows],
            sources,
            [self._adapter_place(row.adapter, is_adapted=row.adapter_start <= row.start) for row in rows],
        )
        return recorded, range(len(rows))

    def serves(self, row: SampleRow) -> bool:
        """Tell whether the device can sample a row."""
        return self._sampler.serves(row)

    def sample(
        self,
        logits: Tensor,
        scheduled: Sequence[ScheduledSequence],
        rows: Sequence[SampleRow],
        likeliest: Tensor | None = None,
    ) -> Drawn:
        """Sample a token for each row, and keep the tokens on the device for the next step.

        :param logits: float32 ``[len(rows), vocab_size]``; overwritten
        :param rows: the rows of ``scheduled``; :meth:`serves` must accept each
        :param likeliest: the likeliest tokens as left by a recorded step of exactly these rows; None: not known
        """
        self._last = _Batch(
            sequences=[row.sequence for row in scheduled],
            seq_ids=[row.seq_id for row in rows],
            sampled=self._sampler.begin(rows),
            next_positions=[row.end for row in scheduled],
            places=[self._next_place(row) for row in scheduled],
            is_recorded=self._is_recorded,
        )
        return self._draw(logits, self._last, likeliest)

    def num_on_host(self, request: Request) -> int:
        """Return the number of first output tokens of a request that may be sampled on the host."""
        return self._sampler.num_on_host(request)

    def may_withhold(self, num_rows: int, num_drawn: int) -> bool:
        """Decide whether the step withholds its host-sampled rows, so that the next step runs without them while the
        host samples. If this returns True, the step must withhold them.

        :param num_rows: number of rows that the host samples
        :param num_drawn: number of rows that the device samples
        """
        # Rows withheld by the step in flight count too: they alternate with these.
        if not num_rows or num_rows + self._num_withheld_before > _MOST_WITHHELD * num_drawn:
            return False
        self._num_withheld = num_rows
        return True

    def warm_up(self, logits: Tensor) -> None:
        """Compile the sampling kernels, so that no request waits for that.

        :param logits: float32, one row as wide as the vocabulary; overwritten
        """
        self._sampler.warm_up(logits)

    def forget_step(self) -> None:
        """Forget the last step, which has failed: the next one does not repeat it."""
        self._last = None

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended; unknown ids are allowed."""
        self._sampler.forget(seq_ids)

    def _holds(self, adapter: AdapterUse) -> bool:
        """Tell whether recorded steps can use an adapter: it has a slot."""
        return self._slots is not None and self._slots.place(adapter.number) is not None

    def _is_recordable(self, row: ScheduledSequence) -> bool:
        """Tell whether a recorded step can contain a row, apart from its number of tokens."""
        sequence, request = row.sequence, row.sequence.request
        if request.adapter is not None and not self._holds(request.adapter):
            return False
        # Recorded steps use the token's index in its sequence as its position, and embed every token by its id.
        media = request.media
        if media is not None and (media.positions is not None or row.start < sequence.num_prompt_tokens):
            return False
        # LongRoPE's frequencies follow from the sequence length, which only the last token's position tells.
        return not sequence.is_long or (row.num_new_tokens == 1 and bool(row.num_samples))

    def _is_mixed(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Tell whether a recorded mixed step fits rows that are each recordable."""
        return (
            self._mixed is not None
            and sum(row.num_new_tokens for row in scheduled) <= self._mixed.largest
            and all(row.num_new_tokens == 1 or row.end <= LONGEST_CHUNK_CONTEXT for row in scheduled)
        )

    def _adapter_place(self, number: int | None, *, is_adapted: bool = True) -> int:
        place = None if self._slots is None or number is None or not is_adapted else self._slots.place(number)
        return -1 if place is None else place

    def _next_place(self, row: ScheduledSequence) -> int:
        """Return the slot of the adapter that applies to the token after a row; -1: none."""
        request = row.sequence.request
        number = None if request.adapter is None else request.adapter.number
        return self._adapter_place(number, is_adapted=request.adapter_start <= row.end)

    def _draw(self, logits: Tensor, batch: _Batch, likeliest: Tensor | None) -> Drawn:
        if likeliest is not None and batch.takes_likeliest:
            self.overlap.found(batch.seq_ids)
            return self._sampler.take(likeliest, batch.sampled)
        drawn = self._sampler.sample(logits, batch.sampled)
        self.overlap.put(batch.seq_ids, drawn.tokens)
        return drawn


@define(kw_only=True, eq=False)
class _Batch:
    """Holds the rows of the last step whose tokens were kept on the device.

    :ivar sampled: the sampler's batch of these rows
    :ivar next_positions: the positions of the next step's tokens
    :ivar places: adapter slots of the next step's tokens; -1: none
    :ivar is_recorded: whether the step was run by a recorded graph
    :ivar takes_likeliest: see :attr:`~paged_sdk.sampling.device_sampler.DeviceBatch.takes_likeliest`
    """

    sequences: list[TokenSequence]
    seq_ids: list[int]
    sampled: DeviceBatch
    next_positions: list[int]
    places: list[int]
    is_recorded: bool
    takes_likeliest: bool = field(init=False)

    @takes_likeliest.default
    def _takes_likeliest(self) -> bool:
        return self.sampled.takes_likeliest
