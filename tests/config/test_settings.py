from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from attrs import evolve

from paged_sdk import (
    ConfigError,
    DryParams,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedAttentionMetaBuilder,
    PagedCacheType,
    SamplingParams,
    TextModelBuilder,
    TextSpeculativeBuilder,
    VisionModelBuilder,
)
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import GenerationDefaults


def test_memory_is_three_classes_for_match_statements() -> None:
    def describe(memory: MemoryGpuConfig) -> str:
        match memory:
            case MemoryGpuConfig.ContextSize(tokens):
                return f"{tokens} tokens"
            case MemoryGpuConfig.Fraction(fraction):
                return f"{fraction:.0%}"
            case MemoryGpuConfig.MB(megabytes):
                return f"{megabytes} MB"
        raise AssertionError

    assert describe(MemoryGpuConfig.ContextSize(1024)) == "1024 tokens"
    assert describe(MemoryGpuConfig.Fraction(0.5)) == "50%"
    assert describe(MemoryGpuConfig.MB(8)) == "8 MB"
    assert issubclass(MemoryGpuConfig.MB, MemoryGpuConfig)
    assert repr(MemoryGpuConfig.MB(8)) == "MemoryGpuConfig.MB(megabytes=8)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: MemoryGpuConfig.ContextSize(0),
        lambda: MemoryGpuConfig.ContextSize(True),
        lambda: MemoryGpuConfig.MB(-1),
        lambda: MemoryGpuConfig.Fraction(0),
        lambda: MemoryGpuConfig.Fraction(1.01),
        lambda: MemoryGpuConfig.Fraction(math.nan),
        lambda: PagedAttentionMeta(block_size=0),
        lambda: PagedAttentionMeta(block_size=1025),
        lambda: PagedAttentionMeta(cache_type=Any),  # type: ignore[arg-type]
        lambda: PagedAttentionMeta(gpu_memory=Any),  # type: ignore[arg-type]
        lambda: PagedAttentionMetaBuilder().with_block_size(-8),
        lambda: PagedCacheType.parse("f16"),
        lambda: SamplingParams(temperature=-0.1),
        lambda: SamplingParams(temperature=math.inf),
        lambda: SamplingParams(top_k=-2),
        lambda: SamplingParams(max_tokens=0),
        lambda: SamplingParams(max_tokens=5, max_len=6),
        lambda: SamplingParams(max_tokens=5, min_tokens=6),
        lambda: SamplingParams(top_p=0),
        lambda: SamplingParams(top_p=1.5),
        lambda: SamplingParams(min_p=-1),
        lambda: SamplingParams(frequency_penalty=3),
        lambda: SamplingParams(presence_penalty=-3),
        lambda: SamplingParams(repetition_penalty=0),
        lambda: SamplingParams(max_len=0),
        lambda: SamplingParams(stop=["", "x"]),
        lambda: SamplingParams(logits_bias={-1: 0.0}),
        lambda: SamplingParams(logits_bias={1: math.nan}),
        lambda: SamplingParams(logits_bias={1: math.inf}),
        lambda: SamplingParams(n_choices=0),
        lambda: SamplingParams(top_n_logprobs=-1),
        lambda: SamplingParams(seed=-1),
        lambda: SamplingParams(stop_token_ids=(-1,)),
        lambda: SamplingParams(min_tokens=-1),
        lambda: SamplingParams(prompt_logprobs=-1),
        lambda: SamplingParams(ignore_eos="no"),  # type: ignore[arg-type]
        lambda: SamplingParams(min_tokens=4, max_len=3),
        lambda: SamplingParams(logits_bias={1: 10**400}),
        lambda: SamplingParams(logits_bias=[1]),  # type: ignore[arg-type]
        lambda: SamplingParams(dry_params={"multiplier": 1}),  # type: ignore[arg-type]
        lambda: SamplingParams(stop_token_ids=5),  # type: ignore[arg-type]
        lambda: SamplingParams(stop_token_ids=b"ab"),
        lambda: SamplingParams(stop_token_ids=[np.float32(1)]),  # type: ignore[list-item]
        lambda: SamplingParams(stop_token_ids=[np.True_]),  # type: ignore[list-item]
        lambda: SamplingParams(stop=5),  # type: ignore[arg-type]
        lambda: SamplingParams(stop=["\ud800"]),
        lambda: SamplingParams(max_len=np.float64(5)),  # type: ignore[arg-type]
        lambda: SamplingParams(temperature=10**400),
        lambda: DryParams(sequence_breakers=["\ud800"]),
        lambda: MemoryGpuConfig(),
        lambda: MemoryGpuConfig.MB(10**400),
        lambda: MemoryGpuConfig.ContextSize(10**400),
        lambda: BuildSettings(token_source="path:a\0b"),
        lambda: BuildSettings(token_source="env:" + "x" * 10**5),
        lambda: MemoryGpuConfig(5),
        lambda: DryParams(base=0.5),
        lambda: DryParams(multiplier=-1),
        lambda: EngineConfig(max_num_seqs=0),
        lambda: BuildSettings(dtype="int4"),
        lambda: BuildSettings(token_source="env:"),
        lambda: BuildSettings(paged_meta=Any),  # type: ignore[arg-type]
        lambda: BuildSettings(max_num_seqs=0),
        lambda: BuildSettings(max_slowdown=1),
        lambda: BuildSettings(max_slowdown=float("nan")),
        lambda: EngineConfig(max_slowdown=-2.0),
    ],
)
def test_a_bad_value_says_what_is_allowed(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.setting
    assert caught.value.allowed
    assert caught.value.allowed in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_errors_of_builders_name_their_methods() -> None:
    builders = (TextModelBuilder, VisionModelBuilder, TextSpeculativeBuilder)
    known = {name for builder in builders for name in (*dir(builder), *inspect.signature(builder).parameters)}
    assert {BuildSettings.call_of(field.name) for field in attrs.fields(BuildSettings)} <= known
    with pytest.raises(ConfigError, match=r"^with_max_num_seqs = 0 is not allowed: expected an int >= 1$") as raised:
        TextModelBuilder("model").with_max_num_seqs(0)
    assert raised.value.setting == "with_max_num_seqs"
    with pytest.raises(ConfigError, match=r"^with_hf_revision = '' is not allowed"):
        TextModelBuilder("model").with_hf_revision("")


def test_numbers_of_numpy_become_python_s_own() -> None:
    two: Any = np.int32(2)  # whose type does not say that it is an int
    half: Any = np.float32(0.5)
    ids: Any = np.array([1, 2])
    params = SamplingParams(max_len=two, temperature=half, stop_token_ids=ids, logits_bias={two: half})
    assert params == SamplingParams(max_len=2, temperature=0.5, stop_token_ids=[1, 2], logits_bias={2: 0.5})
    numbers = (params.max_len, params.temperature, *params.stop_token_ids, *(params.logits_bias or ()))
    assert [type(number) for number in numbers] == [int, float, int, int, int]
    assert type(MemoryGpuConfig.MB(two).megabytes) is int


def test_values_are_frozen_and_hashable() -> None:
    meta = PagedAttentionMeta(gpu_memory=MemoryGpuConfig.ContextSize(64))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        meta.block_size = 16  # type: ignore[misc]
    assert len({meta, PagedAttentionMeta(gpu_memory=MemoryGpuConfig.ContextSize(64))}) == 1


def test_sampling_with_a_bias_is_a_value_like_any_other() -> None:
    sampling = SamplingParams(logits_bias={7: -math.inf, 5: 1.5})
    same = SamplingParams(logits_bias={5: 1.5, 7: -math.inf})
    assert len({sampling, same, SamplingParams(logits_bias={5: 1.5}), SamplingParams()}) == 3
    for other in (pickle.loads(pickle.dumps(sampling)), copy.deepcopy(sampling), copy.copy(sampling), same):
        assert other == sampling
        assert other.logits_bias == {5: 1.5, 7: -math.inf}
    assert "logits_bias={7: -inf, 5: 1.5}" in repr(sampling)
    with pytest.raises(TypeError):
        sampling.logits_bias[5] = 2.0  # type: ignore[index]


def test_the_builder_returns_new_builders() -> None:
    first = PagedAttentionMetaBuilder().with_block_size(16)
    second = first.with_gpu_memory(MemoryGpuConfig.MB(4)).with_cache_type(PagedCacheType.F8E4M3)
    assert first.build() == PagedAttentionMeta(block_size=16)
    assert second.build() == PagedAttentionMeta(
        block_size=16, gpu_memory=MemoryGpuConfig.MB(4), cache_type=PagedCacheType.F8E4M3
    )


def test_sampling_takes_what_is_unset_from_the_checkpoint() -> None:
    defaults = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)
    resolved = SamplingParams(top_p=0.5, max_len=3).with_defaults(defaults)
    assert resolved == SamplingParams(temperature=0.7, top_k=20, top_p=0.5, repetition_penalty=1.1, max_len=3)
    assert not resolved.is_greedy
    assert SamplingParams.deterministic().with_defaults(defaults) == SamplingParams.deterministic()
    assert SamplingParams(temperature=1e-8).is_greedy
    assert not SamplingParams().is_greedy


def test_max_tokens_is_another_name_for_max_len() -> None:
    sampling = SamplingParams(max_tokens=5)
    assert sampling == SamplingParams(max_len=5) == SamplingParams(max_len=5, max_tokens=5)
    assert sampling.max_len == sampling.max_tokens == 5
    assert repr(sampling) == repr(SamplingParams(max_len=5))
    assert evolve(sampling, max_len=7).max_tokens == 7
    assert evolve(sampling, top_p=0.5).max_len == 5
    assert pickle.loads(pickle.dumps(sampling)) == sampling
    with pytest.raises(ConfigError, match=r"SamplingParams\.max_tokens = 5.*max_len"):
        SamplingParams(max_tokens=5, max_len=6)
    with pytest.raises(ConfigError, match=r"SamplingParams\.max_tokens = 0"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_can_be_turned_off(off: int) -> None:
    sampling = SamplingParams(top_k=off)
    assert sampling.with_defaults(GenerationDefaults(top_k=20)).top_k is None
    assert SamplingParams().with_defaults(GenerationDefaults(top_k=20)).top_k == 20
    assert sampling.with_defaults(GenerationDefaults()) == SamplingParams()


def test_sampling_converts_what_is_convenient() -> None:
    bias = {5: -1.0}
    params = SamplingParams(stop="END", logits_bias=bias, stop_token_ids=[1, 2])
    bias[6] = 1.0
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert dict(params.logits_bias or {}) == {5: -1.0}
