"""Load the norms of a decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig, NormKind, QkNormWeights
from paged_sdk.layers.norm import LayerNorm, Norm, RMSNorm
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.shard import Shard

__all__ = ["SharedWholeNorms", "WholeNorms", "load_norm", "load_qk_norm", "load_value_norm"]


class WholeNorms:
    """Norms a token's queries over all heads together, and its keys likewise (olmo2).

    :param query: norm with the weight ``[num_heads * head_dim]``
    :param key: norm with the weight ``[num_kv_heads * head_dim]``
    """

    def __init__(self, query: Norm, key: Norm, *, num_heads: int) -> None:
        self.query = query
        self.key = key
        self._num_heads = num_heads

    def forward(self, query_key: Tensor) -> Tensor:
        """Norm ``[num_tokens, num_heads + num_kv_heads, head_dim]`` into a new tensor."""
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        parts = ((self.query, query), (self.key, key))
        return torch.cat([norm.forward(part.flatten(1)).view(part.shape) for norm, part in parts], 1)


class SharedWholeNorms:
    """Computes :class:`WholeNorms` across ranks: mean squares are summed over all ranks' heads.

    :param query: norm with the weight of this rank's heads; ``key`` likewise
    :param config: config of the undivided model
    """

    def __init__(self, query: RMSNorm, key: RMSNorm, *, config: DecoderConfig, shard: Shard, group: Group) -> None:
        self._norms = (query, key)
        self._num_heads = len(shard.heads)
        # KV heads with copies on several ranks must count once in the sum.
        self._holders = torch.tensor([1, shard.kv_holders])
        self._sizes = torch.tensor([config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim])
        self._group = group

    def forward(self, query_key: Tensor) -> Tensor:
        """Norm this rank's heads like :meth:`WholeNorms.forward`."""
        parts = [part.flatten(1) for part in (query_key[:, : self._num_heads], query_key[:, self._num_heads :])]
        wide = torch.promote_types(query_key.dtype, torch.float32)
        squares = torch.stack([part.to(wide).square().sum(-1) for part in parts], -1) / self._holders
        means = self._group.sum_(squares) / self._sizes
        triples = zip(self._norms, parts, means.unbind(-1), strict=True)
        normed = [norm.scaled(part, mean) for norm, part, mean in triples]
        return torch.cat(normed, 1).view(query_key.shape)


def load_norm(loader: WeightLoader, config: DecoderConfig, name: str, size: int | None = None) -> Norm:
    """Load a norm.

    :param name: name of the norm, without ``.weight``
    :param size: number of elements that it normalizes together; None: the hidden size
    :raises CheckpointError: a tensor is missing or has another shape
    """
    size = size or config.hidden_size
    weight = loader.tensor(f"{name}.weight", size)
    return _norm(config, weight, loader.tensor(f"{name}.bias", size) if config.norm_bias else None)


def load_qk_norm(
    loader: WeightLoader, config: DecoderConfig, names: TensorNames, prefix: str, layer: int
) -> Norm | WholeNorms | SharedWholeNorms | None:
    """Load the norms of queries and keys: as one norm with a row of weights per head, unless they span all heads.

    :param prefix: prefix of the layer's tensor names
    :param layer: the layer's index; one that attends over another's keys has a norm of queries only
    :returns: None if the model has no such norms
    :raises CheckpointError: a tensor is missing or has another shape
    """
    if not config.qk_norm:
        return None
    query, key = prefix + names.norms.query, prefix + names.norms.key
    shape, shard = config.layer(layer), loader.shard
    heads, kv_heads, size = config.num_heads, shape.num_kv_heads, shape.head_dim
    assert shape.keeps_kv or config.qk_norm_weights is QkNormWeights.SHARED
    match config.qk_norm_weights:
        case QkNormWeights.WHOLE:
            whole = [loader.tensor(f"{query}.weight", heads * size), loader.tensor(f"{key}.weight", kv_heads * size)]
            if loader.group is not None:
                parts = whole[0][shard.of_heads(size)].clone(), whole[1][shard.of_kv_heads(size)].clone()
                of_parts = _norm(config, parts[0], None), _norm(config, parts[1], None)
                assert isinstance(of_parts[0], RMSNorm)
                assert isinstance(of_parts[1], RMSNorm)
                return SharedWholeNorms(of_parts[0], of_parts[1], config=config, shard=shard, group=loader.group)
            return WholeNorms(_norm(config, whole[0], None), _norm(config, whole[1], None), num_heads=heads)
        case QkNormWeights.OWN:
            weights = [_of_each_head(loader, query, heads, size), _of_each_head(loader, key, kv_heads, size)]
            if not shard.is_whole:
                weights = [weights[0][shard.of_heads(1)], weights[1][shard.of_kv_heads(1)]]
            return _norm(config, torch.cat(weights), None)
        case QkNormWeights.SHARED:
            own = shard.local(config)
            heads, kv_heads = own.num_heads, own.layer(layer).num_kv_heads if shape.keeps_kv else 0
            weight, bias = (
                torch.cat(
                    [
                        loader.tensor(f"{name}.{kind}", size).expand(count, -1)
                        for name, count in ((query, heads), (key, kv_heads))
                        if count
                    ]
                )
                if kind == "weight" or config.qk_norm_bias
                else None
                for kind in ("weight", "bias")
            )
            assert weight is not None
            return _norm(config, weight, bias)


def load_value_norm(loader: WeightLoader, config: DecoderConfig, head_dim: int) -> Norm:
    """Return the norm of each head's values, which has no weights."""
    return RMSNorm(loader.ones(head_dim), config.norm_eps, rounds_last=True)


def _of_each_head(loader: WeightLoader, name: str, num_heads: int, head_dim: int) -> Tensor:
    """Load the weights of all heads, from one tensor (cohere) or from one per head (stablelm)."""
    if f"{name}.weight" in loader:
        return loader.tensor(f"{name}.weight", num_heads, head_dim)
    return torch.stack([loader.tensor(f"{name}.norms.{head}.weight", head_dim) for head in range(num_heads)])


def _norm(config: DecoderConfig, weight: Tensor, bias: Tensor | None) -> Norm:
    if config.norm is NormKind.LAYER:
        return LayerNorm(weight, bias, config.norm_eps, offset=config.norm_offset)
    return RMSNorm(weight, config.norm_eps, offset=config.norm_offset, rounds_last=config.norm_in_float32)
