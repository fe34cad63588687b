"""Defines the interface of attention backends, and the setup that a backend is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kernels.attention_inputs import LayerCache, Precision, ScoreOptions
from paged_sdk.kernels.kv_basis import KvBasis
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import AttentionShape
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = [
    "AttentionBackend",
    "AttentionSetup",
    "DecodeBackend",
    "KvStorage",
    "NativePages",
    "layer_scores",
]


@frozen(kw_only=True)
class AttentionSetup:
    """Describes what a backend serves: one model on one device, and the engine that runs it.

    :ivar model: the decoder's shape
    :ivar engine: the engine's settings; the number of blocks is not yet set
    :ivar dtype: dtype of queries, keys and values
    :ivar workspace: scratch memory of the native CPU kernels; None if the native library is unavailable
    :ivar precision: the lowest precision in which attention on the CPU may multiply
    :ivar has_bidirectional: whether any tokens attend bidirectionally: those within an image, or the whole sequence
    :ivar decompresses: whether prompts attend over keys and values that are made of latent vectors where that is
        faster, which depends on how a prompt is cut into chunks
    :ivar key_offsets: per layer that keeps keys, the offsets that are subtracted from keys before they are stored as
        codes (:mod:`paged_sdk.kernels.key_offsets`)
    :ivar bases: per layer that keeps keys, the basis of stored keys and values, in which the offsets are too; empty:
        the heads' own
    :ivar num_scratch: number of blocks, the last ones, that the KV manager does not hand out
    """

    model: DecoderConfig
    engine: EngineConfig
    dtype: torch.dtype
    device: torch.device
    workspace: Workspace | None = None
    precision: Precision = Precision.FLOAT32
    has_bidirectional: bool = False
    decompresses: bool = True
    key_offsets: Sequence[Tensor] = ()
    bases: Sequence[KvBasis] = ()
    num_scratch: int = 0

    def of_layers(self, layers: Sequence[int], device: torch.device) -> AttentionSetup:
        """Return the setup of a backend that keeps only these layers' KV, on the given device."""
        kept = [place for place, layer in enumerate(self.model.kv_layers) if layer in layers]
        return evolve(
            self,
            model=self.model.of_layers(layers),
            device=device,
            key_offsets=tuple(self.key_offsets[place] for place in kept) if self.key_offsets else (),
            bases=tuple(self.bases[place] for place in kept) if self.bases else (),
        )

    @property
    def pool(self) -> PoolSettings:
        """Return the settings of a pool of blocks."""
        return PoolSettings(
            block_size=self.engine.block_size,
            dtype=self.dtype,
            device=self.device,
            cache_type=self.engine.cache_type,
            key_offsets=self.key_offsets,
            bases=self.bases,
            num_scratch=self.num_scratch,
        )


@frozen(eq=False)
class NativePages:
    """Holds a KV pool in the form that the native CPU kernels take, for a decoder that runs a step in one native call.

    :ivar workspace: scratch memory of the calling engine
    :ivar caches: the pages of each layer with attention
    :ivar shapes: the head counts and sizes of each layer with attention
    :ivar places: the layers with attention, and their places among these; None: all layers have it
    :ivar states: the states of recurrent layers, by layer, ``[num_slots, ...]`` each
    """

    workspace: Workspace
    caches: tuple[LayerCache, ...]
    shapes: tuple[AttentionShape, ...]
    places: Mapping[int, int] | None = None
    states: Mapping[int, tuple[Tensor, ...]] = field(factory=dict)

    def attention(self, layer: int) -> tuple[LayerCache, AttentionShape]:
        """Return the pages and shape of a layer with attention."""
        place = layer if self.places is None else self.places[layer]
        return self.caches[place], self.shapes[place]

    def of_layers(self, layers: range) -> NativePages:
        """Return the pages of a contiguous range of layers, all with attention."""
        assert self.places is None, "recurrent layers are on one device"
        part = slice(layers.start, layers.stop)
        return NativePages(self.workspace, self.caches[part], self.shapes[part])


class DecodeBackend(Protocol):
    """Makes attention steps whose indices are computed on the device, so that a CUDA graph can record them.

    A seat is a row of the table of block tables on the device (:class:`~paged_sdk.attention.block_tables.BlockTables`).
    """

    @property
    def empty_seat(self) -> int:
        """Return the seat of padding rows."""
        ...

    def seats(
        self, seq_ids: Sequence[int], versions: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.int64]:
        """Send new entries of these sequences' block tables to the device, and return the seats of the tables.

        :param versions: versions of the tables: see :attr:`~paged_sdk.types.step.StepRow.kv_version`
        """
        ...

    def decode(self, seats: Tensor, positions: Tensor, max_context_len: int) -> AttentionStep:
        """Make a step of rows with one token each.

        :param seats: ``[num_rows]`` int64
        :param positions: ``[num_rows]`` int64; below 0: the row is padding
        :param max_context_len: an upper bound that all positions are below
        """
        ...

    def mixed(
        self,
        seats: Tensor,
        context_lens: Tensor,
        cu_seqlens: Tensor,
        row_of_token: Tensor,
        positions: Tensor,
        *,
        max_context_len: int,
    ) -> AttentionStep:
        """Make a step of rows with any number of tokens, including 0.

        :param seats: ``[num_rows]`` int64
        :param context_lens: ``[num_rows]`` int32; 0: all tokens of the row are padding
        :param cu_seqlens: ``[num_rows + 1]`` int32: the first token of each row, and the number of all tokens
        :param row_of_token: ``[num_tokens]`` int64
        :param positions: ``[num_tokens]`` int64; below 0: the token is padding
        :param max_context_len: an upper bound of the context lengths
        """
        ...


class AttentionBackend(ABC):
    """Keeps the keys and values of every layer, and computes attention over them.

    Optional capabilities are properties (:attr:`native_pages`, :attr:`decode_backend`), so callers need not know the
    class.
    """

    @abstractmethod
    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """Make the object that computes one step's attention. A row must not write to storage that another row uses.

        :param rows: prefill chunks and decodes in any order, at least one row
        """

    @abstractmethod
    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV within every layer.

        :param copies: source, target and number of tokens: whole blocks, or the first tokens of contiguous slots. No
            target is a source or target of another copy
        """

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy sequences' states in the recurrent layers, all reads before all writes.

        :param copies: source and target slot; no target is written twice
        """
        raise AssertionError(f"{type(self).__name__} keeps no states")

    @abstractmethod
    def release(self, kv_ids: Iterable[int]) -> None:
        """Free storage that will not be read again."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the number of bytes allocated now."""

    @property
    def windows(self) -> Sequence[int | None]:
        """Return the distinct sliding windows of the layers; None stands for layers without a window."""
        return ()

    @property
    def block_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of all layers whose first dimension is the block; none if KV is not in blocks."""
        return ()

    @property
    def code(self) -> bytes:
        """Return what the content of blocks depends on beside the model and its settings: a hash of measured offsets
        and bases; empty if there are none.
        """
        return b""

    @property
    def native_pages(self) -> NativePages | None:
        """Return the pool in the form that the native CPU kernels take, or None if they cannot read it."""
        return None

    def view(self, layers: Sequence[int], num_heads: int) -> AttentionBackend | None:
        """Return a backend for a model that attends over the KV of this one, and writes none; None: no other model can.

        :param layers: for each layer of that model, the layer of this one over whose keys and values it attends
        :param num_heads: its number of query heads
        """
        return None

    @property
    def decode_backend(self) -> DecodeBackend | None:
        """Return the maker of steps that a CUDA graph can record, or None if this backend's steps cannot be."""
        return None


@frozen(kw_only=True)
class KvStorage:
    """Describes how to allocate KV storage.

    :ivar make: allocates storage for a number of blocks; contiguous storage ignores the number and grows on demand
    :ivar scratch: by device, bytes that steps over long contexts may temporarily allocate beyond those of short ones
    """

    make: Callable[[int], AttentionBackend]
    scratch: Mapping[torch.device, int] = field(factory=dict)


def layer_scores(config: DecoderConfig, device: torch.device) -> tuple[ScoreOptions, ...]:
    """Return each layer's score options (scale, window, softcap, ALiBi), with their tensors on the device."""
    slopes = None
    if config.alibi_slopes:
        slopes = torch.tensor(config.alibi_slopes, dtype=torch.float32, device=device)
    return tuple(
        ScoreOptions(
            scale=config.attention_scale,
            window=window,
            softcap=config.attention_softcap,
            alibi_slopes=slopes,
            bidirectional=config.bidirectional,
        )
        for window in config.sliding_windows
    )
