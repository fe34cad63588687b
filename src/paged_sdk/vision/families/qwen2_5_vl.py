"""Qwen2.5-VL: images as Qwen2-VL has them."""

from paged_sdk.vision.families.qwen2_vl import VISION

__all__ = ["VISION"]
