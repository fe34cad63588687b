"""Keeps KV without pages, as one growing tensor per sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Final

import torch
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, layer_scores
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.attention import decode_attention, prefill_attention
from paged_sdk.kernels.attention_inputs import LearnedScores, ScoreOptions
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["ContiguousBackend"]

_MIN_CAPACITY: Final = 64


class ContiguousBackend(AttentionBackend):
    """Keeps the keys and values of each slot (one sequence) in a tensor, ``[num_layers, 2, capacity, num_kv_heads,
    head_dim]``, or in one for each shape of heads, of the layers that have it; 1 in place of 2 if keys are the values.

    The capacity doubles when it is full, so growing to n tokens copies fewer than 2n tokens in all.

    :param dtype: dtype of keys and values
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._scores = layer_scores(config, device)
        self._dtype = dtype
        self._device = device
        shapes = {layer: config.layer(layer) for layer in config.kv_layers}
        alike: dict[tuple[int, int], list[int]] = {}
        for layer, shape in shapes.items():
            alike.setdefault((shape.num_kv_heads, shape.head_dim), []).append(layer)
        self._heads = [(len(layers), heads) for heads, layers in alike.items()]
        # Of each layer: the number of its tensor, and its number there.
        own = {layer: (kind, layers.index(layer)) for kind, layers in enumerate(alike.values()) for layer in layers}
        self._places = [own[config.kv_layer(layer)] for layer in range(config.num_layers)]
        self._slots: dict[int, list[Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all slots, unused capacity included."""
        return sum(tensor.nbytes for tensors in self._slots.values() for tensor in tensors)

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """Grow every row's slot to fit the row's tokens, and make the step."""
        for row in rows:
            self._reserve(_slot(row), row.end)
        return _ContiguousStep(self._scores, rows, self._places, [self._slots[_slot(row)] for row in rows])

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of slots to other slots, as far as there is KV of them: a layer that drafts may have
        computed fewer tokens than the model, or none.
        """
        for source, target, num_tokens in copies:
            held = self._slots.get(source)
            if held is None:
                continue
            num_tokens = min(num_tokens, held[0].shape[2])
            self._reserve(target, num_tokens)
            for there, here in zip(self._slots[target], held, strict=True):
                there[:, :, :num_tokens] = here[:, :, :num_tokens]

    def release(self, kv_ids: Iterable[int]) -> None:
        """Free the storage of slots. Ids of slots without storage are ignored."""
        for slot in kv_ids:
            self._slots.pop(slot, None)

    def view(self, layers: Sequence[int], num_heads: int) -> AttentionBackend:
        """See :meth:`AttentionBackend.view`."""
        other = copy(self)
        other._scores = tuple(self._scores[layer] for layer in layers)
        other._places = [self._places[layer] for layer in layers]
        return other

    def _reserve(self, slot: int, num_tokens: int) -> None:
        held = self._slots.get(slot)
        now = 0 if held is None else held[0].shape[2]
        if num_tokens <= now:
            return
        capacity = max(num_tokens, 2 * now or _MIN_CAPACITY)
        kinds = 1 if self._config.values_are_keys else 2
        grown = [
            torch.empty(num_layers, kinds, capacity, *heads, dtype=self._dtype, device=self._device)
            for num_layers, heads in self._heads
        ]
        for there, here in zip(grown, held or (), strict=held is not None):
            there[:, :, :now] = here
        self._slots[slot] = grown


class _ContiguousStep(AttentionStep):
    def __init__(
        self,
        scores: Sequence[ScoreOptions],
        rows: Sequence[StepRow],
        places: Sequence[tuple[int, int]],
        storages: Sequence[Sequence[Tensor]],
    ) -> None:
        self._scores = scores
        self._rows = rows
        self._places = places
        self._storages = storages

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        token = 0
        for row, storage in self._rows_of(layer):
            last = token + row.num_new_tokens
            storage[0, row.start : row.end] = key[token:last]
            if len(storage) > 1:
                storage[1, row.start : row.end] = value[token:last]
            token = last

    def _rows_of(self, layer: int) -> Iterator[tuple[StepRow, Tensor]]:
        """Return each row with its keys, and its values if they are not the keys, of a layer."""
        kind, place = self._places[layer]
        return ((row, storage[kind][place]) for row, storage in zip(self._rows, self._storages, strict=True))

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        scores = self._scores[layer].with_learned(learned)
        outputs: list[Tensor] = []
        token = 0
        for row, storage in self._rows_of(layer):
            last = token + row.num_new_tokens
            keys, values = storage[0], storage[-1]
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
