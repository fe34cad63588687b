"""Translate the settings of models with Mamba-2 layers, which are read as llama.cpp does."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.config.decoder import BranchScales, DecoderConfig, LayerParts
from paged_sdk.config.recurrent import Mamba2Config
from paged_sdk.weights.gguf.granite import granite_multipliers, has_positions
from paged_sdk.weights.gguf.model import GgufModel
from paged_sdk.weights.gguf.routing import SHARED_SIZE, grouped_config

__all__ = [
    "falcon_h1",
    "granitehybrid",
    "mamba2",
    "mamba_metadata",
    "nemotron_h",
    "row_factors",
    "why_not_mamba",
    "with_factors_in_weights",
]

_KINDS: Final = ("linear_attention", "full_attention")
_LATENT_SIZE: Final = "moe_latent_size"


def granitehybrid(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Granite 4, whose layers without KV heads are Mamba-2 layers."""
    width, hidden_size = model.integer("ssm.inner_size"), model.integer("embedding_length")
    if width % hidden_size:
        raise model.unsupported(f"Mamba-2 layers of {width} columns, no multiple of the hidden size {hidden_size},")
    kinds = [_KINDS[count > 0] for count in model.of_layers("attention.head_count_kv")]
    return granite_multipliers(model) | {
        "layer_types": kinds,
        "position_embedding_type": "rope" if has_positions(model) else "nope",
        "num_local_experts": model.integer("expert_count", 0, minimum=0),
        "shared_intermediate_size": model.integer(SHARED_SIZE if model.has_experts else "feed_forward_length"),
        "mamba_expand": width // hidden_size,
        "mamba_n_heads": _heads(model),
        "mamba_n_groups": model.integer("ssm.group_count"),
        "mamba_d_state": model.integer("ssm.state_size"),
        "mamba_d_conv": model.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has_in_some_layer(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": False,
    }


def falcon_h1(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Falcon-H1, whose multipliers are in the file's weights."""
    return {
        "mamba_d_ssm": model.integer("ssm.inner_size"),
        "mamba_n_heads": _heads(model),
        "mamba_n_groups": model.integer("ssm.group_count"),
        "mamba_d_state": model.integer("ssm.state_size"),
        "mamba_d_conv": model.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has_in_some_layer(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": False,
        "projectors_bias": False,
        "mamba_rms_norm": _has_in_some_layer(model, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def mamba2(model: GgufModel) -> dict[str, Any]:
    """Return the settings of a model of Mamba-2 layers alone."""
    heads, width, hidden_size = _heads(model), model.integer("ssm.inner_size"), model.integer("embedding_length")
    if width % hidden_size:
        raise model.unsupported(f"layers of {width} columns, no multiple of the hidden size {hidden_size},")
    return {
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon"),
        "expand": width // hidden_size,
        "num_heads": heads,
        "head_dim": width // heads,
        "n_groups": model.integer("ssm.group_count"),
        "state_size": model.integer("ssm.state_size"),
        "conv_kernel": model.integer("ssm.conv_kernel"),
        "use_conv_bias": _has_in_some_layer(model, "ssm_conv1d.bias"),
        "use_bias": False,
    }


def nemotron_h(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Nemotron-H, whose layers are an MLP, or experts, if they have a width of one, attention if
    they have KV heads, and Mamba-2 layers otherwise.
    """
    widths, counts = model.of_layers("feed_forward_length"), model.of_layers("attention.head_count_kv")
    heads, mlp = _heads(model), "moe" if model.has_experts else "mlp"
    return (_nemotron_experts(model) if model.has_experts else {}) | {
        "layer_norm_epsilon": model.number("attention.layer_norm_rms_epsilon"),
        "layers_block_type": [mlp if width else _KINDS[count > 0] for width, count in zip(widths, counts, strict=True)],
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": heads,
        "mamba_head_dim": model.integer("ssm.inner_size") // heads,
        "n_groups": model.integer("ssm.group_count"),
        "ssm_state_size": model.integer("ssm.state_size"),
        "conv_kernel": model.integer("ssm.conv_kernel"),
        "use_conv_bias": _has_in_some_layer(model, "ssm_conv1d.bias"),
        "use_bias": False,
    }


def _nemotron_experts(model: GgufModel) -> dict[str, Any]:
    return grouped_config(model) | {
        "moe_shared_expert_intermediate_size": model.integer(SHARED_SIZE),
        "moe_latent_size": model.integer(_LATENT_SIZE, 0, minimum=0) or None,
    }


def _heads(model: GgufModel) -> int:
    heads, width = model.integer("ssm.time_step_rank"), model.integer("ssm.inner_size")
    if width % heads:
        raise model.malformed(f"its width of {width} is no multiple of {heads} heads")
    if heads % model.integer("ssm.group_count"):
        raise model.malformed(f"its {heads} heads are no multiple of its groups")
    return heads


def _has_in_some_layer(model: GgufModel, name: str) -> bool:
    return any(each.startswith("blk.") and each.endswith(f".{name}") for each in model.tensors)


def mamba_metadata(config: DecoderConfig, mamba: Mamba2Config) -> dict[str, Any]:
    """Return the GGUF metadata that describes Mamba-2 layers and says which layers have one, by key."""
    values: dict[str, Any] = {
        "ssm.conv_kernel": mamba.kernel_size,
        "ssm.state_size": mamba.state_size,
        "ssm.group_count": mamba.num_groups,
        "ssm.time_step_rank": mamba.num_heads,
        "ssm.inner_size": mamba.width,
    }
    if not config.attention_layers:
        return values
    if not config.recurrent_beside:
        attending = config.attention_layers
        values["attention.head_count_kv"] = [
            config.num_kv_heads if layer in attending else 0 for layer in range(config.num_layers)
        ]
    if config.parts:
        width = config.intermediate_size if config.moe is None else config.moe.intermediate_size
        values["attention.layer_norm_epsilon"] = float(config.norm_eps)  # llama.cpp wants both, and reads the other
        values["feed_forward_length"] = [width if part is LayerParts.MLP else 0 for part in config.parts]
    if config.moe is not None and config.moe.latent_size is not None:
        values[_LATENT_SIZE] = config.moe.latent_size
    # Whether there are positions, where llama.cpp's architecture has models of both kinds.
    values["rope.scaling.finetuned"] = any(rope.rotates for rope in config.ropes)
    return values


def row_factors(config: DecoderConfig) -> dict[str, Tensor]:
    """Return the factors that GGUF has in the rows of falcon-h1's matrices, by the matrix's GGUF name, within a layer
    or outside of them; those that would all be 1 are left out.
    """
    if not config.recurrent_beside:
        return {}
    mamba, scales = _mambas(config)[0], config.branch_scales or BranchScales()
    part_scales = torch.tensor(mamba.part_scales or (1.0,) * 5, dtype=torch.float32)
    inputs = torch.repeat_interleave(part_scales, torch.tensor(mamba.parts))
    queries, keys, hidden = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.hidden_size,
    )
    full = partial(torch.full, dtype=torch.float32)
    factors = {
        "attn_q": full((queries,), scales.attention_input),
        "attn_k": full((keys,), scales.attention_input * scales.key),
        "attn_v": full((keys,), scales.attention_input),
        "attn_output": full((hidden,), scales.attention_output),
        "ssm_in": inputs * mamba.input_scale,
        "ssm_out": full((hidden,), mamba.output_scale),
        "ffn_gate": full((config.intermediate_size,), scales.gate),
        "ffn_down": full((hidden,), scales.mlp_output),
        "token_embd": full((config.vocab_size,), config.embedding_scale or 1.0),
        "output": full((config.vocab_size,), config.logit_scale or 1.0),
    }
    return {name: each for name, each in factors.items() if bool((each != 1.0).any())}


def with_factors_in_weights(config: DecoderConfig) -> DecoderConfig:
    """Return the shape of a model as a file has it that holds :func:`row_factors` in its weights."""
    if not config.recurrent_beside:
        return config
    found = (evolve(each, input_scale=1.0, part_scales=(), output_scale=1.0) for each in _mambas(config))
    return evolve(config, embedding_scale=1.0, logit_scale=1.0, branch_scales=None, recurrent=tuple(found))


def _mambas(config: DecoderConfig) -> list[Mamba2Config]:
    return [each for each in config.recurrent if isinstance(each, Mamba2Config)]


def why_not_mamba(config: DecoderConfig, mamba: Mamba2Config) -> str | None:
    """Return what GGUF, or llama.cpp, lacks for a model with Mamba-2 layers; None: nothing."""
    is_scaled = config.branch_scales not in (None, BranchScales()) or mamba.input_scale != 1.0
    lacks = {
        "biases of Mamba-2's projections": mamba.input_bias or mamba.output_bias,
        "norms before gates": mamba.has_norm and not mamba.gate_first,
        "biases beside multipliers": is_scaled and (config.qkv_bias or config.output_bias or config.mlp_bias),
        "biases of attention in falcon-h1": config.recurrent_beside and (config.qkv_bias or config.output_bias),
        "biases of MLPs": config.mlp_bias and (config.gated_mlp or config.moe is not None),
        "multipliers of embeddings and logits that are tied": config.recurrent_beside
        and config.tie_embeddings
        and (config.embedding_scale or 1.0) != (config.logit_scale or 1.0),
        "models of this family without an MLP": bool(config.attention_layers and config.parts)
        and LayerParts.MLP not in config.parts,
        # llama.cpp asks for these of models of Mamba-2 alone.
        "such models without biases of convolutions": not config.attention_layers and not mamba.conv_bias,
        "such models with layers of another width than twice the model's": not config.attention_layers
        and mamba.width != 2 * config.hidden_size,
    }
    return next((what for what, is_so in lacks.items() if is_so), None)
