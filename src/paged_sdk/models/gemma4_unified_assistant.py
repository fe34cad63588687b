"""Read the assistant of Gemma 4 12B, whose checkpoint names another class for the same."""

from __future__ import annotations

from paged_sdk.models.gemma4_assistant import FAMILY

__all__ = ["FAMILY"]
