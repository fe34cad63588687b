"""Keeps KV without pages, as one growing tensor per sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, layer_scores
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.attention import decode_attention, prefill_attention
from paged_sdk.kernels.attention_inputs import ScoreOptions
from paged_sdk.kernels.relative_bias import RelativeBias
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["ContiguousBackend"]

_MIN_CAPACITY: Final = 64


class ContiguousBackend(AttentionBackend):
    """Keeps the keys and values of each slot (one sequence) in a tensor, ``[num_layers, 2, capacity, num_kv_heads,
    head_dim]``; 1 in place of 2 if keys are the values.

    The capacity doubles when it is full, so growing to n tokens copies fewer than 2n tokens in all.

    :param dtype: dtype of keys and values
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._scores = layer_scores(config, device)
        self._dtype = dtype
        self._device = device
        self._slots: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all slots, unused capacity included."""
        return sum(tensor.nbytes for tensor in self._slots.values())

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """Grow every row's slot to fit the row's tokens, and make the step."""
        for row in rows:
            self._reserve(_slot(row), row.end)
        return _ContiguousStep(self._scores, rows, [self._slots[_slot(row)] for row in rows])

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of slots to other slots."""
        for source, target, num_tokens in copies:
            self._reserve(target, num_tokens)
            self._slots[target][:, :, :num_tokens] = self._slots[source][:, :, :num_tokens]

    def release(self, kv_ids: Iterable[int]) -> None:
        """Free the storage of slots. Ids of slots without storage are ignored."""
        for slot in kv_ids:
            self._slots.pop(slot, None)

    def _reserve(self, slot: int, num_tokens: int) -> None:
        held = self._slots.get(slot)
        if held is not None and held.shape[2] >= num_tokens:
            return
        capacity = max(num_tokens, _MIN_CAPACITY if held is None else 2 * held.shape[2])
        kinds = 1 if self._config.values_are_keys else 2
        shape = (self._config.num_layers, kinds, capacity, self._config.num_kv_heads, self._config.head_dim)
        grown = torch.empty(shape, dtype=self._dtype, device=self._device)
        if held is not None:
            grown[:, :, : held.shape[2]] = held
        self._slots[slot] = grown


class _ContiguousStep(AttentionStep):
    def __init__(self, scores: Sequence[ScoreOptions], rows: Sequence[StepRow], storages: Sequence[Tensor]) -> None:
        self._scores = scores
        self._rows = rows
        self._storages = storages

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        *,
        relative: RelativeBias | None = None,
    ) -> Tensor:
        scores = self._scores[layer].with_learned(sinks, relative)
        outputs: list[Tensor] = []
        token = 0
        for row, storage in zip(self._rows, self._storages, strict=True):
            last = token + row.num_new_tokens
            keys, values = storage[layer, 0], storage[layer, -1]
            keys[row.start : row.end] = key[token:last]
            if storage.shape[1] > 1:
                values[row.start : row.end] = value[token:last]
            first = 0 if scores.window is None else max(0, row.start + 1 - scores.window)
            blocks = None if row.media is None else row.media.blocks_at(row.start, row.end, first)
            seen = slice(first, row.end)
            own = None if blocks is None else torch.from_numpy(blocks).to(query.device)
            outputs.append(
                decode_attention(query[token:last], keys[None, seen], values[None, seen], None, scores)
                if row.num_new_tokens == 1 and own is None and scores.relative is None
                else prefill_attention(query[token:last], keys[seen], values[seen], scores.of_tokens(token, last), own)
            )
            token = last
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _slot(row: StepRow) -> int:
    (slot,) = row.kv_ids
    return slot
