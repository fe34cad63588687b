"""Computes paged attention with the native CPU kernels, which read KV pages in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, AttentionSetup, KvStorage, NativePages
from paged_sdk.attention.decompressed import (
    DecompressedHeads,
    DecompressedRow,
    most_decompressed_bytes,
    pays_to_decompress,
)
from paged_sdk.attention.in_basis import in_basis
from paged_sdk.attention.paged import PagedBackend, new_positions
from paged_sdk.attention.parts_by_form import StepParts, by_form
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.attention_inputs import LearnedScores, Precision
from paged_sdk.kernels.kv_cache import write_slots
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.native.huge_pages import HugePages
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import (
    AttentionShape,
    NativeRows,
    VarlenBatch,
    native_paged_attention,
)
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["NativePagedBackend", "native_storage", "why_not_native"]


def why_not_native(setup: AttentionSetup) -> str | None:
    """Return why the native kernels cannot serve a model, or None if they can."""
    if setup.workspace is None:
        return "they are absent"
    if setup.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its dtype is {setup.dtype}, and the kernels take float32, bfloat16 and float16"
    if setup.model.alibi_slopes:
        return "they have no alibi"
    if setup.model.relative_biases:
        return "they have no relative biases"
    if odd := [str(size) for size in sorted(setup.model.head_dims) if size % 16]:
        return f"its heads have {' and '.join(odd)} elements, and the kernels take multiples of 16"
    return None


def native_storage(setup: AttentionSetup) -> KvStorage:
    """Make the storage of a pool on the CPU, for a setup for which :func:`why_not_native` returns None."""
    workspace = setup.workspace
    assert workspace is not None
    latent, scratch = setup.model.latent, {}
    if latent is not None and setup.decompresses:
        scratch[setup.device] = most_decompressed_bytes(latent, setup.dtype, setup.engine.max_model_len)
    return KvStorage(
        make=partial(
            NativePagedBackend,
            setup.model,
            setup.pool,
            workspace=workspace,
            precision=setup.precision,
            decompresses=setup.decompresses,
        ),
        scratch=scratch,
    )


class NativePagedBackend(PagedBackend):
    """Keeps a pool of KV blocks on the CPU. It takes the arguments of :class:`PagedBackend` and these:

    :param workspace: scratch memory of the calling engine
    :param precision: the lowest precision in which attention may multiply
    :param decompresses: whether prompts attend over keys and values that are made of latent vectors where that pays
    """

    def __init__(
        self,
        config: DecoderConfig,
        settings: PoolSettings,
        num_blocks: int,
        *,
        workspace: Workspace,
        precision: Precision = Precision.FLOAT32,
        decompresses: bool = True,
    ) -> None:
        assert settings.device.type == "cpu", settings.device
        super().__init__(config, settings, num_blocks)
        self._huge_pages = HugePages(workspace.library, [pages for pool in self._pools for pages in pool.pages])
        self._pages = NativePages(
            workspace,
            self._layers,
            tuple(
                AttentionShape(
                    num_heads=config.num_heads,
                    num_kv_heads=cache.num_kv_heads,
                    head_dim=cache.head_dim,
                    scale=scores.scale,
                    window=scores.window,
                    window_reaches_ahead=config.bidirectional,
                    softcap=scores.softcap,
                    precision=precision,
                )
                for cache, scores in zip(self._layers, self._scores, strict=True)
            ),
        )
        self._num_in_order = num_blocks - settings.num_scratch
        latent = config.latent if decompresses else None
        self._decompressing = None if latent is None else DecompressedHeads(latent, workspace, settings.dtype)

    @property
    def native_pages(self) -> NativePages:
        """See :attr:`AttentionBackend.native_pages`."""
        return self._pages

    def view(self, layers: Sequence[int], num_heads: int) -> AttentionBackend:
        """See :meth:`AttentionBackend.view`."""
        other = super().view(layers, num_heads)
        assert isinstance(other, NativePagedBackend), "a copy of this"
        shapes = tuple(evolve(self._pages.shapes[layer], num_heads=num_heads) for layer in layers)
        other._pages = NativePages(self._pages.workspace, other._layers, shapes)
        return other

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """See :meth:`AttentionBackend.prepare`."""
        # A new pool hands out blocks in order of id, so all blocks up to the highest id are in use.
        lasts = (row.kv_ids[-1] for row in rows)
        self._huge_pages.follow(max((last for last in lasts if last < self._num_in_order), default=0))
        parts = by_form(rows, is_bidirectional=self._config.bidirectional)
        arrays, firsts = self._varlen(parts.rows), parts.bidirectional_from
        prompts = [] if self._decompressing is None else self._prompts(parts)
        marks = [prompt is not None for prompt in prompts]
        batch = VarlenBatch(
            cu_seqlens_q=torch.from_numpy(arrays.cu_seqlens_q),
            block_tables=torch.from_numpy(arrays.block_tables),
            context_lens=torch.from_numpy(arrays.context_lens),
            in_chunks=parts.marks,
            bidirectional_from=torch.tensor(firsts, dtype=torch.int32) if max(firsts) >= 0 else None,
            decompressed=torch.tensor(marks, dtype=torch.uint8) if any(marks) else None,
        )
        slots = torch.from_numpy(arrays.slot_mapping)
        native_rows = NativeRows(slots, batch, parts.num_generating, parts.cu_seqlens_read)
        positions = None if self._max_positions is None else self._where_offsets(new_positions(rows))
        if self._decompressing is not None and any(marks):
            decompressed = [prompt for prompt in prompts if prompt is not None]
            return _DecompressingStep(self._pages, native_rows, positions, self._decompressing, decompressed)
        return in_basis(_NativePagedStep(self._pages, native_rows, positions), self._layers)

    def _prompts(self, parts: StepParts) -> list[DecompressedRow | None]:
        """Return for each part of the step its place if it attends over decompressed keys, else None: causal prompts do
        for which it pays. This depends on the number of its tokens in the step, unlike :func:`by_form`'s choice.
        """
        latent, first = self._config.latent, 0
        assert latent is not None
        found: list[DecompressedRow | None] = []
        for part, is_prompt, seen_by_all in zip(parts.rows, parts.in_chunks, parts.bidirectional_from, strict=True):
            last = first + part.num_new_tokens
            pays = is_prompt and seen_by_all < 0 and pays_to_decompress(latent, part.num_new_tokens, part.end)
            found.append(DecompressedRow(first, last, self._tensor(self._slots(part, 0))) if pays else None)
            first = last
        return found


class _NativePagedStep(AttentionStep):
    def __init__(self, pages: NativePages, rows: NativeRows, positions: Tensor | None) -> None:
        self._pages = pages
        self._rows = rows
        self._positions = positions

    @property
    def native_rows(self) -> NativeRows:
        return self._rows

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        write_slots(key, value, self._pages.caches[layer], self._rows.slots, self._positions)

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        assert learned is None or learned.relative is None, "not chosen for models with relative biases"
        pages, sinks = self._pages, None if learned is None else learned.sinks
        cache = pages.caches[layer]
        return native_paged_attention(pages.workspace, query, cache, self._rows.batch, pages.shapes[layer], sinks=sinks)


class _DecompressingStep(_NativePagedStep):
    """Attends with some prompts over keys and values of heads, and with all other rows over latent vectors.

    :param prompts: these prompts, at least one, which the rows' batch marks
    """

    def __init__(
        self,
        pages: NativePages,
        rows: NativeRows,
        positions: Tensor | None,
        decompressing: DecompressedHeads,
        prompts: Sequence[DecompressedRow],
    ) -> None:
        super().__init__(pages, rows, positions)
        self._decompressing = decompressing
        self._prompts = prompts

    @cached_property
    def _others(self) -> tuple[Tensor, VarlenBatch] | None:
        """Return the indices of the other rows' tokens, and these rows; None: there are none. Whole layers in native
        calls do not ask for them.
        """
        marks = self._rows.batch.decompressed
        assert marks is not None
        return None if marks.all() else self._rows.batch.part(~marks.bool())

    def attend_over_latents(
        self, layer: int, rotated: Tensor, unrotated: Tensor, key: Tensor, heads: LatentHeads, rotation: Rotation
    ) -> Tensor:
        if not heads.decompresses:
            return super().attend_over_latents(layer, rotated, unrotated, key, heads, rotation)
        pages, new = self._pages, key[:, None]
        cache, shape = pages.caches[layer], pages.shapes[layer]
        rotation.rotate_(rotated)
        rotation.rotate_(new)
        self.write(layer, new, new)
        out = rotated.new_empty(len(rotated), heads.num_heads, heads.value_dim)
        for prompt in self._prompts:
            self._decompressing.attend(prompt, rotated, unrotated, cache, heads, shape, out)
        if self._others is not None:
            tokens, batch = self._others
            rope_dim = rotated.shape[-1]
            query = rotated.new_empty(len(tokens), heads.num_heads, key.shape[-1])
            query[..., :rope_dim] = rotated[tokens]
            heads.absorb(unrotated[tokens], query[..., rope_dim:])
            attended = native_paged_attention(pages.workspace, query, cache, batch, shape)
            out[tokens] = heads.values(attended[..., rope_dim:])
        return out
