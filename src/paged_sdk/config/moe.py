"""Describe mixtures of experts."""

from __future__ import annotations

from attrs import frozen

from paged_sdk.config.activation import Activation

__all__ = ["MoeConfig"]


@frozen(kw_only=True)
class MoeConfig:
    """Describes mixture-of-experts layers (Shazeer et al., 2017, arXiv 1701.06538).

    :ivar layers: indices of the mixture-of-experts layers; the other layers have a dense MLP
    :ivar num_experts_per_token: number of experts that a token is routed to
    :ivar intermediate_size: intermediate size of one expert
    :ivar shared_intermediate_size: intermediate size of the shared experts together, which every token uses; None: no
        shared experts
    :ivar has_shared_gate: whether the shared experts' output is scaled by the sigmoid of its own gate (qwen2_moe)
    :ivar sparse_mixer: SparseMixer's threshold (phimoe): two experts are chosen, and the weight of each is a softmax
        over the experts whose scores are less than its own by at most this fraction. No other setting of the choice
        has an effect then. None: the experts with the largest weights are chosen
    :ivar sigmoid_scores: whether an expert's weight is the sigmoid of its score instead of a softmax over all experts
        (deepseek_v3)
    :ivar has_choice_bias: whether a learned bias per expert is added to the weights by which experts are chosen, but
        not to those of their outputs (deepseek_v3; with a softmax: ernie4_5_moe)
    :ivar num_groups: number of groups of experts, of which a token's experts come from ``num_groups_per_token`` alone:
        those with the largest scores (deepseek_v2)
    :ivar group_score_size: a group's score is the sum of this number of its largest weights: 1 (deepseek_v2) or 2
        (deepseek_v3)
    :ivar sum_offset: added to the sum by which ``renormalize`` divides (lfm2_moe, deepseek_v3)
    :ivar min_sum: the smallest such sum; smaller ones count as this one (ernie4_5_moe)
    :ivar routed_scale: multiplies the weights of a token's experts, last (deepseek_v2, deepseek_v3)
    :ivar float32_router: whether the router's product is computed in float32 in models of fewer bits (deepseek_v3)
    :ivar has_biases: whether the router and all experts have biases (gpt-oss)
    :ivar swiglu_limit: experts compute ``(up + 1) * gate * sigmoid(swiglu_alpha * gate)``, with ``up`` clamped to
        ``[-swiglu_limit, swiglu_limit]`` and ``gate`` from above only (gpt-oss); None: ``up * silu(gate)``
    :ivar alternates: whether checkpoints with all experts in one tensor interleave gate and up rows
    :ivar beside_mlp: whether the layers also have a dense MLP, whose output is added to that of the experts; both have
        norms of their own. The router reads the normalized and scaled residual stream, and a learned factor per expert
        multiplies the weights (gemma4)
    :ivar activation: the experts' activation, of their gates, or of up without gates
    :ivar gated: whether experts, shared ones included, have gates; False: they are ``down(activation(up(x)))``
        (nemotron_h)
    :ivar latent_size: size of the vectors that experts read and write, to and from which matrices of the layer map; the
        router and shared experts have the model's. None: all experts have the model's (nemotron_h)
    :ivar renormalize: True: the weights of a token's experts are rescaled to sum to 1, as by a softmax over the chosen
        experts alone (granitemoe); False: they are the probabilities of a softmax over all experts
    """

    layers: frozenset[int]
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    shared_intermediate_size: int | None = None
    has_shared_gate: bool = False
    sparse_mixer: float | None = None
    sigmoid_scores: bool = False
    has_choice_bias: bool = False
    num_groups: int = 1
    num_groups_per_token: int = 1
    group_score_size: int = 1
    sum_offset: float = 0.0
    min_sum: float = 0.0
    routed_scale: float = 1.0
    float32_router: bool = False
    has_biases: bool = False
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    alternates: bool = False
    beside_mlp: bool = False
    activation: Activation = Activation.SILU
    gated: bool = True
    latent_size: int | None = None
