"""Computes paged attention with Triton kernels on CUDA devices. Requires Triton to be installed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionSetup, KvStorage
from paged_sdk.attention.block_tables import BlockTables
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import LayerCache, LearnedScores, PagedRows, ScoreOptions
from paged_sdk.kernels.flash_prefill import PrefillRows
from paged_sdk.kernels.key_offsets import subtract_key_offsets
from paged_sdk.kernels.prefill_choice import PagedPrefill, PrefillShape, faster_for_prefill
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.kernels.transfer import to_device
from paged_sdk.kernels.triton.availability import num_multiprocessors
from paged_sdk.kernels.triton.kv_cache import copy_blocks, reshape_and_cache
from paged_sdk.kernels.triton.paged_attention import paged_attention
from paged_sdk.kernels.triton.rotary import rotate_and_cache
from paged_sdk.kernels.triton.split_plan import most_partial_bytes
from paged_sdk.logs import get_logger
from paged_sdk.types.step import StepRow

__all__ = ["TritonPagedBackend", "TritonPagedStep", "choose_prefills", "triton_storage"]

_log = get_logger(__name__)

_MAX_NUM_SEQS: Final = 32


def triton_storage(setup: AttentionSetup) -> KvStorage:
    """Make the storage of a pool on a CUDA device. Log which kernels compute prefill attention."""
    model, engine = setup.model, setup.engine
    prefills = choose_prefills(model, setup.pool)
    for shape, choice in {each.shape: each for each in prefills}.items():
        of_what = "prompts" if shape.window is None else f"prompts in windows of {shape.window} tokens"
        _log.info("Attention of %s: %s.", of_what, choice)
    # Layers with larger heads may need less: they are divided into fewer splits.
    of_splits = max(
        most_partial_bytes(
            num_tokens=engine.max_num_batched_tokens,
            num_heads=model.num_heads,
            value_dim=head_dim - model.key_only,
            max_context_len=engine.max_model_len,
            multiprocessors=num_multiprocessors(setup.device),
        )
        for head_dim in model.head_dims
    )
    return KvStorage(
        make=partial(
            TritonPagedBackend,
            model,
            setup.pool,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len,
            prefills=prefills,
        ),
        scratch={setup.device: max(of_splits, *(choice.most_gathered_bytes for choice in prefills))},
    )


def choose_prefills(config: DecoderConfig, settings: PoolSettings) -> tuple[PagedPrefill, ...]:
    """Time prefill kernels and choose the faster, for each layer. Takes some milliseconds and 100 MB of device memory
    for each shape of layers.
    """
    shapes = [
        PrefillShape(
            num_heads=config.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=settings.block_size,
            dtype=settings.dtype,
            device=settings.device,
            scale=config.attention_scale,
            window=window,
            softcap=config.attention_softcap,
            quantized=settings.cache_type is PagedCacheType.F8E4M3,
            values_are_keys=config.values_are_keys,
        )
        for layer, window in zip(map(config.layer, range(config.num_layers)), config.sliding_windows, strict=True)
    ]
    chosen = {shape: faster_for_prefill(shape) for shape in dict.fromkeys(shapes)}
    return tuple(chosen[shape] for shape in shapes)


class TritonPagedBackend(PagedBackend):
    """Keeps a pool of KV blocks on a CUDA device.

    A step makes one or two copies to the device and launches two kernels per layer, without waiting for any of them. It
    calls the launchers directly, since dispatching a custom op takes as long as a launch.

    It takes the arguments of :class:`PagedBackend` and these:

    :param max_num_seqs: maximum number of rows in a step
    :param max_model_len: maximum number of tokens in a sequence; None: the model's context
    :param prefills: by layer, the alternative to Triton for prompt chunks; see :func:`choose_prefills`; empty: none
    """

    def __init__(
        self,
        config: DecoderConfig,
        settings: PoolSettings,
        num_blocks: int,
        *,
        max_num_seqs: int = _MAX_NUM_SEQS,
        max_model_len: int | None = None,
        prefills: Sequence[PagedPrefill] = (),
    ) -> None:
        super().__init__(config, settings, num_blocks)
        width = -(-(max_model_len or config.max_position) // settings.block_size)
        self._tables = BlockTables(max_num_seqs, width, settings.device)
        self._step_layers = _Layers(config.num_heads, self._layers, self._scores, tuple(prefills))

    def prepare(self, rows: Sequence[StepRow]) -> TritonPagedStep:
        """See :meth:`AttentionBackend.prepare`. FlashAttention serves chunks only if all rows of one token precede
        them."""
        counts = np.array([row.num_new_tokens for row in rows])
        ends = np.array([row.end for row in rows])
        starts_of_next = counts.cumsum()
        num_decodes = len(rows) if counts.max() == 1 else int((counts != 1).argmax())
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        seats, lengths, cu_seqlens, prefill_cu_seqlens, token_row, position = to_device(
            self._device,
            self._tables.place(
                [row.seq_id for row in rows], [row.kv_version for row in rows], [row.kv_ids for row in rows]
            ),
            ends.astype(np.int32),
            np.concatenate(([0], starts_of_next)).astype(np.int32),
            np.concatenate(([0], starts_of_next[num_decodes:] - num_decodes)).astype(np.int32),
            row_of_token,
            np.arange(len(row_of_token)) + (ends - starts_of_next)[row_of_token],
        )
        longest = int(ends.max())
        tables = self._tables.tensor[:, : -(-longest // self._block_size)].index_select(0, seats)
        prefills = None
        if num_decodes < len(rows):
            prefills = _Prefills(
                num_decodes,
                PrefillRows(
                    PagedRows(
                        block_tables=tables[num_decodes:],
                        context_lens=lengths[num_decodes:],
                        cu_seqlens_q=prefill_cu_seqlens,
                        max_seqlen_q=int(counts.max()),
                        max_context_len=int(ends[num_decodes:].max()),
                    ),
                    block_size=self._block_size,
                    num_tokens=len(row_of_token) - num_decodes,
                    total_context_len=int(ends[num_decodes:].sum()),
                    begin_sequences=not (ends - counts)[num_decodes:].any(),
                ),
            )
        return TritonPagedStep(
            self._step_layers,
            slot_mapping=self._slots_of(tables[token_row, position // self._block_size], position),
            positions=position,
            rows=PagedRows(
                block_tables=tables,
                context_lens=lengths,
                cu_seqlens_q=cu_seqlens,
                max_seqlen_q=int(counts.max()),
                max_context_len=longest,
            ),
            prefills=prefills,
        )

    @property
    def decode_backend(self) -> TritonPagedBackend:
        """See :attr:`AttentionBackend.decode_backend`."""
        return self

    def seats(
        self, seq_ids: Sequence[int], versions: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.int64]:
        """See :meth:`BlockTables.place`."""
        return self._tables.place(seq_ids, versions, tables)

    @property
    def empty_seat(self) -> int:
        """Return the seat of padding rows."""
        return self._tables.padding_seat

    def decode(self, seats: Tensor, positions: Tensor, max_context_len: int) -> TritonPagedStep:
        """Make a step of rows with one token each. Its indices are computed on the device, so a CUDA graph can record
        it.

        :param seats: ``[num_rows]`` int64: seats returned by :meth:`seats`
        :param positions: ``[num_rows]`` int64: positions of the tokens; below 0: the row is padding, nothing is written
            for it and its result is 0
        :param max_context_len: an upper bound that all positions are below
        """
        tables = self._tables.tensor[:, : -(-max_context_len // self._block_size)].index_select(0, seats)
        block = positions.clamp(min=0) // self._block_size
        slots = self._slots_of(tables.gather(1, block[:, None])[:, 0], positions)
        return TritonPagedStep(
            self._step_layers,
            slot_mapping=slots.where(positions >= 0, -1),
            positions=positions,
            rows=PagedRows(
                block_tables=tables,
                context_lens=(positions + 1).int(),
                cu_seqlens_q=torch.arange(len(seats) + 1, dtype=torch.int32, device=self._device),
                max_seqlen_q=1,
                max_context_len=max_context_len,
            ),
        )

    def mixed(
        self,
        seats: Tensor,
        context_lens: Tensor,
        cu_seqlens: Tensor,
        row_of_token: Tensor,
        positions: Tensor,
        *,
        max_context_len: int,
    ) -> TritonPagedStep:
        """Make a step of rows whose lengths and indices are on the device, so a CUDA graph can record it. Triton
        kernels serve all rows. Nothing is written for padding tokens, and their results are 0.

        See :meth:`DecodeBackend.mixed`.
        """
        tables = self._tables.tensor[:, : -(-max_context_len // self._block_size)].index_select(0, seats)
        slots = self._slots_of(tables[row_of_token, positions.clamp(min=0) // self._block_size], positions)
        return TritonPagedStep(
            self._step_layers,
            slot_mapping=slots.where(positions >= 0, -1),
            positions=positions,
            rows=PagedRows(
                block_tables=tables,
                context_lens=context_lens,
                cu_seqlens_q=cu_seqlens,
                max_seqlen_q=len(positions),
                max_context_len=max_context_len,
            ),
        )

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole blocks of all layers with one size of blocks in one launch, and their scales in another."""
        (pairs,) = to_device(self._device, np.array([(source, target) for source, target, _ in copies]))
        copy_blocks(self.block_tensors, pairs)

    def _slots_of(self, block: Tensor, position: Tensor) -> Tensor:
        return block.long() * self._block_size + position % self._block_size


@frozen(eq=False)
class _Layers:
    """Holds what the steps of a backend need to compute its layers.

    :ivar num_heads: query heads of each layer
    :ivar caches: the pages of each layer
    :ivar scores: the score options of each layer
    :ivar prefills: by layer, the alternative to Triton for prompt chunks; empty: none
    """

    num_heads: int
    caches: Sequence[LayerCache]
    scores: Sequence[ScoreOptions]
    prefills: Sequence[PagedPrefill]


@frozen(eq=False)
class _Prefills:
    """Describes the rows of a step that have several tokens.

    :ivar first: index of the first such row and of its first token (equal, since all rows before it have one token)
    """

    first: int
    rows: PrefillRows


class TritonPagedStep(AttentionStep):
    """Computes attention for one step of a :class:`TritonPagedBackend`.

    :param layers: the backend's layers
    :param slot_mapping: ``[num_tokens]`` int64: slots that the tokens' keys and values are written to; negative: none
    :param positions: ``[num_tokens]`` int64, the position of each token in its sequence
    :param rows: all rows of the step
    :param prefills: rows that FlashAttention may serve instead of Triton; None: no such rows
    """

    def __init__(
        self,
        layers: _Layers,
        *,
        slot_mapping: Tensor,
        positions: Tensor,
        rows: PagedRows,
        prefills: _Prefills | None = None,
    ) -> None:
        self._layers = layers
        self._slot_mapping = slot_mapping
        self._positions = positions
        self._rows = rows
        self._prefills = prefills

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See :meth:`AttentionStep.write`."""
        cache = self._layers.caches[layer]
        stored = key
        if cache.key_offsets is not None:
            stored = subtract_key_offsets(key, cache.key_offsets, self._positions.clamp(min=0))
        reshape_and_cache(stored, value, cache.key, cache.value, self._slot_mapping, cache.k_scale, cache.v_scale)

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        """See :meth:`AttentionStep.attend`. Triton serves prompt chunks, too: FlashAttention takes their new keys."""
        return paged_attention(query, self._layers.caches[layer], self._rows, self._scores(layer, learned))

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, learned: LearnedScores | None = None
    ) -> Tensor:
        """See :meth:`AttentionStep.forward`."""
        self.write(layer, key, value)
        return self._attend_with_new(layer, query, key, value, learned)

    def rotate_and_forward(
        self, layer: int, query_key: Tensor, value: Tensor, rotation: Rotation, learned: LearnedScores | None = None
    ) -> Tensor:
        """See :meth:`AttentionStep.rotate_and_forward`. Rotation and KV write are one launch."""
        query, key = query_key[:, : self._layers.num_heads], query_key[:, self._layers.num_heads :]
        cache = self._layers.caches[layer]
        rotate_and_cache(
            query, key, value, rotation.cosines, rotation.sines, cache, self._slot_mapping, self._positions
        )
        return self._attend_with_new(layer, query, key, value, learned)

    def _attend_with_new(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, learned: LearnedScores | None
    ) -> Tensor:
        """Attend like :meth:`attend`, with FlashAttention for prompt chunks where it suits."""
        cache, scores = self._layers.caches[layer], self._scores(layer, learned)
        rows, prefills = self._rows, self._prefills
        choice = self._layers.prefills[layer] if self._layers.prefills else None
        # FlashAttention supports neither sinks nor ALiBi.
        needs_own = scores.sinks is not None or scores.alibi_slopes is not None
        if needs_own or prefills is None or choice is None or not choice.suits(prefills.rows):
            return paged_attention(query, cache, rows, scores)
        first = prefills.first
        output = query.new_empty(query.shape)
        if first:
            decodes = PagedRows(
                block_tables=rows.block_tables[:first],
                context_lens=rows.context_lens[:first],
                cu_seqlens_q=rows.cu_seqlens_q[: first + 1],
                max_seqlen_q=1,
                max_context_len=rows.max_context_len,
            )
            paged_attention(query[:first], cache, decodes, scores, out=output[:first])
        choice(query[first:], key[first:], value[first:], cache, prefills.rows, out=output[first:])
        return output

    def _scores(self, layer: int, learned: LearnedScores | None) -> ScoreOptions:
        assert learned is None or learned.relative is None, "not chosen for models with relative biases"
        return self._layers.scores[layer].with_learned(learned)
