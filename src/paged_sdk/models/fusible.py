"""Decide whether native calls can compute a decoder's layers, and why not."""

from __future__ import annotations

from typing import Final, get_args

from attrs import NOTHING, fields

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.config.moe import MoeConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.errors import shown
from paged_sdk.layers.activation import KERNEL_ACTIVATIONS
from paged_sdk.layers.norm import LayerNorm, NoNorm, RMSNorm
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.attention_block import AttentionBlock
from paged_sdk.models.beside_block import RecurrentBlock
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.expert_branch import ExpertBranch
from paged_sdk.models.expert_choice import ExpertChooser
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.models.latent_attention_block import LatentAttentionBlock
from paged_sdk.models.layer_inputs import LayerInputBlock
from paged_sdk.models.moe_mlp import MoeMlp, SharedExpert
from paged_sdk.models.norms import WholeNorms
from paged_sdk.models.plain_mlp import PlainMlp
from paged_sdk.quant.latent_heads import NativeLatentHeads

__all__ = ["why_not_fused"]

# The fields of which the fused layers, or code shared with the unfused model, support every value. A model that sets
# any other field is not fused.
_COMPUTED_FIELDS: Final[dict[type, frozenset[str]]] = {
    DecoderConfig: frozenset(
        {
            # shapes, and settings of the attention backend
            *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "max_position"),
            *("num_heads", "num_kv_heads", "head_dim", "sliding_windows", "attention_scale", "attention_softcap"),
            *("attention_sinks", "num_image_layers", "layer_shapes", "latent", "recurrent", "parts"),
            # norms, biases and activations of the layers
            *("norm", "norm_eps", "norm_bias", "norm_offset", "norm_in_float32", "input_norms", "sandwich_norms"),
            *(
                "qk_norm",
                "qk_norm_weights",
                "qk_norm_bias",
                "qk_norm_after_rope",
                "value_norm",
                "qkv_clip",
                "attention_gate",
                "parallel_residual",
            ),
            *("layer_scales", "layer_inputs", "assistant"),
            *("qkv_bias", "output_bias", "mlp_bias", "gated_mlp", "activation", "ropes", "moe"),
            # the order of a checkpoint's rows, which loading normalizes
            *("qkv_groups", "qkv_values_first"),
            # embeddings, residual additions and logits
            *("embedding_scale", "residual_scale", "tie_embeddings", "head_bias", "logit_scale", "logit_softcap"),
        }
    ),
    # The fused layers take a rotary embedding's cosines and sines, the factors of queries, and the pairing of elements.
    RopeConfig: frozenset(
        {
            *("rotary_dim", "theta", "kind", "factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
            *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
            *("short_factor", "long_factor", "inv_freq_divisors", "gguf_attn_factor", "rotates", "interleaved"),
            *("query_scale_beta", "axis_of_frequency"),
        }
    ),
    MoeConfig: frozenset(
        {
            *("layers", "num_experts", "num_experts_per_token", "intermediate_size", "activation", "beside_mlp"),
            *("shared_intermediate_size", "has_shared_gate", "has_biases", "swiglu_alpha", "swiglu_limit", "gated"),
            # the choice of experts
            *("sparse_mixer", "sigmoid_scores", "has_choice_bias", "num_groups", "num_groups_per_token"),
            *("group_score_size", "renormalize", "sum_offset", "min_sum", "routed_scale"),
            # how a checkpoint is loaded
            *("alternates", "float32_router"),
        }
    ),
}


def why_not_fused(model: DecoderModel, backend: AttentionBackend, layers: range | None = None) -> str | None:
    """Return why a model's layers cannot be fused, or None if they can.

    The check is an allowlist: a model with a setting or kind of layer that is not listed here runs one operation at a
    time. What the model has is asked before where its keys are: the same setting may have kept them from a native pool.

    :param backend: the attention backend that keeps these layers' keys and values
    :param layers: the layers to check; None: all
    """
    config = model.config
    if (reason := _what_it_has(model)) is not None:
        return reason
    if (pages := backend.native_pages) is None:
        return "its attention is not native"
    if model.group is not None and model.group.shared is None:
        return "the ranks share no memory"
    if (unknown := _unknown_combination(config, pages.workspace.library.max_interleaved)) is not None:
        return f"the native decoder does not know {unknown}"
    of_layers = (config.layer(index).intermediate_size for index in range(config.num_layers))
    of_shared = None if config.moe is None else config.moe.shared_intermediate_size
    if any(size % 16 for size in (config.hidden_size, *of_layers, of_shared or 0)):
        return "its hidden or intermediate size is not a multiple of 16"
    if config.layer_inputs is not None and config.layer_inputs.size % 16:
        return "the size of its layers' own inputs is not a multiple of 16"
    for layer in model.layers if layers is None else model.layers[layers.start : layers.stop]:
        if any(linear.native_weights is None for linear in layer.linears):
            return "its weights have no native kernel"
        mixture = layer.mlp if isinstance(layer.mlp, MoeMlp) else layer.expert_branch
        if mixture is not None and mixture.experts.native_weights is None:
            return "its experts have no native kernel"
        if isinstance(layer.mixer, LatentAttentionBlock) and not isinstance(layer.mixer.heads, NativeLatentHeads):
            return "the projections of its latent vectors have no native kernel"
        if isinstance(layer.mixer, RecurrentBlock) and layer.mixer.native is None:
            return "its recurrent layers have no native kernel"
    return None


def _what_it_has(model: DecoderModel) -> str | None:
    """Return a reason that names what the model has and no backend could make up for, or None."""
    config = model.config
    if config.recurrent_beside:
        return "the native decoder has no recurrent layers beside attention"
    parts = (config, *config.ropes, *(() if config.moe is None else (config.moe,)))
    if (reason := next(filter(None, map(_unknown_setting, parts)), None) or _unknown_kind(model)) is not None:
        return reason
    if config.activation not in KERNEL_ACTIVATIONS and config.activation is not Activation.XIELU:
        return f"the native decoder has no activation {config.activation.value}"
    if any(size % 16 for size in config.head_dims):
        return "the size of its heads is not a multiple of 16"
    return None


def _unknown_combination(config: DecoderConfig, max_interleaved: int) -> str | None:
    """Return a combination of settings that the fused layers do not support, or None.

    :param max_interleaved: see :attr:`~paged_sdk.kernels.native.library.NativeLibrary.max_interleaved`
    """
    is_rms = config.norm is NormKind.RMS
    if config.residual_scale is not None and config.num_image_layers:
        return f"residual_scale = {config.residual_scale} beside images' vectors in later layers"
    if config.residual_scale is not None and (config.qk_norm or config.sandwich_norms or not is_rms):
        others = "layer norms, norms of queries and keys, or norms after attention"
        return f"residual_scale = {config.residual_scale} with {others}"
    if config.sandwich_norms and (config.parallel_residual or not is_rms):
        return "norms after attention with layer norms or parallel residuals"
    if not config.sandwich_norms and (config.layer_scales or config.layer_inputs is not None):
        return "scales or inputs of layers without norms after attention"
    if config.parallel_residual and config.moe is not None:
        return "experts beside attention"
    if config.latent is not None and (config.latent.query_rank or 0) % 16:
        return f"query_rank = {config.latent.query_rank} in latent attention"
    if any(rope.interleaved and rope.rotary_dim > max_interleaved for rope in config.ropes):
        return f"pairs of neighbours in more than {max_interleaved} elements of a head"
    return None


def _unknown_kind(model: DecoderModel) -> str | None:
    """Return a reason that names a part of a class that the fused layers do not support, or None.

    A subclass counts as another class, because it may compute something else.
    """
    norms: list[object] = [model.norm]
    parts: list[tuple[object, tuple[type, ...]]] = [(model, (DecoderModel,))]
    parts += [(rope, (RotaryEmbedding,)) for rope in model.ropes.values()]
    for layer in model.layers:
        mixer, mlp = layer.mixer, layer.mlp
        block = layer.layer_input
        parts += [] if block is None else [(block, (LayerInputBlock,))]
        norms += [None if block is None else block.norm]
        parts.append((layer, (DecoderLayer,)))
        parts += [] if mlp is None else [(mlp, (GatedMlp, PlainMlp, MoeMlp))]
        parts += [] if mixer is None else [(mixer, (AttentionBlock, LatentAttentionBlock, *get_args(RecurrentBlock)))]
        if isinstance(mlp, MoeMlp):
            parts.append((mlp.chooser, (ExpertChooser,)))
            parts += (
                [] if mlp.shared is None else [(mlp.shared, (SharedExpert,)), (mlp.shared.mlp, (GatedMlp, PlainMlp))]
            )
        if (branch := layer.expert_branch) is not None:
            parts += [(branch, (ExpertBranch,)), (branch.chooser, (ExpertChooser,))]
            norms += [branch.router_norm, branch.input_norm, branch.output_norm, branch.dense_output_norm]
        norms += [layer.attention_norm, layer.attention_output_norm, layer.mlp_norm, layer.mlp_output_norm]
        if isinstance(mixer, LatentAttentionBlock):
            norms += [mixer.query_norm, mixer.latent_norm]
        elif isinstance(mixer, AttentionBlock):
            qk_norm = mixer.qk_norm
            norms += (qk_norm.query, qk_norm.key) if type(qk_norm) is WholeNorms else (qk_norm,)
            norms.append(mixer.value_norm)
    parts += [(norm, (RMSNorm, LayerNorm, NoNorm)) for norm in norms if norm is not None]
    unknown = (type(part).__name__ for part, kinds in parts if type(part) not in kinds)
    if (name := next(unknown, None)) is not None:
        return f"the native decoder has no {name}"
    return None


def _unknown_setting(part: DecoderConfig | RopeConfig | MoeConfig) -> str | None:
    """Return a reason that names a setting that the fused layers do not support, or None."""
    known = next((names for kind, names in _COMPUTED_FIELDS.items() if isinstance(part, kind)), frozenset[str]())
    for field in fields(type(part)):
        value = getattr(part, field.name)
        if field.name not in known and (field.default is NOTHING or value != field.default):
            return f"the native decoder does not know {field.name} = {shown(value)}"
    return None
