from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paged_sdk.config.memory import MemoryGpuConfig
from paged_sdk.errors import OutOfMemoryError
from paged_sdk.kv.pool_size import (
    DEFAULT_CUDA_MEMORY,
    BlockLayout,
    DeviceMemory,
    auto_cpu_blocks,
    blocks_for,
    fp8_scale_bytes,
    q4_scale_bytes,
)

MIB = 2**20
GIB = 2**30

# SmolLM2-135M: 30 layers, 3 KV heads of 64: 2 * 30 * 3 * 64 = 11,520 elements per token.
SMOL_BF16 = BlockLayout(block_size=32, elements_per_token=11_520, bytes_per_element=2)
# Llama 3.1 8B: 32 layers, 8 KV heads of 128: 65,536 elements, 128 KiB per token in bfloat16, 4 MiB per block of 32.
LLAMA_BF16 = BlockLayout(block_size=32, elements_per_token=65_536, bytes_per_element=2)
ROOMY = DeviceMemory(total=1024 * GIB, free=1024 * GIB)


def test_bytes_of_a_block() -> None:
    assert SMOL_BF16.block_bytes == 737_280
    assert LLAMA_BF16.block_bytes == 4 * MIB


def test_fp8_counts_one_float32_scale_per_vector() -> None:
    # A scale per layer, KV head, and K or V: 2 * 32 * 8 scales of 4 bytes: 2 KiB beside 64 KiB of elements.
    scales = fp8_scale_bytes(2 * 32 * 8)
    assert scales == 2048
    layout = BlockLayout(block_size=32, elements_per_token=65_536, bytes_per_element=1, scale_bytes_per_token=scales)
    assert layout.block_bytes == 2_162_688
    assert blocks_for(MemoryGpuConfig.MB(1024), layout, ROOMY) == 496


def test_four_bits_count_a_scale_and_a_minimum_per_32_elements() -> None:
    # Half a byte for each of 65,536 elements, and 2,048 times two of 16 bits: 32 KiB and 8 KiB.
    scales = q4_scale_bytes(65_536)
    assert scales == 8192
    layout = BlockLayout(block_size=32, elements_per_token=65_536, bytes_per_element=0.5, scale_bytes_per_token=scales)
    assert layout.block_bytes == 32 * 40 * 1024
    assert blocks_for(MemoryGpuConfig.MB(1024), layout, ROOMY) == 819


@pytest.mark.parametrize(
    ("memory", "layout", "expected"),
    [
        (MemoryGpuConfig.ContextSize(1), SMOL_BF16, 1),
        (MemoryGpuConfig.ContextSize(32), SMOL_BF16, 1),
        (MemoryGpuConfig.ContextSize(33), SMOL_BF16, 2),
        (MemoryGpuConfig.ContextSize(4096), LLAMA_BF16, 128),
        (MemoryGpuConfig.MB(1), SMOL_BF16, 1),  # 1,048,576 / 737,280 = 1.4
        (MemoryGpuConfig.MB(512), SMOL_BF16, 728),  # 728.2
        (MemoryGpuConfig.MB(4), LLAMA_BF16, 1),
        (MemoryGpuConfig.MB(7), LLAMA_BF16, 1),
        (MemoryGpuConfig.MB(1024), LLAMA_BF16, 256),
    ],
)
def test_blocks_by_hand(memory: MemoryGpuConfig, layout: BlockLayout, expected: int) -> None:
    assert blocks_for(memory, layout, ROOMY) == expected


def test_a_fraction_is_of_the_total_less_what_is_in_use() -> None:
    # 80 GiB, 16 GiB of weights: 0.9 * 80 - 16 = 56 GiB = 14,336 blocks of 4 MiB.
    device = DeviceMemory(total=80 * GIB, free=64 * GIB)
    assert MemoryGpuConfig.Fraction(0.9) == DEFAULT_CUDA_MEMORY
    assert blocks_for(DEFAULT_CUDA_MEMORY, LLAMA_BF16, device) == 14_336
    assert blocks_for(MemoryGpuConfig.Fraction(1.0), LLAMA_BF16, device) == 16_384


def test_more_than_is_free_says_what_fits() -> None:
    device = DeviceMemory(total=2 * GIB, free=GIB)
    with pytest.raises(OutOfMemoryError, match=r"ContextSize\(8192\)$") as caught:
        blocks_for(MemoryGpuConfig.ContextSize(8193), LLAMA_BF16, device)
    assert (caught.value.needed, caught.value.available) == (257 * 4 * MIB, GIB)
    assert "1028.0 MiB" in str(caught.value)
    assert blocks_for(MemoryGpuConfig.ContextSize(8192), LLAMA_BF16, device) == 256
    with pytest.raises(OutOfMemoryError, match=r"the largest that fits is MB\(1024\)"):
        blocks_for(MemoryGpuConfig.MB(1030), LLAMA_BF16, device)
    assert blocks_for(MemoryGpuConfig.MB(1024), LLAMA_BF16, device) == 256


def test_less_than_a_block_says_what_is_needed() -> None:
    with pytest.raises(OutOfMemoryError, match=r"the smallest with a block is MB\(4\)") as caught:
        blocks_for(MemoryGpuConfig.MB(3), LLAMA_BF16, ROOMY)
    assert caught.value.needed == 4 * MIB
    device = DeviceMemory(total=80 * GIB, free=8 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"the smallest fraction with a block is 0.901") as caught:
        blocks_for(MemoryGpuConfig.Fraction(0.5), LLAMA_BF16, device)
    assert (caught.value.needed, caught.value.available) == (4 * MIB, 0)
    assert blocks_for(MemoryGpuConfig.Fraction(0.901), LLAMA_BF16, device) > 0


def test_a_device_without_room_for_a_block() -> None:
    device = DeviceMemory(total=80 * GIB, free=MIB)
    for memory in (MemoryGpuConfig.ContextSize(1), MemoryGpuConfig.MB(1), MemoryGpuConfig.Fraction(1.0)):
        with pytest.raises(OutOfMemoryError, match="not one block fits"):
            blocks_for(memory, LLAMA_BF16, device)


class _Unknown(MemoryGpuConfig):
    def __init__(self) -> None:
        """Be none of the sizes that there are."""


def test_unknown_sizes_are_an_internal_error() -> None:
    with pytest.raises(AssertionError):
        blocks_for(_Unknown(), LLAMA_BF16, ROOMY)


def test_auto_on_cpu_holds_all_seats_within_a_quarter_of_the_memory() -> None:
    # 32 sequences of 4096 tokens: 32 * 128 blocks.
    assert auto_cpu_blocks(SMOL_BF16, ROOMY, max_num_seqs=32, max_model_len=8192) == 4096
    assert auto_cpu_blocks(SMOL_BF16, ROOMY, max_num_seqs=2, max_model_len=100) == 8
    # A quarter of 8 GiB is 2 GiB: 512 blocks of 4 MiB.
    half_used = DeviceMemory(total=8 * GIB, free=4 * GIB)
    assert auto_cpu_blocks(LLAMA_BF16, half_used, max_num_seqs=32, max_model_len=8192) == 512
    nearly_full = DeviceMemory(total=8 * GIB, free=GIB)
    assert auto_cpu_blocks(LLAMA_BF16, nearly_full, max_num_seqs=32, max_model_len=8192) == 256
    with pytest.raises(OutOfMemoryError, match=r"4\.0 MiB for one block of 32 tokens, but 2\.0 MiB") as caught:
        auto_cpu_blocks(LLAMA_BF16, DeviceMemory(total=8 * MIB, free=8 * MIB), max_num_seqs=1, max_model_len=32)
    assert (caught.value.needed, caught.value.available) == (4 * MIB, 2 * MIB)


def test_an_error_says_how_many_tokens_fit_and_how_many_in_fp8() -> None:
    layout = BlockLayout(block_size=32, elements_per_token=65_536, bytes_per_element=2, fp8_block_bytes=2_162_688)
    with pytest.raises(
        OutOfMemoryError, match=r"ContextSize\(8192\); PagedCacheType\.F8E4M3 has room for 15872 tokens"
    ) as caught:
        blocks_for(MemoryGpuConfig.ContextSize(8193), layout, DeviceMemory(total=2 * GIB, free=GIB))
    assert caught.value.largest_context == 8192
    with pytest.raises(OutOfMemoryError, match=r"not one block fits; .*has room for 32 tokens there") as caught:
        blocks_for(MemoryGpuConfig.MB(4), layout, DeviceMemory(total=GIB, free=3 * MIB))
    assert caught.value.largest_context == 0
    half_used = DeviceMemory(total=1000 * MIB, free=500 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"0\.0 MiB are available; the smallest fraction [^;]*$"):
        blocks_for(MemoryGpuConfig.Fraction(0.4), layout, half_used)  # what is beyond the fraction is not meant
    with pytest.raises(OutOfMemoryError, match=r"3\.0 MiB are available; .*has room for 32 tokens there"):
        blocks_for(MemoryGpuConfig.Fraction(0.503), layout, half_used)
    with pytest.raises(OutOfMemoryError, match="has room for 32 tokens there") as caught:
        auto_cpu_blocks(layout, DeviceMemory(total=12 * MIB, free=12 * MIB), max_num_seqs=1, max_model_len=32)
    assert caught.value.largest_context == 0


sizes = st.one_of(
    st.builds(MemoryGpuConfig.ContextSize, st.integers(1, 10**6)),
    st.builds(MemoryGpuConfig.MB, st.integers(1, 10**5)),
    st.builds(MemoryGpuConfig.Fraction, st.floats(0.01, 1.0)),
)


@settings(deadline=None, derandomize=True)
@given(memory=sizes, total=st.integers(1, 64 * GIB), used=st.floats(0, 1), block_size=st.integers(1, 64))
def test_a_pool_never_exceeds_what_is_free(memory: MemoryGpuConfig, total: int, used: float, block_size: int) -> None:
    layout = BlockLayout(block_size=block_size, elements_per_token=11_520, bytes_per_element=2)
    device = DeviceMemory(total=total, free=total - int(total * used))
    assume(device.free >= 0)
    try:
        num_blocks = blocks_for(memory, layout, device)
    except OutOfMemoryError as error:
        assert error.needed > error.available
    else:
        assert 0 < num_blocks * layout.block_bytes <= device.free
