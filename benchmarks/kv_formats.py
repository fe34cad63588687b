"""Define formats of a KV cache by what they make of keys and values: the vectors that attention reads back.

Nothing is packed, except by the engine's own cache types. A format here has to be worth a kernel before it gets one:
:mod:`benchmarks.kv_study` measures that. A vector is rounded by itself, so that no format depends on how a prompt is
cut into chunks. That leaves out KIVI (Liu et al., 2024, arXiv 2402.02750) and KVQuant (Hooper et al., 2024, arXiv
2401.18079), which scale a channel of the keys over many tokens.
"""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Final, Protocol

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.fp8 import dequantize_f8e4m3, quantize_f8e4m3
from paged_sdk.kernels.hadamard import hadamard_block

__all__ = [
    "FORMATS",
    "Affine",
    "Float8",
    "KvFormat",
    "Offsets",
    "Rotated",
    "Rounding",
    "Stored",
    "Symmetric",
    "hadamard",
]

# Shares of a group's range that may be cut off at either end.
_TRIMS: Final = (0.0, 0.03, 0.06, 0.1)
# Any group of numbers in use is far above.
_TINY: Final = 1e-8


class Rounding(Protocol):
    """Rounds vectors to what a format can store."""

    def bits(self, head_dim: int) -> float:
        """Return the bits per element, scales included."""
        ...

    def __call__(self, vectors: Tensor) -> Tensor:
        """Round vectors, float32 ``[..., head_dim]``."""
        ...


class Float8:
    """Rounds as the cache type f8e4m3 does: :mod:`paged_sdk.kernels.fp8`."""

    def bits(self, head_dim: int) -> float:
        """See :meth:`Rounding.bits`."""
        return 8 + 32 / head_dim

    def __call__(self, vectors: Tensor) -> Tensor:
        """See :meth:`Rounding.__call__`."""
        return dequantize_f8e4m3(*quantize_f8e4m3(vectors), torch.float32)


@frozen
class Affine:
    """Rounds to 4-bit codes with a scale and a minimum, both float16, per group of neighbouring elements.

    :ivar group: elements per group, which divide the head
    :ivar searches: whether the range of the codes is the best of 16, by squared error, or just the group's range
    """

    group: int
    searches: bool = True

    def bits(self, head_dim: int) -> float:
        """See :meth:`Rounding.bits`."""
        return 4 + 32 / self.group

    def __call__(self, vectors: Tensor) -> Tensor:
        """See :meth:`Rounding.__call__`."""
        groups = torch.unflatten(vectors, -1, (-1, self.group))
        lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        trims = _TRIMS if self.searches else (0.0,)
        rounded = []
        for below, above in product(trims, trims):
            scale = _in_float16((highest - lowest) * (1 - below - above) / 15).clamp_min(_TINY)
            minimum = _in_float16(lowest + (highest - lowest) * below)
            rounded.append(((groups - minimum) / scale).round().clamp(0, 15) * scale + minimum)
        candidates = torch.stack(rounded)
        best = (candidates - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
        return candidates.gather(0, best.expand(1, *groups.shape))[0].flatten(-2)


@frozen
class Symmetric:
    """Rounds to 4-bit codes with one float16 scale per group, as llama.cpp's q4_0 does: the largest element's code is
    -8.

    :ivar group: elements per group, which divide the head
    """

    group: int = 32

    def bits(self, head_dim: int) -> float:
        """See :meth:`Rounding.bits`."""
        return 4 + 16 / self.group

    def __call__(self, vectors: Tensor) -> Tensor:
        """See :meth:`Rounding.__call__`."""
        groups = torch.unflatten(vectors, -1, (-1, self.group))
        scale = _in_float16(groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8)
        scale = torch.where(scale == 0, _TINY, scale)
        rounded: Tensor = (groups / scale).round().clamp(-8, 7) * scale
        return rounded.flatten(-2)


@frozen
class Rotated:
    """Rounds in the basis of a Hadamard matrix along the head, which spreads outliers over all elements (QuaRot,
    Ashkboos et al., 2024, arXiv 2404.00456). Queries, rotated alike, have the same scores with such keys.
    """

    rounding: Rounding

    def bits(self, head_dim: int) -> float:
        """See :meth:`Rounding.bits`."""
        return self.rounding.bits(head_dim)

    def __call__(self, vectors: Tensor) -> Tensor:
        """See :meth:`Rounding.__call__`."""
        matrix = hadamard(vectors.shape[-1])
        rounded: Tensor = self.rounding(vectors @ matrix) @ matrix.T
        return rounded


class Offsets(Enum):
    """Names what is subtracted from keys before they are stored, and added back by attention."""

    NONE = "none"
    BIAS = "of the bias"
    """The mean of the rotated key bias over 128 positions: :mod:`paged_sdk.kernels.key_offsets`."""
    MEASURED = "measured"
    """The same with the mean key of random tokens instead of the bias."""


@frozen(kw_only=True)
class KvFormat:
    """Describes a format of a KV cache.

    :ivar balanced: whether each element of the keys is multiplied, and that of the queries divided, by the root of how
        much larger the queries are there, so that errors fall where queries are small (as Lin et al., 2024, arXiv
        2405.04532, do with a maximum). The factors are measured like :attr:`Offsets.MEASURED`
    """

    keys: Rounding
    values: Rounding
    offsets: Offsets = Offsets.BIAS
    balanced: bool = False

    def bits(self, head_dim: int) -> float:
        """Return the bits per element, scales included."""
        return (self.keys.bits(head_dim) + self.values.bits(head_dim)) / 2


@frozen
class Stored:
    """Names a cache type of the engine, whose pool stores what attention reads, on this engine's torch kernels."""

    kind: PagedCacheType

    def bits(self, head_dim: int) -> float:
        """Return the bits per element, scales included."""
        return {PagedCacheType.F8E4M3: 8 + 32 / head_dim, PagedCacheType.Q4: 5}[self.kind]


def hadamard(size: int) -> Tensor:
    """Return a block-diagonal orthonormal matrix of Sylvester's Hadamard matrices, ``[size, size]`` float32."""
    block = torch.ones(1, 1)
    while len(block) < hadamard_block(size):
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), block) / 2**0.5
    return torch.kron(torch.eye(size // len(block)), block)


def _in_float16(x: Tensor) -> Tensor:
    return x.half().float()


def _best(group: int, *, balanced: bool = False) -> KvFormat:
    rounding = Rotated(Affine(group))
    return KvFormat(keys=rounding, values=rounding, offsets=Offsets.MEASURED, balanced=balanced)


_PLAIN: Final = Affine(32, searches=False)

FORMATS: Final[dict[str, KvFormat | Stored]] = {
    "f8e4m3": KvFormat(keys=Float8(), values=Float8()),
    "f8e4m3, measured offsets": KvFormat(keys=Float8(), values=Float8(), offsets=Offsets.MEASURED),
    "f8e4m3 keys, 4-bit values": KvFormat(keys=Float8(), values=Affine(32)),
    "q4_0": KvFormat(keys=Symmetric(), values=Symmetric(), offsets=Offsets.NONE),
    "q4_0, all rotated": KvFormat(keys=Rotated(Symmetric()), values=Rotated(Symmetric()), offsets=Offsets.NONE),
    "4 bits": KvFormat(keys=_PLAIN, values=_PLAIN, offsets=Offsets.NONE),
    "4 bits, rotated keys": KvFormat(keys=Rotated(_PLAIN), values=_PLAIN, offsets=Offsets.NONE),
    "4 bits, bias": KvFormat(keys=_PLAIN, values=_PLAIN),
    "4 bits, bias, rotated keys": KvFormat(keys=Rotated(_PLAIN), values=_PLAIN),
    "4 bits, bias, all rotated, ranges": KvFormat(keys=Rotated(Affine(32)), values=Rotated(Affine(32))),
    "4 bits, measured, ranges": KvFormat(keys=Affine(32), values=Affine(32), offsets=Offsets.MEASURED),
    "4 bits, measured, all rotated, ranges": _best(32),
    "4 bits, balanced": _best(32, balanced=True),
    "4 bits, balanced, groups of 16": _best(16, balanced=True),
    "4 bits, balanced, groups of 64": _best(64, balanced=True),
    "PagedCacheType.F8E4M3": Stored(PagedCacheType.F8E4M3),
    "PagedCacheType.Q4": Stored(PagedCacheType.Q4),
}
"""The measured formats by name. Groups have 32 elements unless the name says otherwise; ``ranges`` are the best of 16;
``bias`` and ``measured`` are offsets of keys (:class:`Offsets`). What is ``balanced`` has all the rest: measured
offsets, rotation and best ranges.
"""
