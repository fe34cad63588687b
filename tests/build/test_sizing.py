"""What an engine's settings come to: builder over environment over what suits model and machine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from attrs import evolve

from paged_sdk.build.kv_memory import size_pool
from paged_sdk.build.sizing import resolve_engine_config, resolve_max_model_len
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import Environment
from paged_sdk.config.memory import MemoryGpuConfig
from paged_sdk.config.paged import PagedAttentionMeta, PagedCacheType
from paged_sdk.config.rope import RopeConfig
from paged_sdk.errors import ConfigError, OutOfMemoryError
from paged_sdk.kv.pool_size import DeviceMemory

MIB = 2**20

#: 2 * 4 layers * 2 KV heads * 64: 1024 elements per token, 64 KiB for a block of 32 in bfloat16.
MODEL = DecoderConfig(
    model_type="none",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=8192,
    norm_eps=1e-6,
    ropes=(RopeConfig(rotary_dim=64),) * 4,
    sliding_windows=(None,) * 4,
    attention_scale=0.125,
)
NOTHING_SET = Environment()


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a device of 1000 MiB, of which 600 are free."""
    memory = DeviceMemory(total=1000 * MIB, free=600 * MIB)
    monkeypatch.setattr("paged_sdk.build.kv_memory.device_memory", lambda device: memory)


def resolve(
    settings: BuildSettings | None = None,
    environment: Environment = NOTHING_SET,
    *,
    model: DecoderConfig = MODEL,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    max_model_len: int = 8192,
    activations: int = 0,
) -> EngineConfig:
    config = resolve_engine_config(
        model, settings or BuildSettings(), environment, devices=[torch.device(device)], max_model_len=max_model_len
    )
    return size_pool(config, (model,), dtype=dtype, device=torch.device(device), activations=activations)


def with_memory(memory: MemoryGpuConfig, **options: Any) -> BuildSettings:
    return BuildSettings(paged_attn=True, paged_meta=PagedAttentionMeta(gpu_memory=memory, **options))


def test_the_models_own_context_is_the_default() -> None:
    assert resolve_max_model_len(BuildSettings(), MODEL) == 8192
    assert resolve_max_model_len(BuildSettings(max_model_len=8192), MODEL) == 8192
    assert resolve_max_model_len(BuildSettings(max_model_len=100), MODEL) == 100


def test_more_than_the_models_context_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_max_model_len(BuildSettings(max_model_len=8193), MODEL)
    assert str(caught.value) == "max_model_len = 8193 is not allowed: expected at most the model's context of 8192"
    assert (caught.value.setting, caught.value.value) == ("max_model_len", 8193)


def test_with_nothing_said() -> None:
    """A quarter of 1000 MiB for 32 sequences of 4096 tokens, which would be 256 MiB."""
    assert resolve() == EngineConfig(
        paged=True,
        num_blocks=4000,
        block_size=32,
        cache_type=PagedCacheType.AUTO,
        prefix_cache_n=16,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_slowdown=3.0,
        max_model_len=8192,
        max_queue=4096,
        sliding_window=None,
    )


def test_a_cpus_pool_has_room_for_every_sequence_but_no_more() -> None:
    assert resolve(BuildSettings(max_num_seqs=2)).num_blocks == 2 * 4096 // 32
    assert resolve(BuildSettings(max_num_seqs=2), max_model_len=100).num_blocks == 2 * 4
    assert resolve(dtype=torch.float32).num_blocks == 2000


def test_a_cuda_devices_pool_is_nine_tenths_less_what_is_in_use() -> None:
    config = resolve(device="cuda")
    assert config.num_blocks == (900 - 400) * 16
    assert config.max_num_batched_tokens == 2048
    assert config.max_slowdown == 0.0
    assert resolve(BuildSettings(max_slowdown=2.0), device="cuda").max_slowdown == 2.0


def test_settings_of_the_scheduler_are_the_builders() -> None:
    config = resolve(BuildSettings(max_num_seqs=5, max_queue=7, max_num_batched_tokens=33), max_model_len=100)
    assert (config.max_num_seqs, config.max_queue, config.max_num_batched_tokens) == (5, 7, 33)
    assert config.max_model_len == 100
    assert resolve(BuildSettings(max_slowdown=0)).max_slowdown == 0.0


@pytest.mark.parametrize(
    ("builder", "environment", "expected"),
    [
        (None, None, True),
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (False, True, False),
        (False, None, False),
    ],
)
def test_paged_attention_is_the_builders_before_the_environments(
    builder: bool | None, environment: bool | None, expected: bool
) -> None:
    for device in ("cpu", "cuda"):
        config = resolve(BuildSettings(paged_attn=builder), Environment(paged_attn=environment), device=device)
        assert config.paged is expected
        assert (config.num_blocks > 0) is expected


def test_other_devices_have_contiguous_memory_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        assert not resolve(device="mps").paged
    assert "paged attention is off by default on mps" in caplog.text
    assert "MISTRALRS_PAGED_ATTN=on" in caplog.text
    caplog.clear()
    assert resolve(BuildSettings(paged_attn=True), device="mps").paged
    assert resolve(environment=Environment(paged_attn=True), device="mps").paged
    assert not resolve(environment=Environment(paged_attn=False), device="mps").paged
    assert caplog.text == ""


def test_without_paging_the_environments_pool_is_of_no_account() -> None:
    huge = PagedAttentionMeta(block_size=64, gpu_memory=MemoryGpuConfig.MB(10**6), cache_type=PagedCacheType.F8E4M3)
    config = resolve(BuildSettings(paged_attn=False), Environment(paged_meta=huge))
    assert (config.paged, config.num_blocks) == (False, 0)
    assert (config.block_size, config.cache_type) == (32, PagedCacheType.AUTO)


def test_a_pools_settings_are_taken_as_a_whole() -> None:
    """What the builder leaves open is the default, not what the environment says."""
    environment = Environment(
        paged_meta=PagedAttentionMeta(
            block_size=64, gpu_memory=MemoryGpuConfig.ContextSize(640), cache_type=PagedCacheType.F8E4M3
        )
    )
    config = resolve(environment=environment)
    assert (config.block_size, config.num_blocks, config.cache_type) == (64, 10, PagedCacheType.F8E4M3)
    config = resolve(with_memory(MemoryGpuConfig.ContextSize(96)), environment)
    assert (config.block_size, config.num_blocks, config.cache_type) == (32, 3, PagedCacheType.AUTO)
    config = resolve(BuildSettings(paged_attn=True, paged_meta=PagedAttentionMeta(block_size=16)), environment)
    assert (config.block_size, config.num_blocks, config.cache_type) == (16, 8000, PagedCacheType.AUTO)


@pytest.mark.parametrize(
    ("builder", "environment", "expected"),
    [(None, None, 16), (None, 3, 3), (None, 0, 0), (5, 3, 5), (0, 3, 0), (5, 0, 5)],
)
def test_the_prefix_caches_number(builder: int | None, environment: int | None, expected: int) -> None:
    """Zero says something."""
    config = resolve(BuildSettings(prefix_cache_n=builder), Environment(prefix_cache_n=environment))
    assert config.prefix_cache_n == expected


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [
        (MemoryGpuConfig.ContextSize(1), 1),
        (MemoryGpuConfig.ContextSize(33), 2),
        (MemoryGpuConfig.MB(10), 160),
        (MemoryGpuConfig.Fraction(0.5), 100 * 16),  # 500 MiB, of which 400 are in use
    ],
)
def test_the_pools_size(memory: MemoryGpuConfig, num_blocks: int) -> None:
    assert resolve(with_memory(memory)).num_blocks == num_blocks
    assert resolve(environment=Environment(paged_meta=PagedAttentionMeta(gpu_memory=memory))).num_blocks == num_blocks


def test_an_fp8_pools_size_counts_its_scales() -> None:
    """1024 bytes of elements and 2 * 4 layers * 2 KV heads * 4 bytes of scales per token."""
    settings = with_memory(MemoryGpuConfig.MB(10), cache_type=PagedCacheType.F8E4M3)
    for dtype in (torch.bfloat16, torch.float32):
        config = resolve(settings, dtype=dtype)
        assert config.num_blocks == 10 * MIB // (32 * (1024 + 64)) == 301
        assert config.cache_type is PagedCacheType.F8E4M3


@pytest.mark.parametrize(
    ("memory", "advice", "fits_in_fp8"),
    [
        (MemoryGpuConfig.MB(601), r"the largest that fits is MB\(600\)", True),
        (MemoryGpuConfig.ContextSize(600 * 512 + 1), r"the largest that fits is ContextSize\(307200\)", True),
        (MemoryGpuConfig.Fraction(0.4), r"the smallest fraction with a block is 0\.401", False),
    ],
)
def test_a_pool_that_does_not_fit(memory: MemoryGpuConfig, advice: str, fits_in_fp8: bool) -> None:
    with pytest.raises(OutOfMemoryError, match=advice) as caught:
        resolve(with_memory(memory))
    assert caught.value.needed is not None
    assert caught.value.available is not None
    assert caught.value.needed > caught.value.available
    assert caught.value.largest_context is not None
    assert caught.value.largest_context == caught.value.available // (64 * 1024) * 32
    assert ("PagedCacheType.F8E4M3 has room for" in str(caught.value)) == fits_in_fp8
    with pytest.raises(OutOfMemoryError) as caught:
        resolve(with_memory(MemoryGpuConfig.MB(601), cache_type=PagedCacheType.F8E4M3))
    assert "F8E4M3" not in str(caught.value)


def test_a_machine_without_room_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(total=1000 * MIB, free=1000)
    monkeypatch.setattr("paged_sdk.build.kv_memory.device_memory", lambda device: memory)
    with pytest.raises(OutOfMemoryError, match="for one block of 32 tokens"):
        resolve()


def test_the_window_is_the_widest_if_every_layer_has_one() -> None:
    windows: tuple[int | None, ...] = (64, 32, 64, 16)
    assert resolve(model=evolve(MODEL, sliding_windows=windows)).sliding_window == 64
    assert resolve(model=evolve(MODEL, sliding_windows=(*windows[:3], None))).sliding_window is None


def test_what_steps_need_is_not_the_pools() -> None:
    whole, less = (
        resolve(with_memory(MemoryGpuConfig.Fraction(0.9)), device="cuda", activations=size) for size in (0, 100 * MIB)
    )
    layout_bytes = 100 * MIB / (whole.num_blocks - less.num_blocks)
    assert less.num_blocks * layout_bytes == pytest.approx(400 * MIB, rel=0.01)
    with pytest.raises(OutOfMemoryError, match=r"500\.0 MiB"):
        resolve(with_memory(MemoryGpuConfig.MB(550)), device="cuda", activations=100 * MIB)
