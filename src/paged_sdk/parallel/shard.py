"""Decide which heads, neurons and vocabulary rows each tensor-parallel rank holds.

Each rank gets a contiguous range. Cuts through a matrix's columns lie between quantization blocks (elements that share
a scale) where possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import evolve, frozen

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import ConfigError

__all__ = ["SETTING", "WHOLE", "Shard", "shape_of_ranks", "shard_of", "token_slices"]

SETTING: Final = "with_tensor_parallel"

# Most quantized formats have blocks of 256, 128, 64 or 32 elements, and kernels pack 16 rows into a panel.
_BLOCKS: Final = (256, 128, 64, 32, 16, 1)
_PANEL: Final = 16  # rows per panel of a packed matrix
_EXPERT_ROWS: Final = 2 * _PANEL  # kernels multiply two panels of an expert at a time
_TOKENS: Final = 4 * _PANEL


@frozen(kw_only=True)
class Shard:
    """Describes the part of a model that one rank holds.

    :ivar rank: the rank
    :ivar size: number of ranks
    :ivar heads: the rank's query heads
    :ivar kv_heads: the KV heads of these query heads
    :ivar kv_holders: number of ranks that hold the same KV heads
    :ivar shape: config of the undivided model; None if the model is not divided
    """

    rank: int = 0
    size: int = 1
    heads: range = range(0)
    kv_heads: range = range(0)
    kv_holders: int = 1
    shape: DecoderConfig | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the rank holds the whole model."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which alone adds terms that must enter a sum once, such as biases."""
        return self.rank == 0

    def of_heads(self, head_dim: int) -> slice:
        """Return the rank's slice of the concatenated query heads, ``num_heads * head_dim`` elements."""
        return slice(None) if self.is_whole else slice(self.heads.start * head_dim, self.heads.stop * head_dim)

    def of_kv_heads(self, head_dim: int) -> slice:
        """Return the rank's slice of the concatenated KV heads, ``num_kv_heads * head_dim`` elements."""
        return slice(None) if self.is_whole else slice(self.kv_heads.start * head_dim, self.kv_heads.stop * head_dim)

    def neurons(self, count: int) -> slice:
        """Return the rank's slice of an MLP's neurons.

        :param count: the MLP's intermediate size
        :raises ConfigError: there are more ranks than neurons
        """
        if count < self.size:
            raise ConfigError.of(SETTING, self.size, f"at most {count}, the size of a layer's MLP")
        unit = next(block for block in _BLOCKS if count % block == 0 and count // block >= self.size)
        own = _share(count // unit, self.size, self.rank)
        return slice(own.start * unit, own.stop * unit)

    def outputs(self, count: int) -> slice | None:
        """Return the rank's slice of the rows of an output or down projection, for column-parallel products.

        :param count: number of rows
        :returns: None if the rows cannot be divided into panels
        """
        own = self.expert_rows(count)
        return self._rows(count, _PANEL) if own is None else own

    def expert_rows(self, count: int) -> slice | None:
        """Return the rank's slice of the rows of each expert's matrices, if ranks gather columns.

        :param count: number of rows
        :returns: None if the rows cannot be divided into pairs of panels, otherwise the same as :meth:`outputs`
        """
        return self._rows(count, _EXPERT_ROWS)

    def _rows(self, count: int, unit: int) -> slice | None:
        if self.is_whole or count % unit or count // unit < self.size:
            return None
        own = _share(count // unit, self.size, self.rank)
        return slice(own.start * unit, own.stop * unit)

    def tokens(self, count: int) -> slice:
        """Return the rank's slice of the vocabulary.

        :param count: vocabulary size
        :raises ConfigError: there are more ranks than tokens
        """
        return token_slices(count, self.size)[self.rank]

    def every(self, size: int) -> list[Shard]:
        """Return the shards of all ranks if the same model is divided among ``size`` ranks.

        :raises ConfigError: see :func:`shard_of`
        """
        assert self.shape is not None
        return [shard_of(self.shape, rank, size) for rank in range(size)]

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """Return the config of the rank's part of a model."""
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
"""The shard of a model that is not divided."""


def shard_of(config: DecoderConfig, rank: int, size: int) -> Shard:
    """Return a rank's share of a model's heads.

    Query heads stay with their KV head. With more ranks than KV heads, several ranks hold a copy of the same KV head,
    each with some of its query heads.

    :raises ConfigError: some ranks would get no query head, or layers have different shapes
    """
    if size == 1:
        return WHOLE
    if config.layer_shapes:
        raise ConfigError.of(SETTING, size, f"1 for {config.model_type}, whose layers have heads of different shapes")
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
    """Return a model's config with the number of KV heads that all ranks hold together, copies included.

    :raises ConfigError: some ranks would get no query head
    """
    if size == 1:
        return config
    return evolve(config, num_kv_heads=sum(len(shard_of(config, rank, size).kv_heads) for rank in range(size)))


def token_slices(count: int, size: int) -> Sequence[slice]:
    """Return each rank's slice of the vocabulary.

    :param count: vocabulary size
    :param size: number of ranks
    :raises ConfigError: there are more ranks than tokens
    """
    if count < size:
        raise ConfigError.of(SETTING, size, f"at most {count}, the size of the vocabulary")
    unit = _TOKENS if count >= _TOKENS * size else 1
    shares = [_share(-(-count // unit), size, rank) for rank in range(size)]
    return [slice(own.start * unit, min(own.stop * unit, count)) for own in shares]


def _unit(count: int, elements: int, size: int) -> int:
    """Return how many adjacent heads to keep together so that cuts lie between quantization blocks.

    :param count: number of heads
    :param elements: elements per head
    :param size: number of ranks, each of which needs at least one unit
    """
    units = [unit for unit in range(1, count + 1) if count % unit == 0 and count // unit >= size]
    return next(
        unit for block in _BLOCKS if count * elements % block == 0 for unit in units if unit * elements % block == 0
    )


def _share(count: int, size: int, rank: int) -> range:
    """Return a rank's range of ``count`` items; if they do not divide evenly, the first ranks get one more."""
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _length(own: slice) -> int:
    return int(own.stop - own.start)
