"""A pool takes memory as its blocks are used, not when it is made."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
import torch
from attrs import evolve

from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.rope import RopeConfig
from paged_sdk.errors import OutOfMemoryError
from paged_sdk.types.step import StepRow

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


def large_tensors(pool: PagedBackend) -> list[torch.Tensor]:
    """Return the tensors that have pages of their own; smaller ones may lie where something was before."""
    largest_threshold = 32 * MIB  # of glibc's malloc, for mapping an allocation by itself
    return [tensor for layer in pool._layers for tensor in layer.tensors if tensor.nbytes > largest_threshold]


def resident(tensors: list[torch.Tensor]) -> int:
    """Return their bytes that are in memory; the process may give others back meanwhile."""
    page, libc, total = os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None, use_errno=True), 0
    for tensor in tensors:
        first = tensor.data_ptr() // page * page
        pages = (tensor.data_ptr() + tensor.nbytes - first + page - 1) // page
        found = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), found) == 0
        total += page * sum(byte & 1 for byte in found)
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
@pytest.mark.parametrize("cache_type", list(PagedCacheType))
def test_memory_grows_with_the_blocks_that_are_used(cache_type: PagedCacheType) -> None:
    settings = PoolSettings(block_size=32, dtype=torch.bfloat16, device=torch.device("cpu"), cache_type=cache_type)
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have freed may be large enough for a tensor, and in memory
    num_blocks = 8192 if cache_type is PagedCacheType.Q4 else 4096
    pool = PagedBackend(CONFIG, settings, num_blocks)
    tensors = large_tensors(pool)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert num_bytes >= 512 * MIB
    assert resident(tensors) < 8 * MIB
    for count in (256, 1024):
        for tensor in tensors:
            tensor[:count].view(torch.uint8).fill_(1)
        used, share = resident(tensors), num_bytes * count // num_blocks
        # A page of 2 MiB, where the system gives such, may lie partly in blocks that nobody uses.
        assert share - 8 * MIB <= used <= share + 8 * MIB + len(tensors) * 2 * MIB


@pytest.mark.parametrize("window", [None, 64])
def test_key_offsets_end_with_the_pool(window: int | None) -> None:
    """No sequence is longer than a pool of 3 * 96 tokens, unless blocks that have left its windows are freed."""
    config = evolve(CONFIG, sliding_windows=(window,) * 4)
    given = tuple(torch.randn(512, 4, 128) for _ in range(4))
    settings = PoolSettings(
        block_size=96,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        cache_type=PagedCacheType.F8E4M3,
        key_offsets=given,
    )
    num_spans = 3 if window is None else 512
    pool = PagedBackend(config, settings, 3)
    for layer, offsets in zip(pool._layers, given, strict=True):
        assert layer.key_offsets is not None
        assert torch.equal(layer.key_offsets, offsets[:num_spans])
        assert layer.key_offsets.untyped_storage().nbytes() == num_spans * 4 * 128 * 4
    assert pool.prepare([StepRow(285, 0, [1, 2, 3], [0, 1, 2], 1)]) is not None


@pytest.mark.parametrize(
    ("cache_type", "bits"), [(PagedCacheType.AUTO, 16), (PagedCacheType.F8E4M3, 8), (PagedCacheType.Q4, 4)]
)
def test_a_pool_that_cannot_be_allocated(cache_type: PagedCacheType, bits: int) -> None:
    settings = PoolSettings(block_size=32, dtype=torch.bfloat16, device=torch.device("cpu"), cache_type=cache_type)
    with pytest.raises(OutOfMemoryError) as caught:
        PagedBackend(CONFIG, settings, 1 << 44)
    assert caught.value.needed == (32 * 4096 << 44) * bits // 8
