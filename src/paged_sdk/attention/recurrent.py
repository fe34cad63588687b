"""Keeps sequences' states of recurrent layers, beside the KV of a model's other layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, KvStorage, NativePages
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import NativeRows
from paged_sdk.kernels.recurrent_step import RecurrentRows, RecurrentStep
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.row_drafts import RowDrafts
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["StatefulBackend", "state_bytes", "stateful_storage"]


def state_bytes(config: DecoderConfig, dtype: torch.dtype, num_drafts: int) -> int:
    """Return the bytes of one sequence's states in all recurrent layers.

    :param dtype: the model's dtype
    :param num_drafts: most drafts of a sequence per step
    """
    return sum(
        torch.Size(each.shape).numel() * _state_dtype(dtype, in_float32=each.in_float32).itemsize
        for layer in config.recurrent_layers.values()
        for each in layer.states(num_drafts)
    )


def stateful_storage(
    inner: KvStorage,
    config: DecoderConfig,
    *,
    num_slots: int,
    num_drafts: int,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace | None,
) -> KvStorage:
    """Return KV storage with states beside it.

    :param inner: stores the KV of the layers with attention
    :param config: the shape of the whole model
    :param num_slots: number of sequences with a state
    :param num_drafts: most drafts of a sequence per step
    :param workspace: of the native CPU kernels; None: they are unavailable
    """

    def make(num_blocks: int) -> StatefulBackend:
        return StatefulBackend(
            inner.make(num_blocks),
            config,
            num_slots=num_slots,
            num_drafts=num_drafts,
            dtype=dtype,
            device=device,
            workspace=workspace,
        )

    return evolve(inner, make=make)


class StatefulBackend(AttentionBackend):
    """Keeps a state per slot and recurrent layer, ``[num_slots, ...]``, and the KV of layers with attention in another
    backend. There may be no recurrent layers: then it numbers the layers with attention among those of MLPs alone.

    Slots are not cleared: a row that begins its sequence does not read what its slot holds. The state of a row with
    drafts stays behind, as it is before them, until the next row says which of them were right by where it starts.

    :param inner: keeps the KV of the layers with attention, which it numbers from 0
    :param num_drafts: most drafts of a row
    :param workspace: of the native CPU kernels, which compute recurrent layers on the CPU; None: torch operations do
    """

    def __init__(
        self,
        inner: AttentionBackend,
        config: DecoderConfig,
        *,
        num_slots: int,
        num_drafts: int = 0,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace | None = None,
    ) -> None:
        self._inner = inner
        self._workspace = workspace if device.type == "cpu" else None
        self._device = device
        self._places = {layer: place for place, layer in enumerate(config.attention_layers)}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._own_states: list[Tensor] = []
        self._draft_inputs: list[Tensor] = []  # a quarter of the memory of some models, seldom copied
        for layer, recurrent in config.recurrent_layers.items():
            shapes = recurrent.states(num_drafts)
            states = [
                torch.zeros(
                    num_slots, *each.shape, dtype=_state_dtype(dtype, in_float32=each.in_float32), device=device
                )
                for each in shapes
            ]
            self._states[layer] = tuple(states)
            for each, state in zip(shapes, states, strict=True):
                (self._draft_inputs if each.of_drafts else self._own_states).append(state)
        self._behind: dict[int, int] = {}  # by slot of a row with drafts: the tokens that its state has gone through

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """See :meth:`AttentionBackend.prepare`. No two rows may have the same slot."""
        own = RecurrentRows(
            [row.state_slot for row in rows],
            [row.start for row in rows],
            [row.num_new_tokens for row in rows],
            drafts=self._drafts(rows),
            device=self._device,
            workspace=self._workspace,
        )
        return _StatefulStep(self._places, self._inner.prepare(rows), RecurrentStep(own, self._states))

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """See :meth:`AttentionBackend.copy`."""
        self._inner.copy(copies)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """See :meth:`AttentionBackend.copy_states`."""
        sources, targets = (torch.tensor(slots, device=self._device) for slots in zip(*copies, strict=True))
        behind = {target: self._behind[source] for source, target in copies if source in self._behind}
        for state in (*self._own_states, *(self._draft_inputs if behind else ())):
            state[targets] = state[sources]
        for _, target in copies:
            self._behind.pop(target, None)
        self._behind |= behind

    def release(self, kv_ids: Iterable[int]) -> None:
        """See :meth:`AttentionBackend.release`."""
        self._inner.release(kv_ids)

    def _drafts(self, rows: Sequence[StepRow]) -> RowDrafts | None:
        """Return the rows' drafts, and note which states stay behind."""
        behind = self._behind
        if not self._states or not (behind or any(row.num_drafts for row in rows)):
            return None
        replayed, earlier, new = ([0] * len(rows) for _ in range(3))
        for place, row in enumerate(rows):
            known_end = row.end - row.num_drafts
            passed = behind.pop(row.state_slot, None)
            if passed is not None and row.start:
                replayed[place] = min(row.start, known_end) - passed
                assert replayed[place] >= 0, f"the state of {row} has gone through {passed} tokens"
            if row.num_drafts:
                earlier[place] = max(row.start - known_end, 0)
                new[place] = row.num_drafts - earlier[place]
                behind[row.state_slot] = known_end
        drafts = RowDrafts(tuple(replayed), tuple(earlier), tuple(new))
        return drafts if drafts.most else None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of KV; states are not counted."""
        return self._inner.num_bytes

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all states."""
        return sum(state.nbytes for states in self._states.values() for state in states)

    @property
    def native_pages(self) -> NativePages | None:
        """See :attr:`AttentionBackend.native_pages`."""
        pages = self._inner.native_pages
        return None if pages is None else evolve(pages, places=self._places, states=self._states)

    @property
    def windows(self) -> Sequence[int | None]:
        """See :attr:`AttentionBackend.windows`."""
        return self._inner.windows

    @property
    def block_tensors(self) -> Sequence[Tensor]:
        """See :attr:`AttentionBackend.block_tensors`."""
        return self._inner.block_tensors

    @property
    def code(self) -> bytes:
        """See :attr:`AttentionBackend.code`."""
        return self._inner.code


class _StatefulStep(AttentionStep):
    """Computes attention by another backend's step, which numbers the layers with attention from 0."""

    def __init__(self, places: dict[int, int], inner: AttentionStep, recurrent: RecurrentStep) -> None:
        self._places = places
        self._inner = inner
        self._recurrent = recurrent
        rows = inner.native_rows
        self._native_rows = None if rows is None else evolve(rows, states=recurrent.rows.native)

    @property
    def recurrent(self) -> RecurrentStep:
        return self._recurrent

    @property
    def native_rows(self) -> NativeRows | None:
        return self._native_rows

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._inner.write(self._places[layer], key, value)

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        return self._inner.attend(self._places[layer], query, learned)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, learned: LearnedScores | None = None
    ) -> Tensor:
        return self._inner.forward(self._places[layer], query, key, value, learned)

    def rotate_and_forward(
        self, layer: int, query_key: Tensor, value: Tensor, rotation: Rotation, learned: LearnedScores | None = None
    ) -> Tensor:
        return self._inner.rotate_and_forward(self._places[layer], query_key, value, rotation, learned)

    def attend_over_latents(
        self, layer: int, rotated: Tensor, unrotated: Tensor, key: Tensor, heads: LatentHeads, rotation: Rotation
    ) -> Tensor:
        return self._inner.attend_over_latents(self._places[layer], rotated, unrotated, key, heads, rotation)


def _state_dtype(dtype: torch.dtype, *, in_float32: bool) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if in_float32 else dtype
