"""Convert the metadata of a GGUF file to Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown
from paged_sdk.weights.gguf.encoders import ENCODERS
from paged_sdk.weights.gguf.families import FAMILIES, biases_of, delta_config, norm_eps
from paged_sdk.weights.gguf.gemma4 import gemma4_assistant_config, gemma4_config
from paged_sdk.weights.gguf.model import WITHOUT_ATTENTION, GgufModel
from paged_sdk.weights.gguf.names import ARCHITECTURES, RANK_HEAD
from paged_sdk.weights.gguf.rope import check_positions, rope_scaling, rope_sections
from paged_sdk.weights.gguf.routing import SHARED_SIZE, gating_functions, routing_keys
from paged_sdk.weights.gguf.tensor import GgufTensor

__all__ = ["GEMMA3_LOCAL_THETA", "GEMMA3_PERIOD", "config_from_gguf", "must_be_model"]

# Gemma's constants, which converters do not write.
_GEMMA2_WINDOW, _GEMMA2_PERIOD = 4096, 2
GEMMA3_PERIOD, GEMMA3_LOCAL_THETA = 6, 10_000.0
# The 27B models scale attention by hidden_size / num_heads, all others by head_dim; they are told apart by depth.
_WIDE_SCALE_LAYERS = MappingProxyType({"gemma2": 46, "gemma3": 62})

# Architectures that may have experts, and keys of shared experts and of their choice, which only some of them have.
_MIXTURES = frozenset(
    {
        *("llama", "qwen2moe", "qwen3moe", "qwen3vlmoe", "qwen3next", "qwen35moe", "olmoe", "gpt-oss", "lfm2moe"),
        *("glm4moe", "dots1", "ernie4_5-moe", "minimax-m2", "hunyuan-moe", "exaone-moe", "deepseek2"),
        *("granitemoe", "granitehybrid", "nemotron_h_moe", "gemma4", "afmoe"),
    }
)
_OTHER_MIXTURES = ("expert_shared_count", "expert_group_count", SHARED_SIZE)

_QKV = ("attn_q", "attn_k", "attn_v")

_TOKEN_IDS = MappingProxyType(
    {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], path: Path) -> dict[str, Any]:
    """Return the model's configuration as Hugging Face's ``config.json`` has it.

    A llama3 rope scaling becomes ``rope_scaling["inv_freq_divisors"]``, a float for each frequency, since GGUF stores
    the divisors instead of the formula's parameters.

    :param metadata: the metadata of the (first) file
    :param tensors: the tensors of all parts, by GGUF name
    :param path: the file, for messages
    :raises UnsupportedArchitectureError: the architecture, or a feature that the file uses, is not supported
    :raises CheckpointError: required metadata or a required tensor is missing or malformed
    """
    model = GgufModel(metadata, tensors, path, _architecture(metadata, path))
    model.check_layers()
    config = _common(model)
    if model.architecture not in WITHOUT_ATTENTION:
        check_positions(model)
        config |= _attention(model)
    config |= _biases(model) | _experts(model) | _FAMILIES[model.architecture](model)
    if config["model_type"] == "falcon":
        del config["head_dim"]  # transformers' class computes it, and has no setter
    if config["model_type"] == "gemma4_assistant":
        config["text_config"] = config | {"model_type": "gemma4_text"}
    if model.architecture in ENCODERS and (scaling := config.pop("rope_scaling")) is not None:
        raise model.unsupported(f"rope scaling {shown(scaling)}")
    _check_biases(model, config)
    return config


def must_be_model(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse a file that is not a model, such as an adapter or an image encoder, with an error that says what it is.

    :raises CheckpointError: the file is not a model
    """
    kind, architecture = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if kind == "adapter":
        what = "LoRA" if metadata.get("adapter.type") == "lora" else shown(metadata.get("adapter.type"))
        why = f"a {what} adapter for {shown(architecture)} models: load such a model, and this file as its adapter"
    elif kind == "mmproj" or architecture == "clip":  # older files say model
        why = "the image encoder of a model (mmproj): load the GGUF file of the model, and pass this one as its mmproj"
    elif kind != "model":
        why = f"a GGUF {shown(kind)}, not a model"
    else:
        return
    raise CheckpointError(f"{path} holds {why}", path=path)


def _architecture(metadata: Mapping[str, Any], path: Path) -> str:
    must_be_model(metadata, path)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{path} has GGUF architecture {shown(architecture)}: supported are {', '.join(ARCHITECTURES)}",
            path=path,
            architecture=str(architecture)[:100],
            supported=ARCHITECTURES,
        )
    return architecture


def _check_biases(model: GgufModel, config: Mapping[str, Any]) -> None:
    """Refuse tensors of biases that the model would ignore.

    :raises UnsupportedArchitectureError: the file has such a tensor
    """
    added = set(_QKV) if config["model_type"] in ("qwen2", "qwen2_moe", "qwen2_vl_text") else set[str]()
    if config.get("attention_bias"):
        added |= {*_QKV, "attn_output"}
    if config.get("mlp_bias"):
        added |= {"ffn_gate", "ffn_up", "ffn_down"}
    added |= biases_of(model.architecture)
    for name in model.tensors:
        if name.endswith(".bias") and name.split(".")[-2] not in added:
            raise model.unsupported(f"a tensor {shown(name)}")


def _attention(model: GgufModel) -> dict[str, Any]:
    num_heads = model.integer("attention.head_count")
    return {
        "intermediate_size": _mlp_size(model),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(model.of_layers("attention.head_count_kv", num_heads)),
        "head_dim": model.head_dim,
        "max_position_embeddings": model.integer("context_length"),
        "rope_theta": model.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(model),
    }


def _common(model: GgufModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[model.architecture].model_type,
        "vocab_size": model.tensor("token_embd.weight").shape[0],
        "hidden_size": model.integer("embedding_length"),
        "num_hidden_layers": model.num_layers,
        **norm_eps(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "hidden_act": "silu",
    }
    for name, key in _TOKEN_IDS.items():
        token_id = model.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int):
            config[name] = token_id
    return config


def _mlp_size(model: GgufModel) -> int:
    """Return the width of dense MLPs; files of qwen35moe, which has none, state that of an expert alone."""
    if model.architecture == "qwen35moe" and model.metadata.get("qwen35moe.feed_forward_length") is None:
        return model.integer("expert_feed_forward_length")
    return max(model.of_layers("feed_forward_length"))


def _biases(model: GgufModel) -> dict[str, Any]:
    """Return the config's bias fields: for each group of matrices, whether any of them has a bias."""
    there = {name.split(".")[-2] for name in model.tensors if name.endswith(".bias")}
    groups = ARCHITECTURES[model.architecture].bias_groups
    return {field: not there.isdisjoint(stems) for field, stems in groups.items()}


def _experts(model: GgufModel) -> dict[str, Any]:
    """Return the settings of a mixture of experts; an empty dict for dense models."""
    if not model.has_experts:
        return {}
    if model.architecture not in _MIXTURES:
        raise model.unsupported("experts")
    own = routing_keys(model.architecture)
    for key in _OTHER_MIXTURES:
        if key not in own and model.number(key, 0):
            raise model.unsupported(f"metadata {model.architecture}.{key}")
    key = "expert_weights_scale"
    if key not in own and (scale := model.number(key, 0.0)) not in (0.0, 1.0):
        raise model.unsupported(f"metadata {model.architecture}.{key} = {scale}")
    gates = gating_functions(model.architecture)
    if (gate := model.integer("expert_gating_func", gates[-1], minimum=0)) not in gates:
        raise model.unsupported(f"metadata {model.architecture}.expert_gating_func = {gate}")
    return {
        "num_local_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
    }


def _llama(model: GgufModel) -> dict[str, Any]:
    # llama.cpp ignores sliding windows in this architecture, which Mistral's files use too.
    return {"model_type": "mixtral"} if model.has_experts else {}


def _qwen(model: GgufModel) -> dict[str, Any]:
    config: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}
    if model.architecture not in ("qwen2", "qwen2moe", "qwen2vl"):
        config["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
    return config


def _qwen3(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Qwen3. Qwen3-Reranker has a rank head instead of the output projection."""
    ranks = {"architectures": ["Qwen3ForSequenceClassification"]} if RANK_HEAD in model.tensors else {}
    return _qwen(model) | ranks


def _qwen_vl(model: GgufModel) -> dict[str, Any]:
    return _qwen(model) | {
        "rope_scaling": rope_sections(model),
        "num_image_layers": model.integer("n_deepstack_layers", 0, minimum=0),
    }


def _qwen35(model: GgufModel) -> dict[str, Any]:
    return delta_config(model) | {"rope_scaling": rope_sections(model)}


def _qwen2moe(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Qwen2-MoE. As in llama.cpp, routing weights are not normalized to a sum of 1."""
    experts, shared = model.tensor("blk.0.ffn_gate_exps.weight"), model.tensor("blk.0.ffn_gate_shexp.weight")
    if len(experts.shape) != 3 or len(shared.shape) != 2:
        raise model.malformed("the experts' tensors are no matrices")
    return _qwen(model) | {
        "num_experts": model.integer("expert_count"),
        # Older files lack either size, or both.
        "moe_intermediate_size": model.integer("expert_feed_forward_length", experts.shape[1]),
        "shared_expert_intermediate_size": model.integer(SHARED_SIZE, shared.shape[0]),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": "blk.0.attn_q.bias" in model.tensors,
    }


def _qwen3moe(model: GgufModel) -> dict[str, Any]:
    return _qwen(model) | {
        "moe_intermediate_size": model.integer(
            "expert_feed_forward_length",
            model.integer("feed_forward_length") // model.integer("expert_used_count"),
        ),
        "norm_topk_prob": True,  # llama.cpp has no key for it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3vlmoe(model: GgufModel) -> dict[str, Any]:
    return _qwen3moe(model) | _qwen_vl(model)


def _phi3(model: GgufModel) -> dict[str, Any]:
    context = model.integer("context_length")
    return {
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
        "original_max_position_embeddings": model.integer("rope.scaling.original_context_length", context),
        # Files have the window of the training, but llama.cpp disables it.
        "sliding_window": None,
    }


def _gemma2(model: GgufModel) -> dict[str, Any]:
    theta = model.number("rope.freq_base", 10_000.0)
    if (windowed := model.number("rope.freq_base_swa", theta)) != theta:
        raise model.unsupported(f"metadata gemma2.rope.freq_base_swa = {windowed}")
    window = model.integer("attention.sliding_window", _GEMMA2_WINDOW)
    return _gemma(model, window, _GEMMA2_PERIOD) | {
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(model: GgufModel) -> dict[str, Any]:
    if (attn_factor := model.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        raise model.unsupported(f"metadata gemma3.rope.scaling.attn_factor = {attn_factor}")
    window = model.integer("attention.sliding_window", 0, minimum=0)
    return _gemma(model, window, GEMMA3_PERIOD) | {
        "rope_local_base_freq": model.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": model.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma_embedding(model: GgufModel) -> dict[str, Any]:
    return _gemma3(model) | {"use_bidirectional_attention": True}


def _gemma(model: GgufModel, window: int, period: int) -> dict[str, Any]:
    """Return the settings that gemma2 and gemma3 share.

    :param window: the window of sliding layers; 0: all layers have full attention
    :param period: every ``period``-th layer has full attention, unless the file has another period; 0: none has
    """
    wide = model.num_layers == _WIDE_SCALE_LAYERS.get(model.architecture)
    hidden_size, num_heads = model.integer("embedding_length"), model.integer("attention.head_count")
    period = model.integer("attention.sliding_window_pattern", period, minimum=0) if window else 1
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": hidden_size // num_heads if wide else model.head_dim,
        "sliding_window": window or None,
        "layer_types": [
            "full_attention" if period and (layer + 1) % period == 0 else "sliding_attention"
            for layer in range(model.num_layers)
        ],
    }


_FAMILIES: Mapping[str, Callable[[GgufModel], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen,
        "qwen2moe": _qwen2moe,
        "qwen3": _qwen3,
        "qwen2vl": _qwen_vl,
        "qwen3vl": _qwen_vl,
        "qwen3vlmoe": _qwen3vlmoe,
        "qwen35": _qwen35,
        "qwen35moe": _qwen35,
        "qwen3moe": _qwen3moe,
        "phi3": _phi3,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gemma-embedding": _gemma_embedding,
        "gemma4": gemma4_config,
        "gemma4-assistant": gemma4_assistant_config,
        **FAMILIES,
        **ENCODERS,
    }
)
