"""Reading config.json: forms of several years, what configs leave out, and what cannot be used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import odd_configs
import pytest
from test_recurrent_families import CONFIGS as RECURRENT
from transformers import AutoConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, has_head, ranks_texts, read_config, supported_families
from tiny import FAMILIES, build_model
from tiny_vision import VISION_FAMILIES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


def read(**changes: Any) -> DecoderConfig:
    return read_config(LLAMA | changes)


def test_families_are_found_by_file_name() -> None:
    assert set(supported_families()) == {
        *FAMILIES,
        *odd_configs.FAMILIES,
        *VISION_FAMILIES,
        *("lighton_ocr", "llava_onevision", "video_llama_3", "vipllava"),  # tests/test_vision_door.py tries these
        *(config.get("model_type", name) for name, config in RECURRENT.items()),
        "gemma3",
        *("gemma4_text", "gemma4_assistant", "gemma4_unified_assistant"),
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
    }


def test_the_oldest_form() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 16, False)
    assert config.ropes == (RopeConfig(rotary_dim=16, original_max_position=4096),) * 3
    assert config.sliding_windows == (None, None, None)
    assert config.attention_scale == 0.25
    assert config.activation is Activation.SILU


def test_both_forms_of_rope_settings_mean_the_same() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = read(rope_theta=500_000.0, rope_scaling={"rope_type": "llama3", **llama3})
    oldest = read(rope_theta=500_000.0, rope_scaling={"type": "llama3", **llama3})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, **llama3})
    assert old == oldest == new
    assert new.ropes[0].kind is RopeKind.LLAMA3
    assert new.ropes[0].theta == 500_000.0
    assert new.ropes[0].original_max_position == 8192


def test_both_forms_of_gemma3s_two_ropes_mean_the_same() -> None:
    common = LLAMA | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read_config(common | {"rope_theta": 1e6, "rope_local_base_freq": 20_000.0, "rope_scaling": scaling})
    new = read_config(
        common
        | {
            "rope_parameters": {
                "full_attention": scaling | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            }
        }
    )
    assert old == new
    assert [rope.theta for rope in new.ropes] == [20_000.0] * 5 + [1e6]
    assert [window is None for window in new.sliding_windows] == [False] * 5 + [True]


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_transformers(family: str) -> None:
    reference: Any = build_model(family)
    config = read_config(reference.config.to_dict())
    layers = reference.get_decoder().layers
    assert len(layers) == config.num_layers
    assert config.attention_scale == pytest.approx(layers[0].self_attn.scaling)
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    if family in ("mistral", "mixtral"):  # which keep it in the config only
        windows = [reference.config.sliding_window] * len(layers)
    assert list(config.sliding_windows) == windows


def test_gemma3_with_images_may_leave_its_text_config_nearly_empty() -> None:
    """As the released models do."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = read_config(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {"model_type": "gemma3_text", "rope_scaling": scaling, **text},
        }
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.tie_embeddings
    assert config.sliding_windows[4:7] == (1024, None, 1024)
    assert (config.ropes[5].theta, config.ropes[5].factor, config.ropes[0].theta) == (1e6, 8.0, 1e4)


def test_a_window_that_null_turns_off() -> None:
    mistral = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
    assert read_config(mistral).sliding_windows == (4096,) * 3
    assert read_config(mistral | {"sliding_window": None}).sliding_windows == (None,) * 3


def test_windows_of_mistral_are_where_its_layer_types_say() -> None:
    mistral = LLAMA | {"num_key_value_heads": 4, "sliding_window": 100}
    types = ["full_attention", "sliding_attention", "full_attention"]
    for model_type in ("mistral", "ministral"):
        config = read_config(mistral | {"model_type": model_type, "architectures": [], "layer_types": types})
        assert config.sliding_windows == (None, 100, None)
        assert config.window is None
        assert read_config(mistral | {"model_type": model_type, "architectures": []}).sliding_windows == (100,) * 3


def test_fields_that_transformers_leaves_unread_change_nothing() -> None:
    assert read(partial_rotary_factor=0.5) == read()
    gemma = LLAMA | {"model_type": "gemma3_text", "architectures": []}
    assert read_config(gemma | {"attn_logit_softcapping": 50.0}) == read_config(gemma)
    assert read_config(gemma | {"final_logit_softcapping": 30.0}).logit_softcap == 30.0
    with_images = {"model_type": "gemma3", "text_config": gemma | {"final_logit_softcapping": 30.0}}
    assert read_config(with_images).logit_softcap is None


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen2_moe", "qwen3"])
def test_layers_that_would_have_a_window_of_no_size_are_refused(model_type: str) -> None:
    """Transformers raises an error, or gives them a window of nothing."""
    config = LLAMA | {"model_type": model_type, "architectures": [], "num_key_value_heads": 4, "sliding_window": None}
    with pytest.raises(CheckpointError, match=r"layer_types = .* no sliding_attention"):
        read_config(config | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]})


def test_layers_of_different_shapes_are_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="per_layer_config"):
        read(per_layer_config={"1": {"intermediate_size": 32}})


def test_qwen_windows_begin_at_a_layer() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
    qwen |= {"sliding_window": 100}
    assert read_config(qwen).sliding_windows == (None,) * 3
    assert read_config(qwen | {"use_sliding_window": True, "max_window_layers": 1}).sliding_windows == (None, 100, 100)


def test_which_layers_of_qwen3_moe_have_experts() -> None:
    def layers(**changes: Any) -> frozenset[int]:
        moe = read_config(QWEN3_MOE | {"num_hidden_layers": 4} | changes).moe
        assert moe is not None
        return moe.layers

    assert layers() == layers(mlp_only_layers=None) == {0, 1, 2, 3}
    assert layers(decoder_sparse_step=2) == {1, 3}
    assert layers(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == {1}
    with pytest.raises(CheckpointError, match="mlp_only_layers = 2: expected a list of whole numbers"):
        layers(mlp_only_layers=2)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_mean_the_same(key: str) -> None:
    for config in (MIXTRAL, QWEN3_MOE):
        moe = read_config(config | {key: 16}).moe
        assert moe is not None
        assert moe.num_experts == 16
    moe = read_config(MIXTRAL | {"num_local_experts": 16, "num_experts": None}).moe
    assert moe is not None
    assert moe.num_experts == 16


@pytest.mark.parametrize(("family", "config_class"), [("mixtral", MixtralConfig), ("qwen3_moe", Qwen3MoeConfig)])
def test_what_configs_of_experts_leave_out(family: str, config_class: Any) -> None:
    """As transformers fills it in."""
    expected = config_class()
    stated = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    config = read_config({key: getattr(expected, key) for key in stated} | {"model_type": family})
    assert config.moe is not None
    assert config.moe.num_experts == expected.num_experts
    assert config.moe.num_experts_per_token == expected.num_experts_per_tok
    assert config.moe.intermediate_size == getattr(expected, "moe_intermediate_size", expected.intermediate_size)
    assert config.moe.renormalize == getattr(expected, "norm_topk_prob", True)
    assert config.norm_eps == expected.rms_norm_eps
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.max_position == expected.max_position_embeddings
    assert config.ropes[0].theta == expected.rope_parameters["rope_theta"]
    assert config.window is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1"),
        ({"n_group": 8, "topk_group": 4}, "n_group = 8"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_other_kinds_are_refused(family: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=rf"config\.json: {field} is not supported .* of {family}"):
        read(model_type=family, architectures=[], num_key_value_heads=4, **changes)


def test_phi3_names_longrope_otherwise() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 1024}
    for name in ("su", "yarn", "longrope"):
        rope = read_config(phi | {"rope_scaling": {"type": name, **factors}}).ropes[0]
        assert (rope.kind, rope.factor, rope.original_max_position) == (RopeKind.LONGROPE, 4.0, 1024)


def test_a_config_made_from_gguf_names_no_class() -> None:
    config = dict(LLAMA)
    del config["architectures"]
    assert read_config(config) == read()


@pytest.mark.parametrize("model_type", ["gpt2", "loading", "", "../llama", "family"])
def test_an_unknown_model_type_is_refused_with_what_is_known(model_type: str) -> None:
    with pytest.raises(UnsupportedArchitectureError) as raised:
        read(model_type=model_type)
    assert raised.value.architecture == model_type
    assert "llama" in raised.value.supported
    assert "loading" not in raised.value.supported


def test_another_task_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="LlamaForTokenClassification"):
        read(architectures=["LlamaForTokenClassification"])
    with pytest.raises(UnsupportedArchitectureError, match="encoder"):
        read_config(LLAMA | {"model_type": "gemma2", "architectures": [], "use_bidirectional_attention": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, r"hidden_size = '64': expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: expected a divisor"),
        ({"hidden_act": "gelu_10"}, "hidden_act = 'gelu_10': expected one of silu"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: expected true or false"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type = 'proportional'"),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope_scaling.type = 'axial'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor = .*: expected 8 numbers"),
        ({"rope_theta": 1}, "rope_theta = 1: expected a number above 1"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings = 1"),
        ({"rope_scaling": {"rope_type": "llama3", "high_freq_factor": 1.0}}, "high_freq_factor = 1.0: expected more"),
        ({"rope_scaling": [1]}, "rope_scaling = .*: expected an object"),
        ({"model_type": "phi3", "architectures": [], "partial_rotary_factor": 0.2}, "3 of 16 elements"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "partial_rotary_factor = 0.5: expected 1",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = .*: expected a list of strings"),
        ({"model_type": "qwen2", "architectures": [], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"model_type": "qwen2", "architectures": [], "layer_types": ["a", "b", "c"]}, "layer_types"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts = 0"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: expected at most the number of experts, 8"),
        ({"model_type": 3}, "model_type = 3: expected a string"),
        ({"rope_scaling": {"inv_freq_divisors": ["a"]}}, "expected a list of numbers"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


@pytest.mark.parametrize("model_type", [name for name, each in supported_families().items() if hasattr(each, "sizes")])
def test_a_section_may_leave_out_what_transformers_fills_in(model_type: str) -> None:
    """As those of released models do: transformers writes what differs from the class alone."""
    family = supported_families()[model_type]
    assert isinstance(family, DecoderFamily)
    section = odd_configs.NEEDED.get(model_type, {})
    whole = AutoConfig.for_model(model_type, **section).to_dict()
    assert family.read_section(ConfigFields({"model_type": model_type, **section})) == read_config(whole)


def test_apertus_scales_positions_unless_its_config_says_otherwise() -> None:
    """As in the released models, which state it in the older form, and in transformers' class, which ignores a base of
    frequencies that stands alone.
    """
    config = LLAMA | {"model_type": "apertus", "architectures": ["ApertusForCausalLM"], "hidden_act": "xielu"}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    released = {"rope_theta": 12_000_000, "rope_scaling": {**scaling, "rope_type": "llama3", "type": "llama3"}}
    others = {"qk_norm": True, "post_norm": False, "mlp_bias": False, "attention_bias": False, "hidden_dropout": 0.0}
    found = read_config(config | released | others)
    assert (found.activation, found.gated_mlp, found.qk_norm) == (Activation.XIELU, False, True)
    assert (found.ropes[0].kind, found.ropes[0].theta) == (RopeKind.LLAMA3, 12_000_000)
    assert read_config(config) == read_config(config | {"rope_theta": 500.0}) == found
    plain = read_config(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}).ropes[0]
    assert (plain.kind, plain.theta) == (RopeKind.DEFAULT, 500.0)
    with pytest.raises(CheckpointError, match="hidden_act = 'xielu'"):  # whose layers would have numbers of their own
        read(hidden_act="xielu")


def test_ministral3_within_mistral3() -> None:
    """As the released models have it: queries grow with their position, and embeddings may be tied."""
    text = {"model_type": "ministral3", **{key: LLAMA[key] for key in ("vocab_size", "hidden_size")}}
    text |= {"intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    whole = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    config = read_config(whole | {"tie_word_embeddings": False})
    assert (config.model_type, config.tie_embeddings, config.head_dim) == ("ministral3", False, 128)
    rope = config.ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_position) == (RopeKind.YARN, 16.0, 16_384)
    assert rope.query_scale_beta == 0.1


def test_llavas_section_has_the_vocabulary_alone() -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    llava = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    config = read_config(llava)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32064, 4096, 11008)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 32, 128)
    with pytest.raises(CheckpointError, match="num_hidden_layers is missing"):  # a model's own config states it
        read_config(text)


@pytest.mark.parametrize("model_type", ["exaone4", "cohere2", "gemma3_text"])
def test_a_pattern_of_windows_is_unread_beside_the_types_of_layers(model_type: str) -> None:
    """EXAONE 4.0 32B has "LLLG" there, which transformers leaves alone, too."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = LLAMA | {"model_type": model_type, "architectures": [], "num_key_value_heads": 4, "sliding_window": 100}
    assert read_config(config | {"sliding_window_pattern": "LLLG", "layer_types": types}).sliding_windows == (
        (100, None, 100)
    )
    with pytest.raises(CheckpointError, match="sliding_window_pattern = 'LLLG': expected a whole number"):
        read_config(config | {"sliding_window_pattern": "LLLG"})


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("phimoe", "PhiMoEForCausalLM"), ("mpt", "MPTForCausalLM"), ("llama", "LLaMAForCausalLM"), ("mpt", "MPTModel")],
)
def test_classes_by_their_makers_names(model_type: str, name: str) -> None:
    """Phi-3.5-MoE and MPT were released before transformers had them, which asks for no name."""
    config = AutoConfig.for_model(model_type).to_dict() | {"architectures": [name]}
    assert read_config(config).model_type == model_type
    assert has_head(config) == name.endswith("ForCausalLM")
    with pytest.raises(UnsupportedArchitectureError, match="ForSequenceClassification"):
        read_config(config | {"architectures": [name + "ForSequenceClassification"]})


def test_classes_that_make_numbers_of_texts() -> None:
    """transformers has one for most families, of the same shape: a layer in the output projection's place."""
    families = [
        name for name, family in supported_families().items() if family.architectures[0].endswith("ForCausalLM")
    ]
    classes = {name: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(name) for name in families}
    assert sum(each is not None for each in classes.values()) > 25
    for model_type, name in classes.items():
        config = {"model_type": model_type, "architectures": [name or "x"]}
        assert (ranks_texts(config), has_head(config)) == (name is not None, name is None)
    assert not ranks_texts({"model_type": "llama", "architectures": ["LlamaModel"]})
    assert not ranks_texts({"model_type": "llama"})
    with pytest.raises(
        UnsupportedArchitectureError, match="Gemma3ForSequenceClassification"
    ):  # it has an image encoder
        read_config({"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"]})


def test_only_the_file_of_the_family_is_imported() -> None:
    """And a name from a config that is not a file of the package imports nothing."""
    code = """
import sys
from paged_sdk.models.family import (has_family, has_head)
config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
assert has_family(config) and has_head(config)
others = ("", "no such", "..build.loaded_model", "llama.x", "a" * 300)
assert not any(has_family({"model_type": name}) for name in others)
found = {name for name in ("llama", "gemma3", "mpt", "qwen3") if f"paged_sdk.models.{name}" in sys.modules}
assert found == {"qwen3"}, found
assert "paged_sdk.build.loaded_model" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
