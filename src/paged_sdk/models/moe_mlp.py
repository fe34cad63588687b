"""Compute a layer's mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig, MoeConfig
from paged_sdk.kernels.fused_moe import route
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.expert_loader import ExpertTensors, load_experts
from paged_sdk.models.family import ExpertNames, TensorNames
from paged_sdk.models.gated_mlp import GatedMlp, load_gated_mlp
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.experts import Experts

__all__ = ["MoeMlp", "SharedExpert", "load_moe_mlp"]


class SharedExpert:
    """Computes the shared expert, which serves every token, times the sigmoid of a gate.

    :param gate: the gate's weight, ``[1, hidden_size]``
    """

    def __init__(self, mlp: GatedMlp, *, gate: Tensor) -> None:
        self.mlp = mlp
        self.gate = gate

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the expert to ``[num_tokens, hidden_size]``."""
        return F.linear(x, self.gate).sigmoid() * self.mlp.forward(x, ctx)


class MoeMlp:
    """Routes each token to a few experts and sums their weighted outputs.

    :param router: the router's weight, ``[num_experts, hidden_size]``
    :param router_bias: ``[num_experts]``; None: no bias
    :param choice_bias: added to the experts' weights when they are chosen, ``[num_experts]``; None: nothing is added
    :param shared: the shared expert, whose output is added; None: there is none
    """

    def __init__(
        self,
        config: MoeConfig,
        *,
        router: Tensor,
        experts: Experts,
        router_bias: Tensor | None = None,
        choice_bias: Tensor | None = None,
        shared: SharedExpert | None = None,
    ) -> None:
        self.config = config
        self.router = router
        self.router_bias = router_bias
        self._choice_bias = choice_bias
        self.experts = experts
        self.shared = shared

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the mixture to ``[num_tokens, hidden_size]``, the tokens of a step."""
        logits = F.linear(x, self.router, self.router_bias)
        config = self.config
        if config.sparse_mixer is not None:
            weights, ids = _mix_sparsely(logits, config.sparse_mixer)
        elif config.sigmoid_scores:
            weights, ids = _route_by_sigmoid(logits, config, self._choice_bias)
        else:
            weights, ids = route(logits, config.num_experts_per_token, renormalize=config.renormalize)
        chosen = self.experts.forward(x, weights, ids)
        return chosen if self.shared is None else chosen + self.shared.forward(x, ctx)


def _mix_sparsely(logits: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Choose the two experts with the largest scores, each weighted by a softmax over the scores near its own
    (SparseMixer; Liu et al., 2023, arXiv 2310.00811).

    :param logits: the router's scores, ``[num_tokens, num_experts]``
    :param margin: a score is near the chosen one if it is less by at most this fraction of the larger magnitude
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    left, weights, ids = scores, [], []
    for _ in range(2):
        best, chosen = left.max(-1, keepdim=True)
        is_less = (best - scores) > margin * scores.abs().clamp(min=best)
        weights.append(left.masked_fill(is_less, -torch.inf).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(weights, -1), torch.cat(ids, -1)


def _route_by_sigmoid(logits: Tensor, config: MoeConfig, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest sigmoids, after ``choice_bias`` is added to them (Liu et al., 2024, arXiv
    2408.15664).

    :param logits: the router's scores, ``[num_tokens, num_experts]``
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
    ids = (scores if choice_bias is None else scores + choice_bias).topk(config.num_experts_per_token).indices
    weights = scores.gather(-1, ids)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    return weights * config.routed_scale, ids


def load_moe_mlp(
    loader: WeightLoader, config: DecoderConfig, moe: MoeConfig, names: TensorNames, prefix: str
) -> MoeMlp:
    """Load one layer's router and experts.

    :param prefix: prefix of the layer's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    own = _names_in(loader, names, prefix)
    block = prefix + own.block
    return MoeMlp(
        moe,
        router=loader.tensor(f"{block}.{own.router}.weight", moe.num_experts, config.hidden_size),
        experts=load_experts(
            loader,
            ExpertTensors(
                block=f"{block}.experts",
                gate=own.gate,
                up=own.up,
                down=own.down,
                num_experts=moe.num_experts,
                hidden_size=config.hidden_size,
                intermediate_size=moe.intermediate_size,
                alternates=moe.alternates,
                swiglu=None if moe.swiglu_limit is None else (moe.swiglu_alpha, moe.swiglu_limit),
            ),
        ),
        router_bias=loader.tensor(f"{block}.{own.router}.bias", moe.num_experts) if moe.has_biases else None,
        choice_bias=loader.tensor(f"{block}.{own.choice_bias}", moe.num_experts) if moe.has_choice_bias else None,
        shared=None
        if moe.shared_intermediate_size is None
        else _load_shared(loader, config, f"{block}.shared_expert", moe.shared_intermediate_size),
    )


def _load_shared(loader: WeightLoader, config: DecoderConfig, name: str, size: int) -> SharedExpert:
    gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
    mlp = load_gated_mlp(loader, config, gate_up, f"{name}.down_proj", size=size, bias=False)
    return SharedExpert(mlp, gate=loader.tensor(f"{name}_gate.weight", 1, config.hidden_size))


def _names_in(loader: WeightLoader, names: TensorNames, prefix: str) -> ExpertNames:
    """Return the names that the checkpoint uses; if none match, the first, for the error message."""
    return next(
        (each for each in names.experts if f"{prefix}{each.block}.{each.router}.weight" in loader), names.experts[0]
    )
