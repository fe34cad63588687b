"""Decoding that leaves everything but the choice of rows to the device, so that it never waits for Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.device_sampler import DeviceRow, DeviceSampler
from paged_sdk.runner.handed_on import HandedOn
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["DevicePath"]


class DevicePath:
    """Sampling on the device, tokens that go from step to step without the host, and recorded decode steps.

    :param graphs: recorded steps; None: layers are launched one operation at a time
    """

    def __init__(self, sampler: DeviceSampler, handed_on: HandedOn, graphs: DecodeGraphs | None) -> None:
        self.handed_on = handed_on
        self._sampler = sampler
        self._graphs = graphs
        self._rows: dict[int, DeviceRow] = {}

    def decode(self, scheduled: Sequence[ScheduledSequence]) -> Tensor | None:
        """Run a step by a recorded one.

        :returns: ``[len(scheduled), hidden_size]``, good until the next step; None: there is none that fits
        """
        graphs = self._graphs
        if graphs is None or len(scheduled) > graphs.largest or any(row.num_new_tokens != 1 for row in scheduled):
            return None
        positions = [row.start for row in scheduled]
        sequences = [row.sequence for row in scheduled]
        known = [len(sequence.token_ids) > start for sequence, start in zip(sequences, positions, strict=True)]
        if not any(known):
            places = self.handed_on.places([sequence.seq_id for sequence in sequences])
            return graphs.forward([row.kv_ids for row in scheduled], positions, 0, places)
        unknown = [sequence.seq_id for sequence, is_known in zip(sequences, known, strict=True) if not is_known]
        places_of_unknown = iter(self.handed_on.places(unknown))
        token_ids = [
            row.sequence.token_ids[row.start] if is_known else 0 for row, is_known in zip(scheduled, known, strict=True)
        ]
        sources = [-1 if is_known else next(places_of_unknown) for is_known in known]
        return graphs.forward([row.kv_ids for row in scheduled], positions, token_ids, sources)

    def row_of(self, row: ScheduledSequence) -> DeviceRow | None:
        """By what the device samples for a row; None: the host has to."""
        sequence = row.sequence
        found = self._rows.get(sequence.seq_id)
        if found is None and row.num_samples == 1:
            num_output_tokens = row.end - sequence.num_prompt_tokens
            if DeviceSampler.serves(sequence.sampling, num_output_tokens):
                found = self._rows[sequence.seq_id] = DeviceRow(sequence.sampling, sequence.choice_index)
        return found

    def sample(self, logits: Tensor, scheduled: Sequence[ScheduledSequence], rows: list[DeviceRow]) -> Tensor:
        """Choose a token for each of some rows, and leave them for the next step.

        :param logits: float32 ``[len(rows), vocab_size]``
        :returns: ``[len(rows)]`` int64, on the device; -1: nothing could be chosen
        """
        positions = [row.end - row.sequence.num_prompt_tokens for row in scheduled]
        tokens = self._sampler.sample(logits, rows, positions)
        self.handed_on.put([row.sequence.seq_id for row in scheduled], tokens)
        return tokens

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is kept of sequences that have ended; unknown ones are fine."""
        for seq_id in seq_ids:
            self._rows.pop(seq_id, None)
