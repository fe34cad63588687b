"""Compute attention as the papers write it: head by head, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig

CPU = torch.device("cpu")


def shape(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    windows: Sequence[int | None] = (None,),
    softcap: float | None = None,
) -> DecoderConfig:
    """Describe a decoder of which only the attention is used."""
    return DecoderConfig(
        model_type="none",
        vocab_size=1,
        hidden_size=num_heads * head_dim,
        intermediate_size=1,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=1 << 20,
        norm_eps=1e-6,
        ropes=(RopeConfig(rotary_dim=head_dim),) * len(windows),
        sliding_windows=tuple(windows),
        attention_scale=head_dim**-0.5,
        attention_softcap=softcap,
    )


def naive_attention(config: DecoderConfig, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend over a whole sequence, ``[length, heads, head_dim]`` each; return ``[length, num_heads, head_dim]``
    float64.
    """
    query, key, value = query.double(), key.double(), value.double()
    output = torch.empty_like(query)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    window = config.sliding_windows[layer]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        scores = query[:, head] @ key[:, kv_head].T * config.attention_scale
        if config.attention_softcap is not None:
            scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
        output[:, head] = scores.where(seen, -torch.inf).softmax(-1) @ value[:, kv_head]
    return output


class Text:
    """Holds queries, keys and values of a sequence in every layer, and how much of it has been computed.

    :param spread: the queries' size: the larger, the fewer keys have weight
    """

    def __init__(self, config: DecoderConfig, length: int, *, seed: int, dtype: torch.dtype, spread: float = 3) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(num_heads: int) -> Tensor:
            size = (config.num_layers, length, num_heads, config.head_dim)
            return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

        self.query = draw(config.num_heads) * spread
        self.key, self.value = draw(config.num_kv_heads), draw(config.num_kv_heads)
        self.expected = torch.stack(
            [
                naive_attention(config, layer, self.query[layer], self.key[layer], self.value[layer])
                for layer in range(config.num_layers)
            ]
        )
        self.num_computed = 0
