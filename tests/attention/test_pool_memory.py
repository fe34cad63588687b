"""A pool takes memory as its blocks are used, not when it is made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig, RopeConfig
from paged_sdk.config.paged import PagedCacheType

MIB = 2**20
# 2 * 4 layers * 4 KV heads * 128: 4096 elements per token, 256 KiB for a block of 32 in bfloat16.
CONFIG = DecoderConfig(
    model_type="none",
    vocab_size=512,
    hidden_size=512,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    max_position=1 << 16,
    norm_eps=1e-6,
    ropes=(RopeConfig(rotary_dim=128),) * 4,
    sliding_windows=(None,) * 4,
    attention_scale=0.125,
)


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")
@pytest.mark.parametrize("cache_type", list(PagedCacheType))
def test_memory_grows_with_the_blocks_that_are_used(cache_type: PagedCacheType) -> None:
    settings = PoolSettings(block_size=32, dtype=torch.bfloat16, device=torch.device("cpu"), cache_type=cache_type)
    before = resident()
    pool = PagedBackend(CONFIG, settings, 4096)
    made = resident() - before
    assert pool.num_bytes >= 512 * MIB
    assert made < 8 * MIB
    for count in (256, 1024):
        for layer in pool._layers:
            for tensor in layer.tensors:
                tensor[:count].view(torch.uint8).fill_(1)
        used = resident() - before - made
        share = pool.num_bytes * count // 4096
        # A page of 2 MiB, where the system gives such, may lie partly in blocks that nobody uses.
        num_tensors = sum(len(layer.tensors) for layer in pool._layers)
        assert share - 8 * MIB <= used <= share + 8 * MIB + num_tensors * 2 * MIB
