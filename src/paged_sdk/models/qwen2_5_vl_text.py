"""Read the text decoder of Qwen2.5-VL, which is Qwen2-VL's."""

from __future__ import annotations

from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.qwen2_vl_text import read_qwen2_vl_text

__all__ = ["FAMILY"]

FAMILY = DecoderFamily(
    architectures=("Qwen2_5_VLTextModel",),
    read=read_qwen2_vl_text,
    sizes=Sizes(vocab=152_064, hidden=8192, mlp=29_568, layers=80, heads=64),
)
