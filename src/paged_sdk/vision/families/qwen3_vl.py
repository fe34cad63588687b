"""Qwen3-VL: images as Qwen2-VL has them, with further vectors for the decoder's first layers."""

from paged_sdk.vision.families.qwen2_vl import VISION

__all__ = ["VISION"]
