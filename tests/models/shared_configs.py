"""Fields of tiny configs that the tests of several files have in common."""

from __future__ import annotations

from typing import Final

__all__ = ["GROUPED", "MULTIPLIERS"]

GROUPED: Final = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
"""Groups of experts, of which each token has those of the best."""

MULTIPLIERS: Final[dict[str, float | list[float]]] = {
    "attention_in_multiplier": 1.3,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.8, 1.2],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
"""All multipliers of falcon_h1, each another."""
