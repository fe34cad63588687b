"""A pool takes memory as its blocks are used, not when it is made."""

from __future__ import annotations

import ctypes
import os
import sys

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


def resident(pool: PagedBackend) -> int:
    """Return the bytes of the pool that are in memory: of its own pages, since a process gives others back."""
    page, libc, total = os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None, use_errno=True), 0
    for layer in pool._layers:
        for tensor in layer.tensors:
            first = tensor.data_ptr() // page * page
            pages = (tensor.data_ptr() + tensor.nbytes - first + page - 1) // page
            found = (ctypes.c_ubyte * pages)()
            assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), found) == 0
            total += page * sum(byte & 1 for byte in found)
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")
@pytest.mark.parametrize("cache_type", list(PagedCacheType))
def test_memory_grows_with_the_blocks_that_are_used(cache_type: PagedCacheType) -> None:
    settings = PoolSettings(block_size=32, dtype=torch.bfloat16, device=torch.device("cpu"), cache_type=cache_type)
    pool = PagedBackend(CONFIG, settings, 4096)
    assert pool.num_bytes >= 512 * MIB
    assert resident(pool) < 8 * MIB
    for count in (256, 1024):
        for layer in pool._layers:
            for tensor in layer.tensors:
                tensor[:count].view(torch.uint8).fill_(1)
        used = resident(pool)
        share = pool.num_bytes * count // 4096
        # A page of 2 MiB, where the system gives such, may lie partly in blocks that nobody uses.
        num_tensors = sum(len(layer.tensors) for layer in pool._layers)
        assert share - 8 * MIB <= used <= share + 8 * MIB + num_tensors * 2 * MIB
