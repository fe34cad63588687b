"""Check that a class uses an image only to replace the embeddings of image tokens by the encoder's vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.errors import shown
from paged_sdk.kernels.step import AttentionStep, InsertedRows, StepContext
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.seam import AttentionCall, whole_masks
from paged_sdk.models.transformers_door.skeleton import refusal

__all__ = ["PromptWithImage", "check_images"]

_ALIKE: Final = 1e-3
_ALIKE_IN_HALVES: Final = 5e-2
"""Largest difference, relative to the largest value: 16-bit dtypes round to 3 digits in each layer. A wrong position,
mask or vector makes a relative difference of about 1."""


@frozen(eq=False)
class PromptWithImage:
    """Holds a prompt with one image, as transformers' processor and as this package prepare it.

    :ivar given: the class's inputs from transformers' processor
    :ivar token_ids: ``[num_tokens]``
    :ivar positions: ``[num_tokens]`` or ``[3, num_tokens]``
    :ivar inserted: the image's vectors, and their places
    :ivar blocks: ``[num_tokens]`` int64: 0 for the tokens from the image's first vector to its last, -1 for others
    """

    given: Mapping[str, Any]
    token_ids: Tensor
    positions: Tensor
    inserted: InsertedRows
    blocks: Tensor


@frozen(eq=False)
class _Seen:
    """Collects each token's queries and keys of all layers, and the layers' masks."""

    parts: list[Tensor] = field(factory=list)
    masks: list[object] = field(factory=list)

    def attend(self, call: AttentionCall) -> Tensor:
        """Record a call, and compute attention in which each token sees only itself."""
        self.parts.extend(each[0].transpose(0, 1).flatten(1).float() for each in (call.query, call.key))
        self.masks.append(call.mask)
        repeats = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(repeats, 1).transpose(1, 2).contiguous()


class _Nobody(AttentionStep):
    """Fills the place of a step's attention, which is never called: the seam calls :meth:`_Seen.attend` instead."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Fail."""
        raise AssertionError("nobody computes attention here")


@torch.inference_mode()
def check_images(model: TransformersModel, prompt: PromptWithImage) -> bool:
    """Run a prompt in the class's own way, with pixels, and as steps do, as tokens with inserted vectors; compare both.

    :returns: whether the tokens of an image attend to one another in both directions
    :raises UnsupportedArchitectureError: the results differ, or this package cannot compute the class's masks
    """
    model_type = model.config.model_type
    reference, own = _Seen(), _Seen()
    try:
        model.seam.attend = reference.attend
        given = {**prompt.given, "use_cache": False}
        with whole_masks(model.transformers_model):
            reference.parts.append(model.run(given, len(prompt.token_ids), StepContext(attention=_Nobody())).float())
        model.seam.attend = own.attend
        step = StepContext(attention=_Nobody(), inserted=prompt.inserted)
        own.parts.append(model.forward(prompt.token_ids, prompt.positions, step).float())
    except Exception as error:  # a class may raise anything
        reason = shown(next(iter(str(error).splitlines()), type(error).__name__))
        raise refusal(model_type, f"a prompt with an image cannot be tried ({reason})") from error
    finally:
        model.seam.attend = model.attend
    largest = _ALIKE if model.dtype in (torch.float32, torch.float64) else _ALIKE_IN_HALVES
    if len(own.parts) != len(reference.parts) or not all(
        _alike(some, others, largest) for some, others in zip(own.parts, reference.parts, strict=True)
    ):
        raise refusal(model_type, "it does more with an image than to put vectors in place of tokens")
    for is_whole in (False, True):
        if _are_masks(reference.masks, model, prompt.blocks if is_whole else None):
            return is_whole
    raise refusal(model_type, "its masks of prompts with images are none that can be computed here")


def _are_masks(masks: Sequence[object], model: TransformersModel, blocks: Tensor | None) -> bool:
    """Return whether all layers' masks are causal with the layers' windows, as without images.

    :param blocks: numbers of blocks of tokens that also see one another, -1 for other tokens; None: no blocks
    """
    for mask, window in zip(masks, model.config.sliding_windows, strict=True):
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return False
        places = torch.arange(mask.shape[-1], device=mask.device)
        seen = places <= places[:, None]
        if blocks is not None:
            seen |= (blocks == blocks[:, None]) & (blocks >= 0)
        if window is not None:
            seen &= places > places[:, None] - window
        if not torch.equal(mask[0, 0], seen):
            return False
    return True


def _alike(some: Tensor, others: Tensor, largest: float) -> bool:
    """Return whether two tensors are equal up to rounding."""
    return some.shape == others.shape and bool((some - others).abs().max() <= largest * others.abs().max())
