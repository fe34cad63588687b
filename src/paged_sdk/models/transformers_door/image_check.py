"""Check that a class uses an image only to replace the embeddings of image tokens by the encoder's vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.step import AttentionStep, InsertedRows, StepContext
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.seam import whole_masks
from paged_sdk.models.transformers_door.skeleton import refusal, untried
from paged_sdk.models.transformers_door.trial_attention import TrialAttention, are_alike

__all__ = ["PromptWithImage", "check_images"]

_ROUNDING: Final = 1e-3
_ROUNDING_OF_16_BITS: Final = 5e-2
"""16-bit dtypes round to 3 digits in each layer."""


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


class _NoAttention(AttentionStep):
    """Fills the place of a step's attention, which is never called: the seam calls :class:`TrialAttention` instead."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Fail."""
        raise AssertionError("a trial has no step's attention: the seam computes it")

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        """Fail."""
        raise AssertionError("a trial has no step's attention: the seam computes it")


@torch.inference_mode()
def check_images(model: TransformersModel, prompt: PromptWithImage) -> bool:
    """Run a prompt in the class's own way, with pixels, and as steps do, as tokens with inserted vectors; compare both.

    :returns: whether the tokens of an image attend to one another in both directions
    :raises UnsupportedArchitectureError: the results differ, or this package cannot compute the class's masks
    """
    model_type = model.config.model_type
    reference, own = TrialAttention(), TrialAttention()
    try:
        model.seam.attend = reference.attend
        given = {**prompt.given, "use_cache": False}
        with whole_masks(model.transformers_model):
            reference.parts.append(
                model.run(given, len(prompt.token_ids), StepContext(attention=_NoAttention())).float()
            )
        model.seam.attend = own.attend
        step = StepContext(attention=_NoAttention(), inserted=prompt.inserted)
        own.parts.append(model.forward(prompt.token_ids, prompt.positions, step).float())
    except Exception as error:  # a class may raise anything
        raise untried(model_type, "a prompt with an image", error) from error
    finally:
        model.seam.attend = model.attend
    rounding = _ROUNDING if model.dtype in (torch.float32, torch.float64) else _ROUNDING_OF_16_BITS
    if len(own.parts) != len(reference.parts) or not all(
        are_alike(some, others, rounding) for some, others in zip(own.parts, reference.parts, strict=True)
    ):
        raise refusal(model_type, "it does more with an image than to put vectors in place of tokens")
    for is_bidirectional in (False, True):
        if _are_masks(reference.masks, model, prompt.blocks if is_bidirectional else None):
            return is_bidirectional
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
