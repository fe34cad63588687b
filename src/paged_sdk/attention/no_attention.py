"""Stands in for attention in models that have none, whose memory is the states of their recurrent layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, NativePages
from paged_sdk.attention.parts_by_form import by_form
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import NativeRows, VarlenBatch, cumulated
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["NoAttention"]


class NoAttention(AttentionBackend):
    """Keeps no keys and values, on any device, paged or not.

    :param workspace: of the native CPU kernels, which compute a step in one call; None: they do not
    """

    def __init__(self, workspace: Workspace | None = None) -> None:
        self._pages = None if workspace is None else NativePages(workspace, (), ())

    @property
    def native_pages(self) -> NativePages | None:
        """See :attr:`AttentionBackend.native_pages`: there are no pages."""
        return self._pages

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """See :meth:`AttentionBackend.prepare`: no layer calls the step."""
        return _NoStep(None if self._pages is None else _native_rows(rows))

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy nothing."""

    def release(self, kv_ids: Iterable[int]) -> None:
        """Free nothing."""

    @property
    def num_bytes(self) -> int:
        """Return 0."""
        return 0


def _native_rows(rows: Sequence[StepRow]) -> NativeRows:
    """Describe rows that have no blocks."""
    parts = by_form(rows, is_bidirectional=False)
    lengths = torch.tensor([part.num_new_tokens for part in parts.rows])
    batch = VarlenBatch(
        cu_seqlens_q=cumulated(lengths),
        block_tables=torch.zeros(len(parts.rows), 0, dtype=torch.int32),
        context_lens=torch.tensor([part.end for part in parts.rows], dtype=torch.int32),
        in_chunks=parts.marks,
    )
    slots = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    return NativeRows(slots, batch, parts.num_generating, parts.cu_seqlens_read)


class _NoStep(AttentionStep):
    def __init__(self, rows: NativeRows | None) -> None:
        self._rows = rows

    @property
    def native_rows(self) -> NativeRows | None:
        return self._rows

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        raise AssertionError(f"layer {layer} has attention, in a model without")

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        raise AssertionError(f"layer {layer} has attention, in a model without")
