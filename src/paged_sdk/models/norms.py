"""Load the norms of a decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig, NormKind, QkNormWeights
from paged_sdk.layers.norm import LayerNorm, Norm, RMSNorm
from paged_sdk.models.family import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.shard import Shard

__all__ = ["SharedWholeNorms", "WholeNorms", "load_norm", "load_qk_norm"]


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


def load_norm(loader: WeightLoader, config: DecoderConfig, name: str) -> Norm:
    """Load a norm over the hidden size.

    :param name: name of the norm, without ``.weight``
    :raises CheckpointError: a tensor is missing or has another shape
    """
    weight = loader.tensor(f"{name}.weight", config.hidden_size)
    return _norm(config, weight, loader.tensor(f"{name}.bias", config.hidden_size) if config.norm_bias else None)


def load_qk_norm(
    loader: WeightLoader, config: DecoderConfig, names: TensorNames, prefix: str
) -> Norm | WholeNorms | SharedWholeNorms | None:
    """Load the norms of queries and keys: as one norm with a row of weights per head, unless they span all heads.

    :param prefix: prefix of the layer's tensor names
    :returns: None if the model has no such norms
    :raises CheckpointError: a tensor is missing or has another shape
    """
    if not config.qk_norm:
        return None
    query, key = prefix + names.norms.query, prefix + names.norms.key
    heads, kv_heads, size, shard = config.num_heads, config.num_kv_heads, config.head_dim, loader.shard
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
            heads, kv_heads = own.num_heads, own.num_kv_heads
            weight, bias = (
                torch.cat(
                    (
                        loader.tensor(f"{query}.{kind}", size).expand(heads, -1),
                        loader.tensor(f"{key}.{kind}", size).expand(kv_heads, -1),
                    )
                )
                if kind == "weight" or config.qk_norm_bias
                else None
                for kind in ("weight", "bias")
            )
            assert weight is not None
            return _norm(config, weight, bias)


def _of_each_head(loader: WeightLoader, name: str, num_heads: int, head_dim: int) -> Tensor:
    """Load the weights of all heads, from one tensor (cohere) or from one per head (stablelm)."""
    if f"{name}.weight" in loader:
        return loader.tensor(f"{name}.weight", num_heads, head_dim)
    return torch.stack([loader.tensor(f"{name}.norms.{head}.weight", head_dim) for head in range(num_heads)])


def _norm(config: DecoderConfig, weight: Tensor, bias: Tensor | None) -> Norm:
    if config.norm is NormKind.LAYER:
        return LayerNorm(weight, bias, config.norm_eps, offset=config.norm_offset)
    return RMSNorm(weight, config.norm_eps, offset=config.norm_offset, rounds_last=config.norm_in_float32)
