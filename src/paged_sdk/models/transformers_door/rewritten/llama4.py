"""Rewrites the modules of Llama 4 with images: those of its text decoder."""

from __future__ import annotations

from paged_sdk.models.transformers_door.rewritten.llama4_text import REWRITTEN

__all__ = ["REWRITTEN"]
