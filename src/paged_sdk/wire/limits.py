"""Defines how much input one body may have."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from paged_sdk.wire.body import Bounds

__all__ = ["NUM_INPUTS", "NUM_PROMPTS", "TokenIds"]

NUM_PROMPTS: Final = Bounds(1, 1024)
"""How many texts to continue. Each is a request, and submitting more would block the event loop too long."""

NUM_INPUTS: Final = Bounds(1, 2048)
"""How many texts to embed or to rank: OpenAI's limit."""

TokenIds: TypeAlias = Annotated[list[int], Bounds(1, 1 << 20)]
"""Token ids of a prompt. No model's context is longer than 2**20, and checking as many takes 50 ms."""
