"""Which models can have 4-bit keys and values, said before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from paged_sdk import (
    ConfigError,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    plan_memory,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.build.kv_cache_type import check_cache_type
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.env import Environment, read_environment
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.placement import Placement
from tiny import make_checkpoint, make_other_checkpoint

Q4 = PagedAttentionMeta(gpu_memory=MemoryGpuConfig.ContextSize(256), cache_type=PagedCacheType.Q4)
SHAPE = DecoderConfig(
    model_type="some",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=8192,
    norm_eps=1e-6,
    ropes=(RopeConfig(rotary_dim=64),) * 2,
    sliding_windows=(None,) * 2,
    attention_scale=0.125,
)


def check(
    settings: BuildSettings,
    environment: Environment | None = None,
    *,
    head_dim: int = 64,
    device: str = "cpu",
    has_decoder: bool = True,
) -> None:
    check_cache_type(
        evolve(SHAPE, head_dim=head_dim),
        settings,
        environment or Environment(),
        Placement.on(torch.device(device), 2),
        has_decoder=has_decoder,
    )


def test_what_is_refused() -> None:
    asked = BuildSettings(paged_attn=True, paged_meta=Q4)
    check(asked)
    check(asked, head_dim=96)
    with pytest.raises(ConfigError, match=r"cache_type = 'q4' is not allowed: .*heads of 80 are no multiple of 32"):
        check(asked, head_dim=80)
    with pytest.raises(ConfigError, match="f8e4m3 on cuda:0: kernels for 4-bit pages are for the CPU only"):
        check(asked, device="cuda:0")
    with pytest.raises(ConfigError, match="transformers runs"):
        check(asked, has_decoder=False)


def test_the_environment_is_named() -> None:
    environment = read_environment({"MISTRALRS_PAGED_ATTN_CACHE_TYPE": "q4"})
    check(BuildSettings(), environment)
    with pytest.raises(ConfigError) as caught:
        check(BuildSettings(), environment, head_dim=16)
    assert (caught.value.setting, caught.value.value) == ("MISTRALRS_PAGED_ATTN_CACHE_TYPE", "q4")
    check(BuildSettings(paged_attn=False), environment, head_dim=16)  # contiguous
    check(BuildSettings(paged_meta=PagedAttentionMeta()), environment, head_dim=16)


def builder_of(checkpoint: Path) -> TextModelBuilder:
    return TextModelBuilder(checkpoint).with_dtype("float32").with_force_cpu().with_paged_attn(Q4)


def test_before_a_weight_is_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint)
    with pytest.raises(ConfigError, match="heads of 16 "):
        plan_memory(builder)
    gpt2 = builder_of(make_other_checkpoint("gpt2", tmp_path, n_embd=128, n_head=4, n_layer=1, n_positions=64))
    for other in (builder, gpt2):
        weights = other.source.location / Path("model.safetensors")
        content = weights.read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        weights.write_bytes(content[:size] + b"\xff" * (len(content) - size))  # NaN
        try:
            with pytest.raises(ConfigError, match="cache_type"):
                load_parts(other.source, other.settings, Environment())
        finally:
            weights.write_bytes(content)


def test_a_draft_model_is_asked_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    target = builder_of(make_checkpoint("llama", tmp_path, head_dim=32))
    both = TextSpeculativeBuilder(target, TextModelBuilder(tiny_checkpoint), SpeculativeConfig(gamma=2))
    with pytest.raises(ConfigError, match="heads of 16 "):
        load_parts(both.source, both.settings, Environment())


def test_the_pool_of_a_draft_model_is_its_targets(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Neither its builder nor the environment gives it another, so neither is a reason to refuse it."""
    environment = read_environment({"MISTRALRS_PAGED_ATTN_CACHE_TYPE": "q4"})
    target = builder_of(make_checkpoint("llama", tmp_path, head_dim=32))
    auto = evolve(Q4, cache_type=PagedCacheType.AUTO)
    for own in (target.with_paged_attn(auto), target.without_paged_attn()):
        both = TextSpeculativeBuilder(own, builder_of(tiny_checkpoint), SpeculativeConfig(gamma=2))
        load_parts(both.source, both.settings, environment)


def test_memory(tmp_path: Path) -> None:
    """2 * 2 layers * 2 KV heads of 32: 256 elements a token, 5 bits each."""
    plan = plan_memory(builder_of(make_checkpoint("llama", tmp_path, head_dim=32)))
    assert (plan.cache_type, plan.bytes_per_token, plan.kv_bytes) == ("q4", 160, 256 * 160)
