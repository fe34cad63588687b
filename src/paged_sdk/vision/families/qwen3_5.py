"""Qwen 3.5: images as in Qwen2-VL."""

from paged_sdk.vision.families.qwen2_vl import VISION

__all__ = ["VISION"]
