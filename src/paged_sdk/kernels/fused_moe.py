"""Computes a mixture of experts (Shazeer et al., 2017, arXiv 1701.06538): for each token, the weighted sum of a few of
many MLPs, with gates or without.

With few tokens, most of the time goes into reading weights. So an expert's matrices are read once for all its tokens,
and experts without tokens are not read.

:func:`route` and :func:`fused_moe` are custom ops, served by Triton on CUDA and by their references elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.activation import KernelActivation, check_activation, inner_activation_reference
from paged_sdk.kernels.checks import FLOATS, check_tensor
from paged_sdk.kernels.fallback import device_of, runs_on_triton

__all__ = ["fused_moe", "fused_moe_reference", "route", "route_reference"]


def route(logits: Tensor, num_selected: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose each token's experts: the likeliest of a softmax over all of them.

    The custom op is ``torch.ops.paged_sdk.route``; with Triton it is one launch.

    :param logits: the router's, ``[num_tokens, num_experts]`` float32, float16, bfloat16 or float64
    :param num_selected: experts of each token, at most ``num_experts``
    :param renormalize: divide the weights of a token's experts by their sum; False: keep those of the softmax
    :returns: ``topk_weights`` float32 (float64 of float64 logits) and ``topk_ids`` int64, ``[num_tokens,
        num_selected]`` each, the likeliest first; a token whose logits have NaN or +inf gets weights of NaN and
        arbitrary experts
    :raises ConfigError: shape, dtype or ``num_selected`` do not fit
    """
    weights, ids = _route(logits, num_selected, renormalize)
    return weights, ids


def route_reference(logits: Tensor, num_selected: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Implement :func:`route` with torch operations."""
    weights, ids = logits.softmax(-1, dtype=_accumulator(logits)).topk(num_selected)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


def fused_moe(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: KernelActivation = "silu",
) -> Tensor:
    """Apply to each token its experts' MLPs: ``sum of weight * down @ (activation(gate @ x) * (up @ x))``, or without
    gates ``sum of weight * down @ activation(up @ x)``.

    The custom op is ``torch.ops.paged_sdk.fused_moe``.

    :param hidden: ``[num_tokens, hidden_size]`` float32, float16 or bfloat16
    :param gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]`` of the dtype of ``hidden``, contiguous: gate's
        rows, then up's; of experts without gates ``[num_experts, intermediate_size, hidden_size]``
    :param down: ``[num_experts, hidden_size, intermediate_size]`` likewise
    :param topk_weights: ``[num_tokens, num_selected]`` float32
    :param topk_ids: which experts, ``[num_tokens, num_selected]`` int64 or int32
    :param activation: ``"silu"``, ``"gelu_tanh"`` (tanh-approximated GELU) or ``"relu2"`` (the square of ReLU)
    :returns: ``[num_tokens, hidden_size]`` of the dtype of ``hidden``; a token's experts are weighted and
        summed in float32. Triton kernels keep experts' outputs in float32 until then; torch operations round each to
        the dtype first
    :raises ConfigError: shapes, dtypes, strides, devices or the activation do not fit; for tensors in CPU memory, also
        experts that do not exist
    """
    result: Tensor = _fused_moe(hidden, gate_up, down, topk_weights, topk_ids, activation)
    return result


def fused_moe_reference(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: KernelActivation = "silu",
) -> Tensor:
    """Implement :func:`fused_moe` with torch operations: one expert after the other, each for all its tokens."""
    order = topk_ids.flatten().argsort(stable=True)
    tokens = order // topk_ids.shape[1]
    weights = topk_weights.flatten()[order].unsqueeze(-1)
    rows = hidden[tokens]
    out = torch.zeros_like(hidden, dtype=_accumulator(hidden))
    is_gated = _is_gated(gate_up, down)
    first = 0
    for expert, count in enumerate(topk_ids.flatten().bincount().tolist()):
        if not count:
            continue
        own = slice(first, first + count)
        inner = inner_activation_reference(F.linear(rows[own], gate_up[expert]), activation, is_gated=is_gated)
        mapped = F.linear(inner, down[expert])
        out.index_add_(0, tokens[own], mapped * weights[own])
        first += count
    return out.to(hidden.dtype)


@torch.library.custom_op("paged_sdk::route", mutates_args=())
def _route(logits: Tensor, num_selected: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    check_tensor("logits", logits, ("num_tokens", "num_experts"), FLOATS, logits.device)
    if not 1 <= num_selected <= logits.shape[1]:
        raise ConfigError.of("num_selected", num_selected, f"1 to num_experts = {logits.shape[1]}")
    if runs_on_triton("route", logits):
        from paged_sdk.kernels.triton import routing as triton_kernels

        with device_of(logits):
            return triton_kernels.route(logits, num_selected, renormalize=renormalize)
    return route_reference(logits, num_selected, renormalize=renormalize)


@_route.register_fake
def _route_fake(logits: Tensor, num_selected: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], num_selected
    return logits.new_empty(shape, dtype=_accumulator(logits)), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("paged_sdk::fused_moe", mutates_args=())
def _fused_moe(
    hidden: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu"
) -> Tensor:
    _check(hidden, gate_up, down, topk_weights, topk_ids)
    kind = check_activation(activation)
    if runs_on_triton("fused_moe", hidden):
        from paged_sdk.kernels.triton import fused_moe as triton_kernels

        with device_of(hidden):
            return triton_kernels.fused_moe(hidden, gate_up, down, topk_weights, topk_ids, kind)
    return fused_moe_reference(hidden, gate_up, down, topk_weights, topk_ids, kind)


@_fused_moe.register_fake
def _fused_moe_fake(hidden: Tensor, *_: Tensor | str) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


def _check(hidden: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    device, dtype = hidden.device, hidden.dtype
    check_tensor("hidden", hidden, ("num_tokens", "hidden_size"), FLOATS, device)
    num_tokens, hidden_size = hidden.shape
    check_tensor("down", down, ("num_experts", hidden_size, "intermediate_size"), (dtype,), device)
    num_experts, _, intermediate_size = down.shape
    rows = intermediate_size * (2 if _is_gated(gate_up, down) else 1)
    check_tensor("gate_up", gate_up, (num_experts, rows, hidden_size), (dtype,), device)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not weight.is_contiguous():
            raise ConfigError.of(f"{name}.stride()", weight.stride(), "a contiguous tensor")
    check_tensor("topk_ids", topk_ids, (num_tokens, "num_selected"), (torch.int64, torch.int32), device)
    check_tensor("topk_weights", topk_weights, tuple(topk_ids.shape), (_accumulator(hidden),), device)
    if device.type == "cpu" and topk_ids.numel():
        lowest, highest = (int(each) for each in topk_ids.aminmax())
        if lowest < 0 or highest >= num_experts:
            wrong = lowest if lowest < 0 else highest
            raise ConfigError.of("topk_ids", wrong, f"experts 0 to {num_experts - 1}")


def _is_gated(gate_up: Tensor, down: Tensor) -> bool:
    """Return whether experts have gates: unless they have as many rows as ``down`` has columns."""
    return gate_up.shape[1:2] != down.shape[2:]


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
