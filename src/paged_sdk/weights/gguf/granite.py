"""Make the configs of Granite's GGUF files, which are read as llama.cpp does."""

from __future__ import annotations

from typing import Any

from paged_sdk.weights.gguf.model import GgufModel
from paged_sdk.weights.gguf.routing import SHARED_SIZE

__all__ = ["granite", "granite_multipliers", "granitemoe", "has_positions"]


def granite(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Granite.

    :raises UnsupportedArchitectureError: the file has no positions
    """
    if not has_positions(model):
        raise model.unsupported("no positions")
    return granite_multipliers(model)


def granitemoe(model: GgufModel) -> dict[str, Any]:
    """Return the settings of Granite with experts, with or without a shared one. As in llama.cpp, the size of an expert
    is that of MLPs.

    :raises UnsupportedArchitectureError: the file has no positions
    """
    shared = model.integer(SHARED_SIZE, 0, minimum=0)
    own = {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}
    return granite(model) | own


def granite_multipliers(model: GgufModel) -> dict[str, Any]:
    """Return Granite's multipliers; 0 in the file means the default."""
    return {
        "attention_multiplier": model.number("attention.scale", 0.0) or model.head_dim**-0.5,
        "embedding_multiplier": model.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": model.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": model.number("logit_scale", 0.0) or 1.0,
    }


def has_positions(model: GgufModel) -> bool:
    """Return whether queries and keys are rotated, which a key for rotary scaling says of these architectures."""
    return bool(model.metadata.get(f"{model.architecture}.rope.scaling.finetuned", True))
