"""Read mixtures of experts whose routing chooses groups of experts first, as DeepSeek's does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from attrs import evolve

from paged_sdk.config.moe import MoeConfig
from paged_sdk.models.common_config import read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.tensor_names import ExpertNames

__all__ = ["GROUPED_EXPERTS", "read_grouped_moe", "read_later_layers", "read_sparse_layers", "shared_size"]

GROUPED_EXPERTS: Final = ExpertNames(
    choice_bias="gate.e_score_correction_bias",
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
"""Names of experts in most checkpoints with grouped routing."""

_READ: Final = ("n_group", "topk_group", "routed_scaling_factor", "scoring_func")


def read_grouped_moe(
    fields: ConfigFields,
    *,
    layers: Iterable[int],
    count: str = "n_routed_experts",
    shared_count: str = "n_shared_experts",
    group_score_size: int = 2,
    scoring: Collection[str] = ("sigmoid",),
    known: Iterable[str] = (),
) -> MoeConfig:
    """Read mixtures of experts of DeepSeek V3's kind: sigmoids as weights, a bias of the choice, groups of experts, and
    shared experts without a gate (DeepSeek-AI, 2024, arXiv 2412.19437).

    :param layers: the indices of layers with a mixture
    :param count: the field with the number of experts; ``shared_count`` likewise of shared ones
    :param group_score_size: see :class:`~paged_sdk.config.moe.MoeConfig`
    :param scoring: what ``scoring_func`` may be, which released checkpoints state and transformers' classes do not read
    :param known: further fields of its own kind of experts that the family reads itself
    :raises CheckpointError: a value is missing or invalid
    :raises UnsupportedArchitectureError: the config has experts or routing of another family
    """
    if fields.is_set("scoring_func") and fields.text("scoring_func") not in scoring:
        raise fields.error("scoring_func", " or ".join(scoring))
    size = fields.positive("moe_intermediate_size")
    num_experts = fields.optional_positive("num_local_experts") or fields.positive(count)
    moe = read_moe(
        fields.updated(ConfigFields({"num_local_experts": num_experts})),
        layers=layers,
        intermediate_size=size,
        renormalize=fields.flag("norm_topk_prob", True),
        known=(*_READ, shared_count, *known),
    )
    groups = fields.positive("n_group", 1)
    of_group = num_experts // groups
    if num_experts % groups or of_group < group_score_size:
        raise fields.error("n_group", f"groups of {num_experts} experts, at least {group_score_size} in each")
    chosen = fields.positive("topk_group", 1)
    if not -(-moe.num_experts_per_token // of_group) <= chosen <= groups:
        needed = f"at most {groups}, and enough for {moe.num_experts_per_token} experts among groups of {of_group}"
        raise fields.error("topk_group", needed)
    return evolve(
        moe,
        shared_intermediate_size=shared_size(fields, shared_count, size),
        sigmoid_scores=True,
        has_choice_bias=True,
        num_groups=groups,
        num_groups_per_token=chosen,
        group_score_size=group_score_size,
        sum_offset=1e-20,
        routed_scale=fields.number("routed_scaling_factor", 1.0),
        float32_router=True,
    )


def read_later_layers(fields: ConfigFields, num_layers: int, default: int | None = None) -> range:
    """Return the indices of all layers but the first, ``first_k_dense_replace`` of them, which have a dense MLP.

    :param default: of that field; None: there is none
    :raises CheckpointError: the field is missing or invalid
    """
    return range(max(fields.integer("first_k_dense_replace", default), 0), num_layers)


def read_sparse_layers(fields: ConfigFields, num_layers: int, default: Iterable[int]) -> list[int]:
    """Return the indices of the layers with experts, as ``mlp_layer_types`` says.

    :param default: without that field
    :raises CheckpointError: the field is invalid
    """
    types = fields.texts("mlp_layer_types")
    if not types:
        return list(default)
    if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"dense or sparse for each of {num_layers} layers")
    return [layer for layer, each in enumerate(types) if each == "sparse"]


def shared_size(fields: ConfigFields, key: str, intermediate_size: int) -> int | None:
    """Return the intermediate size of the shared experts together; None if there are none.

    :param key: the field with their number
    :param intermediate_size: that of one expert
    :raises CheckpointError: the number is missing or invalid
    """
    return fields.positive(key) * intermediate_size if fields.is_set(key) else None
