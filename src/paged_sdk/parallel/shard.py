"""Decide which part of each matrix a process holds that computes a model together with others.

Heads, neurons and tokens of the vocabulary are divided in their order. Where a matrix's columns are divided, the cut
lies between blocks of elements that share a scale, if the columns can be divided so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import evolve, frozen

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import ConfigError

__all__ = ["SETTING", "WHOLE", "Shard", "shape_of_ranks", "shard_of", "token_slices"]

SETTING: Final = "with_tensor_parallel"

# Most formats of quantized weights have blocks of 256, 128, 64 or 32 elements, and kernels take 16 rows together.
_BLOCKS: Final = (256, 128, 64, 32, 16, 1)
_PANEL: Final = 16  # rows that packed matrices take together
_EXPERT_ROWS: Final = 2 * _PANEL  # of an expert, that are multiplied together
_TOKENS: Final = 4 * _PANEL


@frozen(kw_only=True)
class Shard:
    """Says which part of a model one of several ranks holds.

    :ivar rank: its number
    :ivar size: how many there are
    :ivar heads: its query heads; all of ``kv_heads`` are theirs, and no others
    :ivar kv_heads: its key-value heads
    :ivar kv_holders: how many ranks hold these key-value heads
    :ivar shape: the whole model's; None: it is not divided
    """

    rank: int = 0
    size: int = 1
    heads: range = range(0)
    kv_heads: range = range(0)
    kv_holders: int = 1
    shape: DecoderConfig | None = None

    @property
    def is_whole(self) -> bool:
        """Say whether nothing is divided."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Say whether it is the rank that adds what all would add alike."""
        return self.rank == 0

    def of_heads(self, head_dim: int) -> slice:
        """Return which elements of all query heads it holds, one head after the other."""
        return slice(None) if self.is_whole else slice(self.heads.start * head_dim, self.heads.stop * head_dim)

    def of_kv_heads(self, head_dim: int) -> slice:
        """Return the same of key-value heads."""
        return slice(None) if self.is_whole else slice(self.kv_heads.start * head_dim, self.kv_heads.stop * head_dim)

    def neurons(self, count: int) -> slice:
        """Return which of an MLP's neurons it holds, of so many.

        :raises ConfigError: there are more ranks than neurons
        """
        if count < self.size:
            raise ConfigError.of(SETTING, self.size, f"at most {count}, the size of a layer's MLP")
        unit = next(block for block in _BLOCKS if count % block == 0 and count // block >= self.size)
        own = _share(count // unit, self.size, self.rank)
        return slice(own.start * unit, own.stop * unit)

    def outputs(self, count: int) -> slice | None:
        """Return which of so many outputs of a layer's last matrices it computes; None: they cannot be divided well."""
        own = self.expert_rows(count)
        return self._rows(count, _PANEL) if own is None else own

    def expert_rows(self, count: int) -> slice | None:
        """Return which of so many rows of each expert's matrices it has where ranks join columns; None: they cannot be
        divided well.

        :returns: what :meth:`outputs` returns of the same number, unless it is None
        """
        return self._rows(count, _EXPERT_ROWS)

    def _rows(self, count: int, unit: int) -> slice | None:
        if self.is_whole or count % unit or count // unit < self.size:
            return None
        own = _share(count // unit, self.size, self.rank)
        return slice(own.start * unit, own.stop * unit)

    def tokens(self, count: int) -> slice:
        """Return which of so many tokens of the vocabulary it holds.

        :raises ConfigError: there are more ranks than tokens
        """
        return token_slices(count, self.size)[self.rank]

    def every(self, size: int) -> list[Shard]:
        """Divide the same model among so many ranks.

        :raises ConfigError: see :func:`shard_of`
        """
        assert self.shape is not None
        return [shard_of(self.shape, rank, size) for rank in range(size)]

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """Return the shape of a model's part."""
        if self.is_whole:
            return config
        size, moe = config.intermediate_size, config.moe
        if moe is not None:
            moe = evolve(moe, intermediate_size=_length(self.neurons(moe.intermediate_size)))
            if moe.shared_intermediate_size is not None:
                moe = evolve(moe, shared_intermediate_size=_length(self.neurons(moe.shared_intermediate_size)))
        has_mlps = moe is None or len(moe.layers) < config.num_layers
        return evolve(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            alibi_slopes=config.alibi_slopes[self.heads.start : self.heads.stop],
            intermediate_size=_length(self.neurons(size)) if has_mlps else size,
            moe=moe,
        )


WHOLE: Final = Shard()
"""Holds all of a model."""


def shard_of(config: DecoderConfig, rank: int, size: int) -> Shard:
    """Divide the heads of a model among ranks.

    Query heads go with their key-value head. Where there are more ranks than key-value heads, some hold the same one,
    each with some of its query heads.

    :raises ConfigError: there are ranks for which there would be no head
    """
    if size == 1:
        return WHOLE
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    group = heads // kv_heads
    if size <= kv_heads:
        unit = _unit(kv_heads, group * dim, size)
        own = _share(kv_heads // unit, size, rank)
        kv = range(own.start * unit, own.stop * unit)
        own_heads = range(kv.start * group, kv.stop * group)
        return Shard(rank=rank, size=size, heads=own_heads, kv_heads=kv, shape=config)
    of_kv = [each * kv_heads // size for each in range(size)]
    most = max(map(of_kv.count, of_kv))
    if most > group:
        raise ConfigError.of(SETTING, size, f"at most {heads}, the number of the model's query heads")
    kv_head = of_kv[rank]
    holders = of_kv.count(kv_head)
    unit = _unit(group, dim, most)
    own = _share(group // unit, holders, rank - of_kv.index(kv_head))
    first = kv_head * group
    return Shard(
        rank=rank,
        size=size,
        heads=range(first + own.start * unit, first + own.stop * unit),
        kv_heads=range(kv_head, kv_head + 1),
        kv_holders=holders,
        shape=config,
    )


def shape_of_ranks(config: DecoderConfig, size: int) -> DecoderConfig:
    """Return a model's shape with as many key-value heads as so many ranks hold together that it is divided among.

    :raises ConfigError: there are ranks for which there would be no head
    """
    if size == 1:
        return config
    return evolve(config, num_kv_heads=sum(len(shard_of(config, rank, size).kv_heads) for rank in range(size)))


def token_slices(count: int, size: int) -> Sequence[slice]:
    """Return which of so many tokens of the vocabulary each of so many ranks holds.

    :raises ConfigError: there are more ranks than tokens
    """
    if count < size:
        raise ConfigError.of(SETTING, size, f"at most {count}, the size of the vocabulary")
    unit = _TOKENS if count >= _TOKENS * size else 1
    shares = [_share(-(-count // unit), size, rank) for rank in range(size)]
    return [slice(own.start * unit, min(own.stop * unit, count)) for own in shares]


def _unit(count: int, elements: int, size: int) -> int:
    """Return how many of so many heads to keep together, so that cuts lie between blocks.

    :param elements: of one of them
    :param size: how many ranks there must be a unit for
    """
    units = [unit for unit in range(1, count + 1) if count % unit == 0 and count // unit >= size]
    return next(
        unit for block in _BLOCKS if count * elements % block == 0 for unit in units if unit * elements % block == 0
    )


def _share(count: int, size: int, rank: int) -> range:
    """Return which of so many things a rank has; the first ranks have one more where they cannot be divided evenly."""
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _length(own: slice) -> int:
    return int(own.stop - own.start)
