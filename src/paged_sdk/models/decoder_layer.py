"""Run one layer of a decoder: attention and an MLP, each added to the residual stream."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import RMSNorm
from paged_sdk.models.attention_block import AttentionBlock, load_attention_block
from paged_sdk.models.family import TensorNames
from paged_sdk.models.gated_mlp import GatedMlp, load_gated_mlp
from paged_sdk.models.moe_mlp import MoeMlp, load_moe_mlp
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["DecoderLayer", "load_decoder_layer"]


class DecoderLayer:
    """Holds attention and MLP with their norms.

    :param attention_norm: the norm before attention; computed together with the addition to the residual stream before
        the layer
    :param attention_output_norm: the norm of attention's output before it is added (gemma)
    :param mlp_norm: the norm before the MLP
    :param mlp_output_norm: the norm of the MLP's output before it is added (gemma)
    """

    def __init__(
        self,
        *,
        attention: AttentionBlock,
        mlp: GatedMlp | MoeMlp,
        attention_norm: RMSNorm,
        mlp_norm: RMSNorm,
        attention_output_norm: RMSNorm | None = None,
        mlp_output_norm: RMSNorm | None = None,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.attention_output_norm = attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp_output_norm = mlp_output_norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers: query-key-value and attention output; also gate-and-up and down, unless experts
        take the MLP's place.
        """
        attention = (self.attention.qkv, self.attention.output)
        return (*attention, self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, GatedMlp) else attention

    def forward(
        self, normed: Tensor, residual: Tensor, rotation: Rotation, ctx: StepContext, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Add attention's output and the MLP's to the residual stream; each addition also computes the norm that
        follows it.

        :param normed: the residual stream after :attr:`attention_norm`, ``[num_tokens, hidden_size]``
        :param residual: like ``normed``; its memory may be overwritten
        :param next_norm: the norm that follows the layer: the next layer's attention norm, or the model's last norm
        :returns: the residual stream after ``next_norm``, and before it
        """
        attended = self.attention.forward(normed, rotation, ctx)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm.forward(attended)
        normed, residual = self.mlp_norm.add_and_forward(attended, residual)
        transformed = self.mlp.forward(normed, ctx)
        if self.mlp_output_norm is not None:
            transformed = self.mlp_output_norm.forward(transformed)
        return next_norm.add_and_forward(transformed, residual)


def load_decoder_layer(loader: WeightLoader, config: DecoderConfig, names: TensorNames, layer: int) -> DecoderLayer:
    """Load one layer.

    :raises CheckpointError: a tensor is missing or has another shape
    """
    prefix = f"{names.body}layers.{layer}."

    def norm(name: str) -> RMSNorm:
        weight = loader.tensor(f"{prefix}{name}.weight", config.hidden_size)
        return RMSNorm(weight, config.norm_eps, offset=config.norm_offset)

    attention = load_attention_block(loader, config, names, prefix, layer)
    mlp = (
        load_moe_mlp(loader, config, config.moe, names, prefix)
        if config.moe is not None and layer in config.moe.layers
        else load_gated_mlp(loader, config, names, prefix)
    )
    if not config.sandwich_norms:
        # Llama's "post attention" norm is the one before the MLP.
        return DecoderLayer(
            attention=attention,
            mlp=mlp,
            attention_norm=norm("input_layernorm"),
            mlp_norm=norm("post_attention_layernorm"),
        )
    return DecoderLayer(
        attention=attention,
        mlp=mlp,
        attention_norm=norm("input_layernorm"),
        attention_output_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp_output_norm=norm("post_feedforward_layernorm"),
    )
