"""What the engine asks of attention, whatever keeps the keys and values; and what a backend is made for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kernels.attention_inputs import LayerCache, ScoreOptions
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
    """What keys and values are to be kept for: one model on one device, and the engine that runs it.

    :ivar model: the decoder's shape
    :ivar engine: the engine's settings; the number of blocks is still open
    :ivar dtype: of queries, keys and values
    :ivar workspace: scratch of the native CPU kernels; None: they are absent
    :ivar exact: the CPU computes in float32 for every token
    :ivar key_offsets: per layer, what FP8 keys are stored without (:mod:`paged_sdk.kernels.key_offsets`)
    """

    model: DecoderConfig
    engine: EngineConfig
    dtype: torch.dtype
    device: torch.device
    workspace: Workspace | None = None
    exact: bool = True
    key_offsets: Sequence[Tensor] = ()

    @property
    def pool(self) -> PoolSettings:
        """The settings of a pool of blocks."""
        return PoolSettings(
            block_size=self.engine.block_size,
            dtype=self.dtype,
            device=self.device,
            cache_type=self.engine.cache_type,
            key_offsets=self.key_offsets,
        )


@frozen(eq=False)
class NativePages:
    """A pool as the native CPU kernels take it, for a decoder whose whole step is one native call.

    :ivar workspace: of the engine that calls
    :ivar caches: pages of each layer
    :ivar shapes: heads of each layer
    """

    workspace: Workspace
    caches: tuple[LayerCache, ...]
    shapes: tuple[AttentionShape, ...]


class DecodeBackend(Protocol):
    """An attention backend whose indices a decode step can work out on the device."""

    @property
    def empty_seat(self) -> int:
        """Of rows that only fill up a batch."""
        ...

    def seats(
        self, seq_ids: Sequence[int], versions: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.int64]:
        """Find where the device has the block tables of some sequences, once it has been sent what it does not have of
        them.

        :param versions: of the tables: see :attr:`~paged_sdk.types.step.StepRow.kv_version`
        """
        ...

    def decode(self, seats: Tensor, positions: Tensor, max_context_len: int) -> AttentionStep:
        """A step of rows with one token each.

        :param seats: ``[num_rows]`` int64
        :param positions: ``[num_rows]`` int64; below 0: the row only fills up the batch
        :param max_context_len: positions are below it
        """
        ...


class AttentionBackend(ABC):
    """Keys and values of every layer, and attention over them.

    What only some backends can do is asked of them (:attr:`native_pages`, :attr:`decode_backend`), so that nobody has
    to know their classes.
    """

    @abstractmethod
    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """Make what one step needs on the device; no row's storage is shared with another's new tokens.

        :param rows: prefill chunks and decodes in any order, at least one
        """

    @abstractmethod
    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV within every layer.

        :param copies: source, target and number of tokens: whole blocks, or the first tokens of contiguous slots. No
            target is touched by another of them
        """

    @abstractmethod
    def release(self, kv_ids: Iterable[int]) -> None:
        """Let go of storage that will not be read again."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held now."""

    @property
    def native_pages(self) -> NativePages | None:
        """The pool as the native CPU kernels take it; None: they cannot read it."""
        return None

    @property
    def decode_backend(self) -> DecodeBackend | None:
        """What makes decode steps that a CUDA graph can record; None: they cannot be recorded."""
        return None


@frozen(kw_only=True)
class KvStorage:
    """How keys and values are to be kept.

    :ivar make: allocates the storage of so many blocks; contiguous storage grows as it needs to
    :ivar scratch: bytes that long contexts may take for a moment, beyond what short ones do
    """

    make: Callable[[int], AttentionBackend]
    scratch: int = 0


def layer_scores(config: DecoderConfig) -> tuple[ScoreOptions, ...]:
    """What shapes the scores of each layer."""
    return tuple(
        ScoreOptions(scale=config.attention_scale, window=window, softcap=config.attention_softcap)
        for window in config.sliding_windows
    )
