"""Families that settings of the shared decoder make: each is what transformers computes, however its prompt is cut, its
KV kept and its weights quantized.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from odd_configs import reference_of
from reference_decoding import CPU, DictSource, contiguous, greedy, logits, paged, random_prompt, reference_greedy
from shared_configs import GROUPED
from torch import Tensor
from transformers import PreTrainedModel

from native_weights import needs_library, workspace
from paged_sdk.attention.backend import AttentionSetup
from paged_sdk.attention.choice import choose_storage
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.build.fusing import fuse
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.isq import IsqType
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.loading import load_model
from paged_sdk.quant.policy import WeightPolicy

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_GEMMA4: Final[dict[str, Any]] = {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "hidden_size_per_layer_input": 0,
}
_GRANITE: Final = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_LATENT: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 96,
}
# By ``model_type``: what makes each itself, small enough that a prompt of a few dozen tokens passes every window.
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "gemma": {},
    "granite": _GRANITE,
    "seed_oss": {},
    "arcee": {},
    "apertus": {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 32}, "attention_bias": True},
    "smollm3": {"sliding_window": 24, "use_sliding_window": True, "no_rope_layer_interval": 3},
    "olmo2": {},
    "olmo3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": True},
    "helium": {},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 3},
    "glm": {},
    "glm4": {},
    "starcoder2": {},
    "phi": {"qk_layernorm": True},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"sliding_window": 24, "sliding_window_pattern": 3, "logit_scale": 0.5},
    "nemotron": {},
    "gptj": {"rotary_dim": 8, "n_inner": 96},
    "codegen": {"rotary_dim": 8, "n_inner": 96},
    "falcon": {},
    "falcon with groups": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon with alibi": {"model_type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False},
    "bloom": {},
    "mpt": {"max_seq_len": 512, "attn_config": {"clip_qkv": 4.0}},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 4.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "swiglu_limit": 2.0},
    "gemma4 E2B": _GEMMA4
    | {
        "num_hidden_layers": 8,
        "layer_types": [*["sliding_attention", "full_attention"] * 4],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
    },
    "gemma4 E4B": _GEMMA4
    | {
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention", "full_attention"] * 3],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
    },
    "gemma4 31B": _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4 26B": _GEMMA4
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "youtu": _LATENT,
    "youtu with odd sizes": _LATENT | {"model_type": "youtu", "qk_nope_head_dim": 24, "v_head_dim": 20},
    "deepseek_v2": _LATENT | GROUPED | {"topk_method": "group_limited_greedy"},
    "deepseek_v2 without groups": _LATENT | GROUPED | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": _LATENT | GROUPED,
    "minicpm3": _LATENT | {"scale_emb": 2.5, "scale_depth": 0.7, "dim_model_base": 16},
    # Its class counts rotated elements as a part of whole heads.
    "mistral4": _LATENT
    | GROUPED
    | {"head_dim": 48, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}, "first_k_dense_replace": 1},
    "glm4_moe_lite": _LATENT | GROUPED | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.4, "lm_head_bias": True, "attention_bias": True},
    "glm4_moe": GROUPED | {"use_qk_norm": True, "attention_bias": True},
    "dots1": GROUPED | {"norm_topk_prob": True, "sliding_window": 24, "max_window_layers": 1},
    "exaone_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "afmoe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_shared_experts": 2,
        "route_scale": 1.5,
        "sliding_window": 24,
        "global_attn_every_n_layers": 3,
        "mup_enabled": True,
        "attention_bias": True,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_norm_min": 0.3,
    },
    "granitemoe": _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3},
    "granitemoeshared": _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 48},
    "hunyuan_v1_dense": {"attention_bias": True, "rope_scaling": {"type": "dynamic", "alpha": 20.0, "factor": 1.0}},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": [3] * 3},
    "ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}},
}
LATENT: Final = ("youtu", "deepseek_v2", "deepseek_v2 without groups", "deepseek_v3", "glm4_moe_lite")
"""Families with latent attention, whose keys prompts decompress."""
NOT_FUSED: Final[dict[str, str]] = {
    "falcon": "the native decoder has no activation gelu",
    "falcon with groups": "the native decoder does not know parallel_norms = True",
    "falcon with alibi": "the native decoder does not know alibi_slopes = ",
    "bloom": "the native decoder does not know alibi_slopes = ",
    "mpt": "the native decoder does not know alibi_slopes = ",
    "youtu with odd sizes": "the projections of its latent vectors have no native kernel",
}
"""Families whose layers the native decoder does not compute, and why."""
PROMPT: Final = random_prompt(60)


@functools.cache
def models(family: str) -> tuple[PreTrainedModel, DecoderModel]:
    with tempfile.TemporaryDirectory() as directory:
        config = _COMMON | {"model_type": family} | CONFIGS[family]
        if config["model_type"] == "falcon":
            del config["head_dim"]  # which its class of configurations computes
        reference = reference_of(config, Path(directory))
    return reference, ours(reference)


def ours(reference: PreTrainedModel, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderModel:
    return load_model(
        reference.config.to_dict(), DictSource(reference.state_dict()), dtype=dtype, placement=CPU, **options
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_are_those_of_transformers(family: str) -> None:
    reference, model = models(family)
    expected = reference_greedy(reference, PROMPT, 5)
    assert len(set(expected)) > 1
    assert greedy(model, paged(16), PROMPT, 5, chunk=29) == expected
    assert greedy(model, contiguous, PROMPT, 5) == expected


@pytest.mark.parametrize("family", CONFIGS)
def test_chunks_batches_and_caches_change_nothing(family: str) -> None:
    """Logits are transformers', and in float64 those of other chunks, beside other texts, are the same."""
    reference, model = models(family)
    with torch.inference_mode():
        scores = reference(torch.tensor([PROMPT])).logits[0]
    (whole,) = logits(model, paged(16)(model), [(PROMPT, 0, list(range(31, 0, -1)))])
    assert (whole - scores).abs().max() < 1e-4 * scores.abs().max()
    exact = ours(reference, torch.float64)
    backend = paged(16)(exact)
    parts = [
        logits(exact, backend, [([7], first % 30, [7, 10]), (PROMPT[first:last], first, [3, 1, 4, 9])])[1]
        for first, last in ((0, 40), (40, 41), (41, 60))
    ]
    (expected,) = logits(exact, contiguous(exact), [(PROMPT, 0, [0])])
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-5)  # logits are float32


@pytest.mark.parametrize("family", CONFIGS)
def test_quantized_weights_and_keys(family: str) -> None:
    """Errors of most rows are those of 8 bits, in a few another expert is chosen; a part that is quantized wrongly, or
    not at all where others are, shows in all.
    """
    reference, model = models(family)
    (expected,) = logits(model, contiguous(model), [(PROMPT, 0, [0])])
    quantized = ours(reference, policy=WeightPolicy(isq=IsqType.Q8_0))
    (own,) = logits(quantized, contiguous(quantized), [(PROMPT, 0, [0])])
    assert 0 < _error(own, expected) < 0.15
    (own,) = logits(model, paged(16, PagedCacheType.F8E4M3)(model), [(PROMPT, 0, [0, 1, 2, 3])])
    assert 0 < _error(own, expected) < 0.15


def test_an_activation_has_its_constants_without_a_tensor() -> None:
    """A checkpoint may leave out what is not learned."""
    reference, model = models("apertus")
    tensors = {name: each for name, each in reference.state_dict().items() if not name.endswith((".beta", ".eps"))}
    own = load_model(reference.config.to_dict(), DictSource(tensors), dtype=torch.float32, placement=CPU)
    (expected,), (found,) = (logits(each, contiguous(each), [(PROMPT, 0, [0])]) for each in (model, own))
    torch.testing.assert_close(found, expected)
    for name, wrong in (("alpha_p", torch.ones(2)), ("alpha_n", torch.ones(96)), ("beta", torch.ones(2))):
        changed = reference.state_dict() | {f"model.layers.1.mlp.act_fn.{name}": wrong}
        with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.act_fn\.{name}"):
            load_model(reference.config.to_dict(), DictSource(changed), dtype=torch.float32, placement=CPU)


def _error(own: Tensor, expected: Tensor) -> float:
    """Return the median over rows of the relative squared error."""
    return float(((own - expected).square().mean(-1) / expected.square().mean(-1)).median())


@needs_library
@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in NOT_FUSED])
def test_fused_layers(family: str) -> None:
    """All layers in one native call: float32 weights and products, so that nothing but the order of sums differs."""
    reference, model = models(family)
    (expected,) = logits(model, contiguous(model), [(PROMPT, 0, [0])])
    packed = ours(reference, policy=WeightPolicy(workspace=workspace(num_threads=2)))
    settings = PoolSettings(block_size=16, dtype=torch.float32, device=CPU)
    backend = NativePagedBackend(packed.config, settings, 64, workspace=workspace(num_threads=2))
    assert why_not_fused(packed, backend) is None
    native = FusedDecoderModel(packed, backend)
    parts = [
        logits(native, backend, [([7], 0, [1]), (PROMPT[first:last], first, range(20, 40))])[1]
        for first, last in ((0, 40), (40, 41), (41, 60))
    ]
    assert (torch.cat(parts) - expected).abs().max() < 1e-3 * expected.abs().max()


@needs_library
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "granitemoeshared", "gemma4 26B", "afmoe"])
def test_experts_beside_quantized_mlps_depend_on_no_chunks(family: str) -> None:
    """Bit by bit: tokens of a prompt are multiplied by the form of the shared experts' weights for many rows."""
    packed = ours(models(family)[0], policy=WeightPolicy(isq=IsqType.Q8_0, workspace=workspace(num_threads=2)))
    settings = PoolSettings(block_size=16, dtype=torch.float32, device=CPU)
    backend = NativePagedBackend(packed.config, settings, 64, workspace=workspace(num_threads=2))
    native = FusedDecoderModel(packed, backend)
    (whole,) = logits(native, backend, [(PROMPT, 0, range(20, 40))], num_prompt_tokens={0: 60})
    parts = [
        logits(native, backend, [([7], 0, [1]), (PROMPT[first:last], first, range(20, 40))], num_prompt_tokens={1: 60})
        for first, last in ((0, 40), (40, 41), (41, 60))
    ]
    assert torch.equal(torch.cat([part for _, part in parts]), whole)


@needs_library
@pytest.mark.parametrize("family", NOT_FUSED)
def test_layers_that_are_not_fused_say_why(family: str) -> None:
    packed = ours(models(family)[0], policy=WeightPolicy(workspace=workspace(num_threads=2)))
    settings = PoolSettings(block_size=16, dtype=torch.float32, device=CPU)
    backend = NativePagedBackend(packed.config, settings, 64, workspace=workspace(num_threads=2))
    assert NOT_FUSED[family] in (why_not_fused(packed, backend) or "")
    # The engine chooses another backend where the native one cannot keep the keys.
    engine = EngineConfig(num_blocks=64)
    setup = AttentionSetup(
        model=packed.config, engine=engine, dtype=torch.float32, device=CPU, workspace=workspace(num_threads=2)
    )
    chosen = choose_storage(setup).make(64)
    with pytest.raises(ConfigError, match=f"with_batch_invariance = True .*{re.escape(NOT_FUSED[family])}"):
        fuse(packed, chosen, BuildSettings(batch_invariance=True))
