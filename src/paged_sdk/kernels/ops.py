"""Gathers the public functions under one name: ``from paged_sdk.kernels import ops``.

Each is a torch.library custom op of the same name in ``torch.ops.paged_sdk``, with a fake kernel for ``torch.compile``
and ``torch.export``.
"""

from __future__ import annotations

from paged_sdk.kernels.fused_moe import fused_moe as fused_moe
from paged_sdk.kernels.kv_cache import copy_blocks as copy_blocks
from paged_sdk.kernels.kv_cache import reshape_and_cache as reshape_and_cache
from paged_sdk.kernels.paged_attention import paged_attention as paged_attention

__all__ = ["copy_blocks", "fused_moe", "paged_attention", "reshape_and_cache"]
