"""Compute a layer's mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.activation import KERNEL_ACTIVATIONS
from paged_sdk.models.expert_choice import ExpertChooser
from paged_sdk.models.expert_loader import ExpertTensors, load_experts
from paged_sdk.models.gated_mlp import GatedMlp, load_gated_mlp
from paged_sdk.models.plain_mlp import PlainMlp, load_plain_mlp
from paged_sdk.models.tensor_names import ExpertNames, TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.linear import Linear

__all__ = ["MoeMlp", "SharedExpert", "load_moe_mlp"]


class SharedExpert:
    """Computes the shared experts, which serve every token, as one MLP.

    :param gate: the weight of a gate whose sigmoid scales the output, ``[1, hidden_size]``; None: no gate
    """

    def __init__(self, mlp: GatedMlp | PlainMlp, *, gate: Tensor | None) -> None:
        self.mlp = mlp
        self.gate = gate

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the experts to ``[num_tokens, hidden_size]``."""
        output = self.mlp.forward(x, ctx)
        return output if self.gate is None else F.linear(x, self.gate).sigmoid() * output


class MoeMlp:
    """Routes each token to a few experts and sums their weighted outputs.

    :param router: the router's weight, ``[num_experts, hidden_size]``; its product is computed in its dtype
    :param router_bias: ``[num_experts]``; None: no bias
    :param chooser: chooses a token's experts from the router's scores
    :param shared: the shared experts, whose output is added; None: there are none
    :param latent: maps to the vectors that experts read, and from those that they write; None: they have the model's
    """

    def __init__(
        self,
        *,
        router: Tensor,
        chooser: ExpertChooser,
        experts: Experts,
        router_bias: Tensor | None = None,
        shared: SharedExpert | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        self.router = router
        self.router_bias = router_bias
        self.chooser = chooser
        self.experts = experts
        self.shared = shared
        self.latent = latent

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied; experts that are chosen are none."""
        return (*(self.latent or ()), *(() if self.shared is None else self.shared.mlp.linears))

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the mixture to ``[num_tokens, hidden_size]``, the tokens of a step."""
        logits = F.linear(x.to(self.router.dtype), self.router, self.router_bias)
        weights, ids = self.chooser.choose(logits)
        if self.latent is None:
            chosen = self.experts.forward(x, weights, ids)
        else:
            down, up = self.latent
            chosen = up.forward(self.experts.forward(down.forward(x, ctx), weights, ids), ctx)
        return chosen if self.shared is None else chosen + self.shared.forward(x, ctx)


def load_moe_mlp(
    loader: WeightLoader, config: DecoderConfig, moe: MoeConfig, names: TensorNames, prefix: str
) -> MoeMlp:
    """Load one layer's router and experts.

    :param prefix: prefix of the layer's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    own = _names_in(loader, moe, names, prefix)
    block = prefix + own.block
    count = moe.num_experts
    bias = _load_choice_bias(loader, f"{block}.{own.choice_bias}", count) if moe.has_choice_bias else None
    return MoeMlp(
        router=loader.tensor(f"{block}.{own.router}.weight", count, config.hidden_size, in_float32=moe.float32_router),
        chooser=ExpertChooser(moe, bias=bias, workspace=loader.workspace),
        experts=load_experts(
            loader,
            ExpertTensors(
                block=f"{block}.experts",
                stacked=(f"{block}.{own.stacked[0]}", f"{block}.{own.stacked[1]}"),
                gate=own.gate,
                up=own.up,
                down=own.down,
                num_experts=count,
                hidden_size=config.hidden_size if moe.latent_size is None else moe.latent_size,
                intermediate_size=moe.intermediate_size,
                alternates=moe.alternates,
                swiglu=None if moe.swiglu_limit is None else (moe.swiglu_alpha, moe.swiglu_limit),
                activation=KERNEL_ACTIVATIONS[moe.activation],
            ),
        ),
        router_bias=loader.tensor(f"{block}.{own.router}.bias", count) if moe.has_biases else None,
        shared=None
        if moe.shared_intermediate_size is None
        else _load_shared(loader, config, moe, own, prefix, moe.shared_intermediate_size),
        latent=None
        if moe.latent_size is None
        else _load_latent(loader, config, [f"{block}.{name}" for name in own.latent], moe.latent_size),
    )


def _load_choice_bias(loader: WeightLoader, name: str, count: int) -> Tensor:
    """Load the bias of the choice in float32: trained biases of near experts differ by less than bfloat16 resolves.

    Ernie's checkpoints have it as a matrix of one row.
    """
    is_row = name in loader and loader.shape(name) == (1, count)
    return loader.tensor(name, *((1, count) if is_row else (count,)), in_float32=True).flatten()


def _load_shared(
    loader: WeightLoader, config: DecoderConfig, moe: MoeConfig, names: ExpertNames, prefix: str, size: int
) -> SharedExpert:
    gate_up, down = [prefix + name for name in names.shared_gate_up], prefix + names.shared_down
    mlp: GatedMlp | PlainMlp
    if moe.gated:
        mlp = load_gated_mlp(loader, config, gate_up, down, size=size, bias=config.mlp_bias)
    else:
        (up,) = gate_up
        mlp = load_plain_mlp(loader, config, up, down, size=size, bias=config.mlp_bias, activation=config.activation)
    scale = loader.tensor(f"{prefix}{names.shared_gate}.weight", 1, config.hidden_size) if moe.has_shared_gate else None
    return SharedExpert(mlp, gate=scale)


def _load_latent(loader: WeightLoader, config: DecoderConfig, names: Sequence[str], size: int) -> tuple[Linear, Linear]:
    down, up = names
    return (
        loader.linear([down], in_features=config.hidden_size, out_features=(size,), bias=config.mlp_bias),
        loader.linear([up], in_features=size, out_features=(config.hidden_size,), bias=config.mlp_bias),
    )


def _names_in(loader: WeightLoader, moe: MoeConfig, names: TensorNames, prefix: str) -> ExpertNames:
    """Return the names that the checkpoint uses; if none match, the first, for the error message."""

    def are_there(own: ExpertNames) -> bool:
        block = f"{prefix}{own.block}"
        has_bias = not moe.has_choice_bias or f"{block}.{own.choice_bias}" in loader
        return has_bias and f"{block}.{own.router}.weight" in loader

    return next((each for each in names.experts if are_there(each)), names.experts[0])
