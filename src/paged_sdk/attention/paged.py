"""Keeps KV in fixed-size blocks of one pool, addressed by block tables (Kwon et al., 2023, arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from hashlib import sha256
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, layer_scores
from paged_sdk.attention.in_basis import in_basis
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import OutOfMemoryError
from paged_sdk.kernels.attention_inputs import LayerCache, LearnedScores, ScoreOptions
from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.kv_cache import copy_block, write_slots
from paged_sdk.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["PagedBackend", "new_positions"]

# Decodes of similar context length are batched together: padding to the longest at most doubles the gathered keys, and
# a group's gathered copies stay small compared to the pool. Below 256 keys, launching another group costs more than the
# padding.
_SHORT_CONTEXT: Final = 256
_MAX_GROUP_KEYS: Final = 65_536

_Slots = npt.NDArray[np.int64]


class PagedBackend(AttentionBackend):
    """Keeps a pool of KV blocks for all layers.

    Blocks are never cleared: contents of unused slots, including NaN, do not affect results.

    :param num_blocks: number of blocks in the pool
    :raises OutOfMemoryError: the pool cannot be allocated
    :raises ConfigError: the settings' key offsets or bases do not fit
    """

    def __init__(self, config: DecoderConfig, settings: PoolSettings, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._config = config
        self._scores = layer_scores(config, settings.device)
        self._block_size = settings.block_size
        self._device = settings.device
        self._windows = tuple(dict.fromkeys(config.sliding_windows))
        try:
            if settings.device.type == "cpu" and config.window is None:
                # Up to Qwen3-4B's context of 262,144 tokens, offsets take 302 MB; of a pool of 16,384 tokens, 19 MB.
                # With windows, a sequence may be longer than the pool; devices try steps of any length over one block.
                settings = settings.up_to(num_blocks * settings.block_size)
            own = {
                layer: settings.pages(
                    place,
                    num_blocks,
                    shape.num_kv_heads,
                    shape.head_dim,
                    values_are_keys=config.values_are_keys,
                    key_only=config.key_only,
                )
                for place, (layer, shape) in enumerate((layer, config.layer(layer)) for layer in config.kv_layers)
            }
        except RuntimeError as error:
            needed = int(num_blocks * settings.block_size * config.kv_elements_per_token * settings.bytes_per_element)
            raise OutOfMemoryError(
                f"cannot allocate {num_blocks} KV blocks of {settings.block_size} tokens: {needed} bytes", needed=needed
            ) from error
        self._layers = tuple(own[config.kv_layer(layer)] for layer in range(config.num_layers))
        self._pools = tuple(own.values())  # each once, though several layers may attend over it
        self._max_positions = len(settings.key_offsets[0]) * KEY_SPAN if settings.key_offsets else None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the pool, scales included."""
        return sum(tensor.nbytes for tensor in self.block_tensors)

    @property
    def block_tensors(self) -> Sequence[Tensor]:
        """See :attr:`AttentionBackend.block_tensors`."""
        return [tensor for pool in self._pools for tensor in pool.tensors]

    @property
    def code(self) -> bytes:
        """See :attr:`AttentionBackend.code`. Of the offsets, those of the first span suffice: they show all vectors."""
        measured = []
        for pool in self._pools:
            if pool.key_offsets is not None:
                measured.append(pool.key_offsets[:1])
            if pool.basis is not None:
                measured.append(pool.basis.factors)
        return sha256(b"".join(each.cpu().numpy().tobytes() for each in measured)).digest() if measured else b""

    @property
    def windows(self) -> Sequence[int | None]:
        """See :attr:`AttentionBackend.windows`."""
        return self._windows

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """See :meth:`AttentionBackend.prepare`."""
        slot_mapping = self._new_slots(rows)
        plans = {window: self._plan(rows, window) for window in self._windows}
        positions = self._where_offsets(new_positions(rows))
        step = _PagedStep(self._scores, self._layers, self._tensor(slot_mapping), positions, plans)
        return in_basis(step, self._layers)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole blocks, including unused slots."""
        for pool in self._pools:
            for source, target, _ in copies:
                copy_block(pool.tensors, source, target)

    def release(self, kv_ids: Iterable[int]) -> None:
        """Do nothing: the pool stays allocated, and the KV manager tracks free blocks."""

    def view(self, layers: Sequence[int], num_heads: int) -> AttentionBackend:
        """See :meth:`AttentionBackend.view`."""
        other = copy(self)
        other._layers = tuple(self._layers[layer] for layer in layers)
        other._scores = tuple(self._scores[layer] for layer in layers)
        return other

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _varlen(self, rows: Sequence[StepRow]) -> _VarlenArrays:
        """Make the arrays from which kernels find rows and their blocks."""
        ends = [row.end for row in rows]
        tables = np.zeros((len(rows), -(-max(ends) // self._block_size)), dtype=np.int32)
        for table, row in zip(tables, rows, strict=True):
            used = -(-row.end // self._block_size)
            table[:used] = row.kv_ids[:used]
        lengths = [row.num_new_tokens for row in rows]
        return _VarlenArrays(
            slot_mapping=self._new_slots(rows),
            cu_seqlens_q=np.array([0, *accumulate(lengths)], dtype=np.int32),
            block_tables=tables,
            context_lens=np.array(ends, dtype=np.int32),
        )

    def _new_slots(self, rows: Sequence[StepRow]) -> _Slots:
        """Return the slot of each new token."""
        size = self._block_size
        if any(row.num_new_tokens != 1 for row in rows):
            return np.concatenate([self._slots(row, row.start) for row in rows])
        # With cold caches, numpy operations per row would take 10 us each row.
        return np.array([row.kv_ids[row.start // size] * size + row.start % size for row in rows], dtype=np.int64)

    def _where_offsets(self, positions: npt.NDArray[np.int64]) -> Tensor | None:
        """Return positions on the device if the pool has key offsets, else None."""
        if self._max_positions is None:
            return None
        assert positions.max() < self._max_positions, (positions.max(), self._max_positions)
        return self._tensor(positions)

    def _slots(self, row: StepRow, first: int) -> _Slots:
        """Return the slots of a row's positions from ``first`` to the row's end."""
        position = np.arange(first, row.end)
        table = np.asarray(row.kv_ids, dtype=np.int64)
        return table[position // self._block_size] * self._block_size + position % self._block_size

    def _plan(self, rows: Sequence[StepRow], window: int | None) -> _WindowPlan:
        """Find the slots of the keys that layers with this sliding window read."""
        prefills: list[_PrefillRow] = []
        decode_tokens: list[int] = []
        decode_keys: list[_Keys] = []
        token = 0
        for row in rows:
            first = 0 if window is None else max(0, row.start + 1 - window)
            blocks = None if row.media is None else row.media.blocks_at(row.start, row.end, first)
            keys = _Keys(self._slots(row, first), np.arange(first, row.end))
            if row.num_new_tokens == 1 and blocks is None and not self._config.relative_biases:
                decode_tokens.append(token)
                decode_keys.append(keys)
            else:
                slots, positions = self._tensor(keys.slots), self._where_offsets(keys.positions)
                blocks_there = None if blocks is None else self._tensor(blocks)
                prefills.append(_PrefillRow(token, token + row.num_new_tokens, slots, positions, blocks_there))
            token += row.num_new_tokens
        groups = _group_by_length([len(keys.slots) for keys in decode_keys])
        if len(groups) == 1 and not prefills:
            return _WindowPlan(batch=self._decode_group(decode_keys))
        decodes = tuple(
            (
                self._tensor(np.array([decode_tokens[index] for index in group])),
                self._decode_group([decode_keys[index] for index in group]),
            )
            for group in groups
        )
        return _WindowPlan(decodes=decodes, prefills=tuple(prefills))

    def _decode_group(self, rows: Sequence[_Keys]) -> _DecodeGroup:
        lengths = np.array([len(row.slots) for row in rows])
        longest = int(lengths.max())
        # Padded with the row's newest slot, which holds valid data: this step writes it.
        filled = np.minimum(np.arange(longest), lengths[:, None] - 1)
        slots, positions = (
            np.stack([numbers[index] for numbers, index in zip(each, filled, strict=True)])
            for each in ([row.slots for row in rows], [row.positions for row in rows])
        )
        mask = None if int(lengths.min()) == longest else self._tensor(np.arange(longest) < lengths[:, None])
        return _DecodeGroup(self._tensor(slots), self._where_offsets(positions), mask)


@frozen(kw_only=True)
class _VarlenArrays:
    """Holds arrays with the shapes and dtypes that :func:`paged_sdk.kernels.paged_attention.paged_attention` takes."""

    slot_mapping: _Slots
    cu_seqlens_q: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]


@frozen
class _Keys:
    """Holds the slots of the keys that a row attends to, and their positions in the row."""

    slots: _Slots
    positions: npt.NDArray[np.int64]


@frozen
class _PrefillRow:
    """Describes a chunk of one sequence: its tokens ``first`` to ``last`` (exclusive) of the step, and its keys' slots.

    :ivar positions: the positions of the keys, if the pool has key offsets
    :ivar blocks: which keys attend to one another bidirectionally, if any do
    """

    first: int
    last: int
    slots: Tensor
    positions: Tensor | None
    blocks: Tensor | None = None


@frozen
class _DecodeGroup:
    """Holds decodes of similar context length, in the form that :func:`paged_decode_attention` takes."""

    slots: Tensor
    positions: Tensor | None
    mask: Tensor | None


@frozen(kw_only=True)
class _WindowPlan:
    """Holds how layers with one window compute a step.

    :ivar batch: all rows as one decode group; None: see the others
    :ivar decodes: decode groups, each with the indices of its tokens in the step
    :ivar prefills: prompt chunks
    """

    batch: _DecodeGroup | None = None
    decodes: tuple[tuple[Tensor, _DecodeGroup], ...] = ()
    prefills: tuple[_PrefillRow, ...] = ()


class _PagedStep(AttentionStep):
    def __init__(
        self,
        scores: Sequence[ScoreOptions],
        layers: Sequence[LayerCache],
        slot_mapping: Tensor,
        positions: Tensor | None,
        plans: dict[int | None, _WindowPlan],
    ) -> None:
        self._scores = scores
        self._layers = layers
        self._slot_mapping = slot_mapping
        self._positions = positions
        self._plans = plans

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        write_slots(key, value, self._layers[layer], self._slot_mapping, self._positions)

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        cache, scores = self._layers[layer], self._scores[layer].with_learned(learned)
        plan = self._plans[scores.window]
        if plan.batch is not None:
            return _decode(cache, plan.batch, query, scores)
        output = query.new_empty(query.shape)
        for tokens, group in plan.decodes:
            output.index_copy_(0, tokens, _decode(cache, group, query.index_select(0, tokens), scores))
        for row in plan.prefills:
            tokens_of_row = slice(row.first, row.last)
            output[tokens_of_row] = paged_prefill_attention(
                query[tokens_of_row], cache, row.slots, scores.of_tokens(row.first, row.last), row.positions, row.blocks
            )
        return output


def _decode(cache: LayerCache, group: _DecodeGroup, query: Tensor, scores: ScoreOptions) -> Tensor:
    return paged_decode_attention(query, cache, group.slots, group.mask, scores, group.positions)


def new_positions(rows: Sequence[StepRow]) -> npt.NDArray[np.int64]:
    """Return the position of each new token in its sequence, ``[num_tokens]`` int64."""
    if all(row.num_new_tokens == 1 for row in rows):
        return np.array([row.start for row in rows], dtype=np.int64)
    return np.concatenate([np.arange(row.start, row.end) for row in rows])


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Split indices into groups of similar length, so that padding a group costs little; indices ascend in a group."""
    groups: list[list[int]] = []
    shortest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        if not groups or length > 2 * shortest + _SHORT_CONTEXT or (len(groups[-1]) + 1) * length > _MAX_GROUP_KEYS:
            groups.append([])
            shortest = length
        groups[-1].append(index)
    return [sorted(group) for group in groups]
