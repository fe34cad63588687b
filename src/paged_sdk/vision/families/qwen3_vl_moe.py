"""Qwen3-VL with mixtures of experts: images as in Qwen2-VL, with further vectors for the decoder's first layers."""

from paged_sdk.vision.families.qwen2_vl import VISION

__all__ = ["VISION"]
