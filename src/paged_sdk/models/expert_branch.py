"""Compute a layer's experts beside its dense MLP (Gemma 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.layers.activation import KERNEL_ACTIVATIONS
from paged_sdk.layers.norm import Norm, RMSNorm
from paged_sdk.models.expert_choice import ExpertChooser
from paged_sdk.models.expert_loader import ExpertTensors, load_experts
from paged_sdk.models.norms import load_norm
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.experts import Experts

__all__ = ["ExpertBranch", "load_expert_branch"]


class ExpertBranch:
    """Adds experts to the output of a dense MLP:
    ``dense_output_norm(mlp) + output_norm(experts(input_norm(residual)))``.

    :param router: ``[num_experts, hidden_size]``
    :param router_norm: norm of the router's input
    :param chooser: chooses a token's experts from the router's scores
    :param dense_output_norm: norm of the dense MLP's output
    """

    def __init__(
        self,
        *,
        router: Tensor,
        router_norm: Norm,
        chooser: ExpertChooser,
        experts: Experts,
        dense_output_norm: Norm,
        input_norm: Norm,
        output_norm: Norm,
    ) -> None:
        self.router = router
        self.router_norm = router_norm
        self.chooser = chooser
        self.experts = experts
        self.dense_output_norm = dense_output_norm
        self.input_norm = input_norm
        self.output_norm = output_norm

    def forward(self, transformed: Tensor, residual: Tensor) -> Tensor:
        """Return the sum of both branches, ``[num_tokens, hidden_size]``.

        :param transformed: the dense MLP's output
        :param residual: the residual stream that the MLP has read, before its norm
        """
        weights, ids = self.chooser.choose(F.linear(self.router_norm.forward(residual), self.router))
        chosen = self.experts.forward(self.input_norm.forward(residual), weights, ids)
        return self.dense_output_norm.forward(transformed).add_(self.output_norm.forward(chosen))


def load_expert_branch(loader: WeightLoader, config: DecoderConfig, moe: MoeConfig, prefix: str) -> ExpertBranch:
    """Load one layer's router and experts.

    :param prefix: prefix of the layer's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """

    def norm(name: str) -> Norm:
        return load_norm(loader, config, prefix + name)

    hidden = config.hidden_size
    # The router's scale and its factor are a norm's weight.
    scale = loader.tensor(f"{prefix}router.scale", hidden)
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32)) * hidden**-0.5
    factors = loader.tensor(f"{prefix}router.per_expert_scale", moe.num_experts)
    return ExpertBranch(
        router=loader.tensor(f"{prefix}router.proj.weight", moe.num_experts, hidden),
        router_norm=RMSNorm(scale, config.norm_eps, rounds_last=True),
        chooser=ExpertChooser(moe, factors=factors, workspace=loader.workspace),
        experts=load_experts(
            loader,
            ExpertTensors(
                block=f"{prefix}experts",
                stacked=(f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"),
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
                num_experts=moe.num_experts,
                hidden_size=hidden,
                intermediate_size=moe.intermediate_size,
                activation=KERNEL_ACTIVATIONS[moe.activation],
            ),
        ),
        dense_output_norm=norm("post_feedforward_layernorm_1"),
        input_norm=norm("pre_feedforward_layernorm_2"),
        output_norm=norm("post_feedforward_layernorm_2"),
    )
