"""Chooses each token's experts from a router's scores in one native call.

Layers that run in one native call describe their choice in the same way, and choose by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from types import MappingProxyType
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import float_vector, pointer
from paged_sdk.kernels.native.structures import DTYPES
from paged_sdk.kernels.native.structures_routing import Choice, Route

__all__ = ["ExpertChoice", "NativeRouting", "describe_choice"]

_SCORING: Final = MappingProxyType({"softmax": 0, "sigmoid": 1, "sparse_mixer": 2})
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@frozen(eq=False, kw_only=True)
class ExpertChoice:
    """Describes how a token's experts are chosen from a router's scores, and how their outputs are weighed.

    :ivar num_selected: number of experts per token
    :ivar scoring: an expert's weight is a softmax over all experts, the sigmoid of its own score, or SparseMixer's
        (Liu et al., 2023, arXiv 2310.00811): experts are chosen one after the other, and each is weighed by a softmax
        over the scores near its own of those that are left
    :ivar bias: [num_experts], added to the weights for the choice alone; None: no bias
    :ivar factors: [num_experts], multiply the weights last; None: no factors
    :ivar num_groups: number of groups of consecutive experts, of which those with the largest scores are chosen first
    :ivar num_groups_selected: number of groups per token
    :ivar group_score_size: a group's score is the sum of this number of its largest weights
    :ivar renormalize: whether the chosen weights are divided by their sum, but at least ``min_sum``, plus
        ``sum_offset``
    :ivar scale: multiplies the weights
    :ivar margin: with SparseMixer, a score is near another if it is less by at most this share of the larger magnitude
    """

    num_experts: int
    num_selected: int
    scoring: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    renormalize: bool = False
    bias: Tensor | None = None
    factors: Tensor | None = None
    num_groups: int = 1
    num_groups_selected: int = 1
    group_score_size: int = 1
    min_sum: float = 0.0
    sum_offset: float = 0.0
    scale: float = 1.0
    margin: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.num_selected <= self.num_experts:
            raise ConfigError.of("num_selected", self.num_selected, f"1 to num_experts = {self.num_experts}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ConfigError.of("num_groups", self.num_groups, f"a divisor of num_experts = {self.num_experts}")
        size = self.num_experts // self.num_groups
        fewest = -(-self.num_selected // size)
        if not fewest <= self.num_groups_selected <= self.num_groups:
            raise ConfigError.of("num_groups_selected", self.num_groups_selected, f"{fewest} to {self.num_groups}")
        if not 1 <= self.group_score_size <= size:
            raise ConfigError.of("group_score_size", self.group_score_size, f"1 to {size}, the experts of a group")
        if self.scoring == "sparse_mixer" and (self.bias is not None or self.num_groups > 1 or self.renormalize):
            raise ConfigError.of("scoring", self.scoring, "softmax or sigmoid, with a bias, groups or renormalization")


def describe_choice(target: Choice, choice: ExpertChoice) -> Sequence[Tensor | None]:
    """Fill the C structure of a choice, and return the tensors that must outlive it.

    :raises ConfigError: the size of the bias or of the factors is not the number of experts
    """
    bias, factors = (
        float_vector(f"choice.{name}", vector, choice.num_experts)
        for name, vector in (("bias", choice.bias), ("factors", choice.factors))
    )
    target.bias, target.factors = pointer(bias), pointer(factors)
    target.num_experts, target.num_selected = choice.num_experts, choice.num_selected
    target.scoring, target.renormalize = _SCORING[choice.scoring], choice.renormalize
    target.num_groups, target.num_groups_selected = choice.num_groups, choice.num_groups_selected
    target.group_score_size = choice.group_score_size
    target.min_sum, target.sum_offset = choice.min_sum, choice.sum_offset
    target.scale, target.margin = choice.scale, choice.margin
    return bias, factors


class NativeRouting:
    """Chooses experts from scores that have been computed.

    :param workspace: scratch memory of the calling engine; used by one call at a time
    :raises ConfigError: the size of the choice's bias or factors is not the number of experts
    """

    def __init__(self, workspace: Workspace, choice: ExpertChoice) -> None:
        self._workspace = workspace
        self._choice = choice
        self._args = Route(workspace=workspace.handle, num_threads=workspace.num_threads)
        self._kept = describe_choice(self._args.choice, choice)
        self._reference = byref(self._args)

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens.

        :param scores: the router's, ``[num_tokens, num_experts]`` float32, bfloat16 or float16
        :returns: the weights of the experts' outputs, float32, and which experts, int64, ``[num_tokens, num_selected]``
            each. Of experts with equal weights, those are chosen that torch's ``topk`` chooses on the CPU. Scores of
            NaN, and +Inf except with sigmoids, give weights of NaN, and a softmax then arbitrary experts
        :raises ConfigError: shape or dtype do not fit
        """
        choice = self._choice
        check_tensor("scores", scores, ("num_tokens", choice.num_experts), _DTYPES, torch.device("cpu"))
        scores = scores.contiguous()
        weights = torch.empty(len(scores), choice.num_selected, dtype=torch.float32)
        ids = torch.empty(len(scores), choice.num_selected, dtype=torch.int64)
        args, library = self._args, self._workspace.library
        args.scores, args.dtype, args.num_tokens = scores.data_ptr(), DTYPES[scores.dtype], len(scores)
        args.topk_weights, args.topk_ids = weights.data_ptr(), ids.data_ptr()
        if library.functions.paged_route(library.level, self._reference):
            raise MemoryError("no memory for the scratch of a native choice of experts")
        return weights, ids
