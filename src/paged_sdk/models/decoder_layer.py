"""Run one layer of a decoder: attention and an MLP, or one of the two, each added to the residual stream."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.recurrent import GatedDeltaConfig, Mamba2Config, RecurrentConfig, ShortConvConfig
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import NoNorm, Norm
from paged_sdk.models.attention_block import AttentionBlock, load_attention_block
from paged_sdk.models.beside_block import BesideBlock, RecurrentBlock
from paged_sdk.models.expert_branch import ExpertBranch, load_expert_branch
from paged_sdk.models.gated_delta_block import load_gated_delta_block
from paged_sdk.models.gated_mlp import GatedMlp, load_gated_mlp
from paged_sdk.models.latent_attention_block import load_latent_attention_block
from paged_sdk.models.layer_inputs import LayerInputBlock, load_layer_input_block
from paged_sdk.models.mamba2_block import load_mamba2_block
from paged_sdk.models.moe_mlp import MoeMlp, load_moe_mlp
from paged_sdk.models.norms import load_norm
from paged_sdk.models.plain_mlp import PlainMlp, load_plain_mlp, load_xielu
from paged_sdk.models.short_conv_block import load_short_conv_block
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.adapted import AdaptableLinear
from paged_sdk.quant.linear import Linear

__all__ = ["DecoderLayer", "Mixer", "load_decoder_layer"]


class Mixer(Protocol):
    """Mixes the tokens of each sequence: attention, or a recurrent layer in its place."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        ...

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Apply the mixer to the tokens of a step, ``[num_tokens, hidden_size]``.

        :param rotation: the rotary embedding at the tokens' positions
        """
        ...


class DecoderLayer:
    """Holds attention and MLP with their norms.

    :param mixer: attention, or what is in its place or beside it; None: the layer is an MLP alone (nemotron_h)
    :param mlp: MLP or experts; None: the layer is a mixer alone (nemotron_h)
    :param attention_norm: norm before attention; computed together with the preceding residual addition
    :param attention_output_norm: norm of attention's output before its residual addition (gemma)
    :param mlp_norm: norm before the MLP; None: the MLP runs in parallel to attention, with one residual addition
        (cohere), or the layer has one part alone
    :param mlp_output_norm: norm of the MLP's output before its residual addition (gemma)
    :param beside_norm: norm before a parallel MLP (falcon); None: the MLP shares attention's norm
    :param residual_scale: factor of the attention and MLP outputs before their addition; None: 1
    :param expert_branch: adds experts to the MLP's output (gemma4); None: nothing
    :param layer_input: adds what the layer has of a token besides its embedding; None: nothing
    :param scale: multiplies the residual stream after the layer, ``[1]``; None: 1
    """

    def __init__(
        self,
        *,
        mixer: Mixer | None,
        mlp: GatedMlp | PlainMlp | MoeMlp | None,
        attention_norm: Norm,
        mlp_norm: Norm | None,
        attention_output_norm: Norm | None = None,
        mlp_output_norm: Norm | None = None,
        beside_norm: Norm | None = None,
        residual_scale: float | None = None,
        expert_branch: ExpertBranch | None = None,
        layer_input: LayerInputBlock | None = None,
        scale: Tensor | None = None,
    ) -> None:
        self.mixer = mixer
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.attention_output_norm = attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp_output_norm = mlp_output_norm
        self.beside_norm = beside_norm
        self.expert_branch = expert_branch
        self.layer_input = layer_input
        self.scale = scale
        self._residual_scale = residual_scale

    @property
    def attention(self) -> AttentionBlock:
        """Return the attention of a layer that has it."""
        if isinstance(self.mixer, BesideBlock):
            return self.mixer.attention
        assert isinstance(self.mixer, AttentionBlock), f"the layer has a {type(self.mixer).__name__}"
        return self.mixer

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers without adapter wrappers: query-key-value, attention output, gate-and-up or up, and
        down of the MLP or the shared experts, and those of the layer's own input. Other experts are not included.
        """
        return tuple(linear.base if isinstance(linear, AdaptableLinear) else linear for linear in self._linears())

    @property
    def adaptable(self) -> tuple[AdaptableLinear, ...]:
        """Return those of the linear layers that adapters may change."""
        return tuple(linear for linear in self._linears() if isinstance(linear, AdaptableLinear))

    @property
    def common_mlp(self) -> GatedMlp | PlainMlp | None:
        """Return the MLP that all tokens use: the layer's own, or that of shared experts; None if it has neither."""
        if not isinstance(self.mlp, MoeMlp):
            return self.mlp
        return None if self.mlp.shared is None else self.mlp.shared.mlp

    def _linears(self) -> list[Linear]:
        own = [] if self.mixer is None else [*self.mixer.linears]
        own += () if self.mlp is None else self.mlp.linears
        return own if self.layer_input is None else [*own, *self.layer_input.linears]

    def forward(
        self, normed: Tensor, residual: Tensor, rotation: Rotation, ctx: StepContext, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """Add the outputs of attention and MLP to the residual stream; each addition is fused with the norm after it.

        :param normed: the residual stream after :attr:`attention_norm`, ``[num_tokens, hidden_size]``
        :param residual: the residual stream, like ``normed``; may be overwritten
        :param next_norm: the norm after the layer: the next layer's attention norm, or the model's last norm
        :returns: the residual stream after ``next_norm``, and before it
        """
        if self.mixer is None or self.mlp is None:
            return next_norm.add_and_forward(self._added(self._only(normed, rotation, ctx), None), residual)
        attended = self.mixer.forward(normed, rotation, ctx)
        if self.mlp_norm is None:
            if self.beside_norm is not None:
                normed = self.beside_norm.forward(residual)
            return next_norm.add_and_forward(attended.add_(self.mlp.forward(normed, ctx)), residual)
        normed, residual = self.mlp_norm.add_and_forward(self._added(attended, self.attention_output_norm), residual)
        transformed = self.mlp.forward(normed, ctx)
        if self.expert_branch is not None:
            transformed = self.expert_branch.forward(transformed, residual)
        transformed = self._added(transformed, self.mlp_output_norm)
        if self.layer_input is None and self.scale is None:
            return next_norm.add_and_forward(transformed, residual)
        residual += transformed
        if self.layer_input is not None:
            residual += self.layer_input.forward(residual, ctx)
        if self.scale is not None:
            residual *= self.scale
        return next_norm.forward(residual), residual

    def _only(self, normed: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Compute the one part of a layer that has a mixer or an MLP."""
        if self.mixer is not None:
            return self.mixer.forward(normed, rotation, ctx)
        assert self.mlp is not None, "a layer has a part"
        return self.mlp.forward(normed, ctx)

    def _added(self, branch: Tensor, norm: Norm | None) -> Tensor:
        """Return the output of attention or MLP as it is added to the residual stream: normed and scaled."""
        normed = branch if norm is None else norm.forward(branch)
        return normed if self._residual_scale is None else normed.mul_(self._residual_scale)


def load_decoder_layer(
    loader: WeightLoader, config: DecoderConfig, names: TensorNames, layer: int, *, prefix: str | None = None
) -> DecoderLayer:
    """Load one layer.

    :param prefix: prefix of its tensors' names; None: that of the layer of this number
    :raises CheckpointError: a tensor is missing or has another shape
    """
    if prefix is None:
        prefix = names.layer(layer)

    def norm(name: str) -> Norm:
        return load_norm(loader, config, prefix + name)

    has_both = config.has_mixer(layer) and config.has_mlp(layer)
    moe = config.moe if config.moe is not None and layer in config.moe.layers else None
    attention_name, beside_name = names.norms.beside if config.parallel_norms else (names.norms.attention, None)
    mlp_norm: Norm | None = None
    if not config.parallel_residual and has_both:
        mlp_norm = norm(names.norms.mlp) if config.input_norms else NoNorm()
    return DecoderLayer(
        mixer=_load_mixer(loader, config, names, prefix, layer) if config.has_mixer(layer) else None,
        mlp=_load_mlp(loader, config, names, prefix, layer) if config.has_mlp(layer) else None,
        attention_norm=norm(attention_name) if config.input_norms else NoNorm(),
        attention_output_norm=norm(names.norms.attention_output) if config.sandwich_norms else None,
        mlp_norm=mlp_norm,
        mlp_output_norm=norm(names.norms.mlp_output) if config.sandwich_norms else None,
        beside_norm=None if beside_name is None else norm(beside_name),
        residual_scale=config.residual_scale,
        expert_branch=load_expert_branch(loader, config, moe, prefix) if moe is not None and moe.beside_mlp else None,
        layer_input=load_layer_input_block(loader, config, prefix, layer),
        scale=_load_scale(loader, f"{prefix}layer_scalar") if config.layer_scales else None,
    )


def _load_scale(loader: WeightLoader, name: str) -> Tensor:
    """Load a layer's scale, which is 1 if the checkpoint has none."""
    return loader.tensor(name, 1) if name in loader else loader.ones(1)


def _load_mlp(
    loader: WeightLoader, config: DecoderConfig, names: TensorNames, prefix: str, layer: int
) -> GatedMlp | PlainMlp | MoeMlp:
    if config.moe is not None and layer in config.moe.layers and not config.moe.beside_mlp:
        return load_moe_mlp(loader, config, config.moe, names, prefix)
    size, bias = config.layer(layer).intermediate_size, config.mlp_bias
    if not config.gated_mlp:
        learned = config.activation is Activation.XIELU
        activation = load_xielu(loader, prefix + names.activation) if learned else config.activation
        up, down = prefix + names.up, prefix + names.down
        return load_plain_mlp(loader, config, up, down, size=size, bias=bias, activation=activation)
    gate_up = [prefix + name for name in names.gate_up]
    return load_gated_mlp(loader, config, gate_up, prefix + names.down, size=size, bias=bias)


def _load_mixer(loader: WeightLoader, config: DecoderConfig, names: TensorNames, prefix: str, layer: int) -> Mixer:
    recurrent = config.recurrent_layers.get(layer)
    if recurrent is None and config.latent is not None:
        return load_latent_attention_block(loader, config, config.latent, prefix, layer)
    if recurrent is None:
        return load_attention_block(loader, config, names, prefix, layer)
    block = _load_recurrent(loader, config, recurrent, f"{prefix}{names.recurrent}.", layer)
    if not config.recurrent_beside:
        return block
    return BesideBlock(load_attention_block(loader, config, names, prefix, layer), block)


def _load_recurrent(
    loader: WeightLoader, config: DecoderConfig, recurrent: RecurrentConfig, prefix: str, layer: int
) -> RecurrentBlock:
    match recurrent:
        case ShortConvConfig():
            return load_short_conv_block(loader, config, recurrent, prefix, layer)
        case GatedDeltaConfig():
            return load_gated_delta_block(loader, config, recurrent, prefix, layer)
        case Mamba2Config():
            return load_mamba2_block(loader, config, recurrent, prefix, layer)
