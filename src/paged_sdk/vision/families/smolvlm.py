"""SmolVLM: Idefics 3 with smaller tiles."""

from paged_sdk.vision.families.idefics3 import VISION

__all__ = ["VISION"]
