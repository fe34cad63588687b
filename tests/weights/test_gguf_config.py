"""Configuration from GGUF metadata: what the tiny models of other tests do not show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MixtralConfig

import paged_sdk
from gguf_files import LLAMA, llama_tensors, write_gguf
from paged_sdk.config.rope import RopeKind
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.family import read_config
from paged_sdk.weights.gguf.config import config_from_gguf
from paged_sdk.weights.gguf.file import GgufFile
from paged_sdk.weights.gguf.names import ARCHITECTURES

HALF_HEAD = 4  # rotary frequencies of the test models


def config_of(
    directory: Path,
    *,
    architecture: str = "llama",
    layers: int = 1,
    tensors: dict[str, Any] | None = None,
    leave_out: str = "",
    **values: Any,
) -> dict[str, Any]:
    """Return the config of a file with :data:`LLAMA`'s metadata, changed.

    :param values: values of the architecture's keys, with ``__`` for a dot
    :param leave_out: the architecture's key to leave out
    """
    metadata = {key.replace("llama", architecture, 1): value for key, value in LLAMA.items()}
    metadata |= {f"{architecture}.block_count": layers}
    metadata |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    metadata.pop(f"{architecture}.{leave_out}", None)
    stored: dict[str, Any] = llama_tensors(layers)
    if known := ARCHITECTURES.get(architecture):
        stored = {name: values for name, values in stored.items() if known.hugging_face_name(name) is not None}
    stored |= tensors or {}
    file = GgufFile(write_gguf(directory / "model.gguf", metadata, stored, architecture=architecture))
    return config_from_gguf(file.metadata, file.tensors, file.path)


def test_plain_llama(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config["rope_scaling"] is None
    assert config["rope_theta"] == 10_000.0
    assert config["tie_word_embeddings"]
    assert (config["vocab_size"], config["head_dim"]) == (48, 8)
    assert LlamaConfig(**config).rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}


def test_untied_output(tmp_path: Path) -> None:
    assert not config_of(tmp_path, tensors={"output.weight": np.zeros((48, 32), np.float32)})["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("values", "head_dim"),
    [
        ({"attention__key_length": 16, "attention__value_length": 16, "rope__dimension_count": 16}, 16),
        ({"rope__dimension_count": 16}, 16),  # files of before key_length
        ({}, 8),
    ],
)
def test_head_dim(tmp_path: Path, values: dict[str, Any], head_dim: int) -> None:
    assert config_of(tmp_path, **values)["head_dim"] == head_dim


def test_windows_that_llama_cpp_ignores(tmp_path: Path) -> None:
    config = config_of(tmp_path, attention__sliding_window=64)
    assert config["model_type"] == "llama"
    assert "sliding_window" not in config
    assert config_of(tmp_path, architecture="phi3", attention__sliding_window=64)["sliding_window"] is None
    assert config_of(tmp_path, architecture="qwen2", attention__sliding_window=64)["sliding_window"] is None
    experts = config_of(tmp_path, attention__sliding_window=64, expert_count=8, expert_used_count=2)
    assert read_config(experts).window is None


def test_counts_given_for_each_layer(tmp_path: Path) -> None:
    assert config_of(tmp_path, layers=2, attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedArchitectureError, match="head_count_kv that differs from layer to layer"):
        config_of(tmp_path, layers=2, attention__head_count_kv=[2, 4])


class TestRopeScaling:
    def test_llama3_divisors(self, tmp_path: Path) -> None:
        divisors = [1.0, 1.5, 8.0, 8.0]
        config = config_of(tmp_path, tensors={"rope_freqs.weight": np.array(divisors, np.float32)})
        assert config["rope_scaling"] == {"rope_type": "default", "inv_freq_divisors": divisors}

    def test_divisors_must_fit_the_head(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.* shape \[5\]: expected \[4\]"):
            config_of(tmp_path, tensors={"rope_freqs.weight": np.ones(5, np.float32)})

    @pytest.mark.parametrize("named", [{"rope__scaling__type": "linear"}, {}])
    def test_linear(self, tmp_path: Path, named: dict[str, Any]) -> None:
        config = config_of(tmp_path, rope__scaling__factor=4.0, **named)
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def test_linear_of_the_first_files(self, tmp_path: Path) -> None:
        assert config_of(tmp_path, rope__scale_linear=2.0)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}

    @pytest.mark.parametrize("values", [{"type": "none", "factor": 4.0}, {"factor": 1.0}, {"factor": 0.0}])
    def test_none(self, tmp_path: Path, values: dict[str, Any]) -> None:
        prefixed = {f"rope__scaling__{key}": value for key, value in values.items()}
        assert config_of(tmp_path, **prefixed)["rope_scaling"] is None

    def test_yarn(self, tmp_path: Path) -> None:
        config = config_of(
            tmp_path,
            architecture="qwen2",
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=32,
            rope__scaling__attn_factor=1.25,
        )
        assert config["rope_scaling"] == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "gguf_attn_factor": 1.25,
        }

    def test_keys_of_yarn_that_llama_cpp_does_not_read(self, tmp_path: Path) -> None:
        plain = config_of(tmp_path, rope__scaling__type="yarn", rope__scaling__factor=4.0)
        unread: dict[str, Any] = {
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
            "yarn_attn_factor": 1.25,
            "yarn_log_multiplier": 0.1,
        }
        prefixed: dict[str, Any] = {f"rope__scaling__{key}": value for key, value in unread.items()}
        assert config_of(tmp_path, rope__scaling__type="yarn", rope__scaling__factor=4.0, **prefixed) == plain

    @pytest.mark.parametrize("values", [{}, {"factor": 4.0}, {"type": "none"}, {"type": "yarn", "factor": 4.0}])
    def test_the_attention_factor_scales_every_kind(self, tmp_path: Path, values: dict[str, Any]) -> None:
        """Also beside yarn's own, as llama.cpp multiplies them."""
        prefixed: dict[str, Any] = {f"rope__scaling__{key}": value for key, value in values.items()}
        factors: list[dict[str, Any]] = [{}, {"rope__scaling__attn_factor": 1.5}]
        ropes = [
            RotaryEmbedding(read_config(config_of(tmp_path, **prefixed, **more)).ropes[0], device=torch.device("cpu"))
            for more in factors
        ]
        plain, scaled = (rope.at(torch.arange(9)) for rope in ropes)
        torch.testing.assert_close(scaled.cos, 1.5 * plain.cos)
        torch.testing.assert_close(scaled.sin, 1.5 * plain.sin)
        own = 1 + 0.1 * math.log(4.0) if values.get("type") == "yarn" else 1.0
        assert float(plain.cosines[0, 0]) == pytest.approx(own)

    def test_divisors_beside_a_factor_are_both_applied(self, tmp_path: Path) -> None:
        divisors = np.array([1.0, 1.5, 8.0, 8.0], np.float32)
        both = config_of(tmp_path, tensors={"rope_freqs.weight": divisors}, rope__scaling__factor=2.0)
        doubled = config_of(tmp_path, tensors={"rope_freqs.weight": 2 * divisors})
        first, second = (
            RotaryEmbedding(read_config(config).ropes[0], device=torch.device("cpu")).at(torch.arange(50))
            for config in (both, doubled)
        )
        torch.testing.assert_close(first.cos, second.cos)

    @pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "gemma3"])
    def test_a_part_of_each_head_is_refused(self, tmp_path: Path, architecture: str) -> None:
        with pytest.raises(UnsupportedArchitectureError, match="4 of 8 elements per head rotated"):
            config_of(tmp_path, architecture=architecture, rope__dimension_count=4)

    def test_longrope_of_llama(self, tmp_path: Path) -> None:
        """It is read by its kind; a file that does not state a factor on cos and sin has none."""
        factors = np.linspace(1, 2, HALF_HEAD, dtype=np.float32)
        tensors = {"rope_factors_short.weight": factors, "rope_factors_long.weight": 2 * factors}
        values: dict[str, Any] = {
            "rope__scaling__type": "longrope",
            "rope__scaling__original_context_length": 32,
            "context_length": 128,
        }
        (rope,) = read_config(config_of(tmp_path, tensors=tensors, **values)).ropes
        assert (rope.kind, rope.switch, rope.attention_factor) == (RopeKind.LONGROPE, 32, 1.0)
        with pytest.raises(UnsupportedArchitectureError, match=r"rope\.scaling\.factor = 4\.0 beside LongRoPE"):
            config_of(tmp_path, tensors=tensors, rope__scaling__factor=4.0, **values)

    def test_longrope_of_phi3(self, tmp_path: Path) -> None:
        short, long = np.linspace(1, 2, HALF_HEAD, dtype=np.float32), np.linspace(1, 64, HALF_HEAD, dtype=np.float32)
        config = config_of(
            tmp_path,
            architecture="phi3",
            tensors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
            rope__dimension_count=8,
            rope__scaling__original_context_length=32,
            rope__scaling__attn_factor=1.25,
            attention__sliding_window=48,
        )
        assert config["rope_scaling"] == {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "original_max_position_embeddings": 32,
            "attention_factor": 1.25,
        }
        assert config["original_max_position_embeddings"] == 32

    def test_phi3_may_rotate_a_part_of_each_head(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, architecture="phi3", rope__dimension_count=6, attention__sliding_window=0)
        assert config["partial_rotary_factor"] == 0.75
        assert config["sliding_window"] is None

    @pytest.mark.parametrize("kind", ["longrope", "ntk"])
    def test_others_are_refused(self, tmp_path: Path, kind: str) -> None:
        with pytest.raises(UnsupportedArchitectureError, match=f"rope scaling '{kind}'"):
            config_of(tmp_path, rope__scaling__type=kind)


class TestGemma:
    def test_gemma2_defaults_are_the_models(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, architecture="gemma2", layers=4, attention__key_length=256)
        expected = Gemma2Config(num_hidden_layers=4)
        for key in ("layer_types", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
            assert config[key] == getattr(expected, key)
        assert config["query_pre_attn_scalar"] == expected.query_pre_attn_scalar == 256
        assert config["hidden_activation"] == expected.hidden_activation

    def test_gemma3_defaults_are_the_models(self, tmp_path: Path) -> None:
        config = config_of(
            tmp_path,
            architecture="gemma3",
            layers=13,
            attention__sliding_window=512,
            attention__key_length=256,
            rope__freq_base=1_000_000.0,
            rope__scaling__type="linear",
            rope__scaling__factor=8.0,
        )
        expected: Any = Gemma3TextConfig(num_hidden_layers=13, sliding_window=512)
        assert config["model_type"] == expected.model_type
        for key in ("layer_types", "sliding_window", "final_logit_softcapping", "query_pre_attn_scalar"):
            assert config[key] == getattr(expected, key)
        assert config["rope_theta"] == expected.rope_parameters["full_attention"]["rope_theta"]
        assert config["rope_local_base_freq"] == expected.rope_parameters["sliding_attention"]["rope_theta"]
        # Only layers that see everything are stretched.
        read: Any = Gemma3TextConfig(**config)
        assert read.rope_parameters["full_attention"]["factor"] == 8.0
        assert read.rope_parameters["sliding_attention"]["rope_type"] == "default"

    def test_what_gemma3_leaves_out_is_what_llama_cpp_fills_in(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, architecture="gemma3", layers=2, attn_logit_softcapping=50.0)
        assert config["rope_theta"] == 10_000.0
        assert config["attn_logit_softcapping"] is None

    @pytest.mark.parametrize(
        ("architecture", "key"), [("gemma2", "rope__freq_base_swa"), ("gemma3", "rope__scaling__attn_factor")]
    )
    def test_scales_of_some_layers_alone_are_refused(self, tmp_path: Path, architecture: str, key: str) -> None:
        values: dict[str, Any] = {key: 500.0}
        with pytest.raises(UnsupportedArchitectureError, match=key.replace("__", r"\.")):
            config_of(tmp_path, architecture=architecture, **values)

    def test_gemma3_without_a_window(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, architecture="gemma3", layers=2)
        assert config["layer_types"] == ["full_attention"] * 2
        assert config["sliding_window"] is None

    def test_pattern_of_the_file_wins(self, tmp_path: Path) -> None:
        config = config_of(
            tmp_path,
            architecture="gemma3",
            layers=4,
            attention__sliding_window=64,
            attention__sliding_window_pattern=2,
        )
        assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2

    @pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
    def test_the_27b_models_scale_by_the_width_of_all_heads(
        self, tmp_path: Path, architecture: str, layers: int
    ) -> None:
        config = config_of(tmp_path, architecture=architecture, layers=layers, attention__key_length=16)
        assert config["query_pre_attn_scalar"] == 32 // 4


class TestExperts:
    def test_mixtral_is_a_llama_with_experts(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, expert_count=8, expert_used_count=2)
        read: Any = MixtralConfig(**config)
        assert read.model_type == config["model_type"] == "mixtral"
        assert (read.num_local_experts, read.num_experts_per_tok, read.intermediate_size) == (8, 2, 64)
        assert "num_local_experts" not in config_of(tmp_path, expert_count=0)

    @pytest.mark.parametrize(
        "values", [{"expert_weights_scale": 1.0}, {"expert_gating_func": 1}, {"expert_group_count": 0}]
    )
    def test_what_says_nothing_new(self, tmp_path: Path, values: dict[str, Any]) -> None:
        assert config_of(tmp_path, expert_count=8, expert_used_count=2, **values)["model_type"] == "mixtral"

    @pytest.mark.parametrize(("values", "size"), [({"expert_feed_forward_length": 16}, 16), ({}, 32)])
    def test_qwen3moe_as_llama_cpp_fills_it_in(self, tmp_path: Path, values: dict[str, Any], size: int) -> None:
        values |= {"expert_count": 8, "expert_used_count": 2, "expert_weights_norm": False}
        config = config_of(tmp_path, architecture="qwen3moe", **values)
        assert config["norm_topk_prob"] is True
        assert config["moe_intermediate_size"] == size


class TestRefused:
    def test_unknown_architecture_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedArchitectureError, match=r"'mamba': supported are llama, qwen2,.*gemma3"
        ) as caught:
            config_of(tmp_path, architecture="mamba")
        assert caught.value.architecture == "mamba"
        assert "llama" in caught.value.supported

    @pytest.mark.parametrize("name", ["output.bias", "output_norm.bias", "blk.0.attn_norm.bias"])
    def test_biases_that_would_not_be_added(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UnsupportedArchitectureError, match=f"llama model with a tensor '{name}'"):
            config_of(tmp_path, tensors={name: np.ones(32, np.float32)})

    def test_divisors_of_frequencies_where_llama_cpp_has_none(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedArchitectureError, match=r"qwen2 model with a tensor 'rope_freqs\.weight'"):
            config_of(tmp_path, architecture="qwen2", tensors={"rope_freqs.weight": np.ones(4, np.float32)})

    def test_layers_that_the_file_does_not_count(self, tmp_path: Path) -> None:
        """Nor layers that predict further tokens, without the key that counts these."""
        tensors = {"blk.1.attn_norm.weight": np.ones(32, np.float32)}
        with pytest.raises(CheckpointError, match=r"'blk\.1\.attn_norm\.weight', and 1 layers by its metadata"):
            config_of(tmp_path, tensors=tensors)

    def test_granite_without_positions(self, tmp_path: Path) -> None:
        for architecture in ("granite", "granitemoe"):
            values: dict[str, Any] = {"rope__scaling__finetuned": True, "attention__layer_norm_rms_epsilon": 1e-5}
            assert config_of(tmp_path, architecture=architecture, **values)["model_type"] == architecture
            with pytest.raises(UnsupportedArchitectureError, match="model with no positions"):
                config_of(tmp_path, architecture=architecture, **values | {"rope__scaling__finetuned": False})

    def test_experts_where_there_are_none(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedArchitectureError, match="qwen2 model with experts"):
            config_of(tmp_path, architecture="qwen2", expert_count=8)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("expert_shared_count", 1),
            ("expert_shared_feed_forward_length", 64),
            ("expert_group_count", 4),
            ("expert_weights_scale", 2.5),
            ("expert_gating_func", gguf.ExpertGatingFuncType.SIGMOID.value),
        ],
    )
    def test_experts_of_other_kinds(self, tmp_path: Path, key: str, value: float) -> None:
        values: dict[str, Any] = {"expert_count": 8, "expert_used_count": 2, key: value}
        with pytest.raises(UnsupportedArchitectureError, match=rf"llama\.{key}"):
            config_of(tmp_path, **values)

    @pytest.mark.parametrize(
        ("metadata", "architecture", "what"),
        [
            ({"general.type": "adapter", "adapter.type": "lora"}, "llama", "a LoRA adapter for 'llama' models"),
            ({"general.type": "adapter"}, "llama", "a None adapter for 'llama' models"),
            ({"general.type": "mmproj"}, "clip", r"the image encoder of a model \(mmproj\)"),
            ({"general.type": "model"}, "clip", r"the image encoder of a model \(mmproj\)"),
            ({"general.type": "imatrix"}, "llama", "a GGUF 'imatrix', not a model"),
        ],
    )
    def test_what_is_no_model(self, metadata: dict[str, Any], architecture: str, what: str, tmp_path: Path) -> None:
        file = GgufFile(write_gguf(tmp_path / "a.gguf", metadata, {}, architecture=architecture))
        with pytest.raises(CheckpointError, match=f"holds {what}"):
            config_from_gguf(file.metadata, file.tensors, file.path)
        with pytest.raises(CheckpointError, match=f"holds {what}"):
            paged_sdk.write_gguf(file.path, tmp_path / "b.gguf")

    @pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count", "attention.head_count"])
    def test_missing_metadata_is_named(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(CheckpointError, match=rf"metadata llama\.{key} is None"):
            config_of(tmp_path, leave_out=key)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("block_count", "two"),
            ("block_count", 1.0),
            ("block_count", True),
            ("block_count", 0),
            ("attention__head_count_kv", 0),
            ("attention__layer_norm_rms_epsilon", float("nan")),
            ("rope__freq_base", float("inf")),
            ("rope__freq_base", -1.0),
        ],
    )
    def test_values_that_cannot_be(self, tmp_path: Path, key: str, value: Any) -> None:
        with pytest.raises(CheckpointError, match=f"metadata llama.{key.replace('__', '.')} is"):
            config_of(tmp_path, **{key: value})

    def test_positions_in_time_height_and_width(self, tmp_path: Path) -> None:
        found = config_of(tmp_path, architecture="qwen2vl", rope__dimension_sections=[4, 2, 2, 0])
        assert found["rope_scaling"] == {"rope_type": "default", "mrope_section": [4, 2, 2]}
        for wrong in ([4, 4], [4, 2, 1, 1], 8):
            with pytest.raises(CheckpointError, match=r"qwen2vl\.rope\.dimension_sections is"):
                config_of(tmp_path, architecture="qwen2vl", rope__dimension_sections=wrong)

    def test_blocks_that_are_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tensor 'blk\.2999999\.attn_output\.weight'"):
            config_of(tmp_path, block_count=3_000_000)

    def test_odd_heads(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="head size 7 is odd"):
            config_of(tmp_path, attention__key_length=7)

    def test_values_of_another_size_than_keys(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedArchitectureError, match="different head sizes for keys and values"):
            config_of(tmp_path, attention__key_length=8, attention__value_length=16)
