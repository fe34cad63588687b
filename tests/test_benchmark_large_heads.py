"""What the benchmark of large heads compares is the same attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.large_heads import by_torch
from benchmarks.gpu.paged_attention import Heads, make_batch

from paged_sdk.kernels.triton.paged_attention import paged_attention


@pytest.mark.parametrize("key_only", [0, 16])
def test_both_ways_attend_alike(key_only: int, triton_device: torch.device) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=48, key_only=key_only)
    batch = make_batch(2, 1, 9, triton_device, heads=heads)
    assert batch.num_bytes == 2 * 9 * 48 * 2 * (1 if key_only else 2)
    output, expected = paged_attention(*batch.inputs), by_torch(batch)()
    torch.testing.assert_close(output[..., key_only:], expected[..., key_only:], rtol=3e-2, atol=3e-2)
