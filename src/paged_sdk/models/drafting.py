"""Run a small decoder whose input is made of another model's embeddings and hidden states, to draft for that model."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.quant.linear import Linear

__all__ = ["DraftingDecoder", "likeliest_tokens", "projected", "run_layers"]

DraftingDecoder: TypeAlias = DecoderModel | FusedDecoderModel
"""Such a decoder, as it runs."""


def projected(linear: Linear, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Multiply rows, which have several parts.

    :param parts: ``[num_rows, size]`` float32 each
    :param dtype: the decoder's, in which a layer without native kernels multiplies
    """
    rows = torch.cat(parts, 1)
    return linear.forward(rows if linear.native_weights is not None else rows.to(dtype), None)


def run_layers(model: DraftingDecoder, inputs: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
    """Return hidden states, ``[num_tokens, hidden_size]``, as the model's ``normed`` takes them.

    :param inputs: of the first layer, ``[num_tokens, hidden_size]``; may be overwritten
    """
    return model.forward_embedded(
        inputs.float() if isinstance(model, FusedDecoderModel) else inputs.to(model.dtype), positions, ctx
    )


def likeliest_tokens(model: DraftingDecoder, hidden: Tensor) -> list[int]:
    """Return the likeliest token of each row of :func:`run_layers`'s result; below 0: there is none."""
    if isinstance(model, FusedDecoderModel):
        tokens: list[int] = model.likeliest(hidden).tolist()
        return tokens
    logits = model.logits(hidden)
    found: list[int] = logits.argmax(1).where(logits.isfinite().all(1), NOT_DRAWN).tolist()
    return found
