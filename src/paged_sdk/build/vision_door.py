"""Loads image support for models that run through transformers' classes, and checks it with a trial image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from paged_sdk.build.processor_prompts import SIZES, ProcessorPrompts
from paged_sdk.build.vision import LoadedVision
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.images import ImageLimits
from paged_sdk.kernels.step import InsertedRows
from paged_sdk.models.transformers_door.image_check import PromptWithImage, check_images
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.skeleton import refusal, untried
from paged_sdk.vision.encoder import ImageEncoder

__all__ = ["load_vision_door"]


def load_vision_door(path: Path, model: TransformersModel, tokenizer: Tokenizer, limits: ImageLimits) -> LoadedVision:
    """Load a checkpoint's processor, and compare the results of transformers' processor and class with this engine's.

    :param path: the checkpoint
    :raises UnsupportedArchitectureError: the results differ
    :raises CheckpointError: the checkpoint lacks something that images need
    :raises ConfigError: a package that reads images is not installed
    """
    model_type, own = model.config.model_type, model.transformers_model
    if not model.blocks:
        raise refusal(model_type, "its layers cannot be told from its image encoder's")
    prompts = ProcessorPrompts(path, model_type, own, tokenizer)
    limits = prompts.limited(limits)
    text = {module for block in model.blocks for module in block.modules()}
    encoder = ImageEncoder(own, dtype=model.dtype, device=model.device, others=text)
    is_bidirectional = check_images(model, _prompt(model, prompts, encoder))
    return LoadedVision(prompts.make(limits, is_bidirectional=is_bidirectional), encoder, is_bidirectional)


def _prompt(model: TransformersModel, prompts: ProcessorPrompts, encoder: ImageEncoder) -> PromptWithImage:
    """Return a prompt with one image, prepared by transformers and by this engine."""
    sizes = SIZES[:1]
    token_ids, media = prompts.made(sizes)
    (span,) = media.spans
    model_type, device = model.config.model_type, model.device
    try:
        with torch.inference_mode():
            encoded = encoder.encode(span.inputs, lambda: None)
    except Exception as error:  # a class with an unexpected interface
        raise untried(model_type, "its encoder", error) from error
    if len(encoded.vectors) != len(span.places):
        what = f"its encoder gives {len(encoded.vectors)} vectors for an image of {len(span.places)} tokens"
        raise refusal(model_type, what)
    positions = np.arange(len(token_ids)) if media.positions is None else media.positions
    blocks = torch.full((len(token_ids),), -1, device=device)
    blocks[int(span.places[0]) : int(span.places[-1]) + 1] = 0
    given = prompts.given(sizes)
    return PromptWithImage(
        given={
            name: value.to(device=device, dtype=model.dtype if value.is_floating_point() else None)
            for name, value in given.items()
        },
        token_ids=torch.tensor(list(token_ids), device=device),
        positions=torch.from_numpy(positions).to(device),
        inserted=InsertedRows(torch.from_numpy(span.places).to(device), encoded.vectors, encoded.later),
        blocks=blocks,
    )
