"""Compute attention in trials, in which tokens do not see each other."""

from __future__ import annotations

from attrs import field, frozen
from torch import Tensor

from paged_sdk.models.transformers_door.seam import AttentionCall

__all__ = ["TrialAttention", "are_alike"]


@frozen(eq=False)
class TrialAttention:
    """Collects what a forward pass gives to attention.

    :ivar parts: queries and keys of each layer, ``[num_tokens, num_heads * head_dim]``
    :ivar masks: the layers' masks
    """

    parts: list[Tensor] = field(factory=list)
    masks: list[object] = field(factory=list)

    def attend(self, call: AttentionCall) -> Tensor:
        """Record a call, and compute attention in which each token sees only itself."""
        self.parts.extend(each[0].transpose(0, 1).flatten(1).float() for each in (call.query, call.key))
        self.masks.append(call.mask)
        repeats = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(repeats, 1).transpose(1, 2).contiguous()


def are_alike(some: Tensor, others: Tensor, rounding: float = 1e-3) -> bool:
    """Return whether two tensors have the same shape, and are equal up to rounding. A wrong position, mask or vector
    makes a relative difference of about 1.

    :param rounding: the largest difference, relative to the largest value
    """
    return some.shape == others.shape and bool((some - others).abs().max() <= rounding * others.abs().max())
