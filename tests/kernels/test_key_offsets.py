"""Keys less what they have in common, and back."""

from __future__ import annotations

import pytest
import torch

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.key_offsets import KEY_SPAN, add_key_offsets, check_key_offsets, subtract_key_offsets

POSITIONS = torch.tensor([0, 127, 128, 383, 256])
SPANS = torch.tensor([0, 0, 1, 2, 2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_key_has_its_spans_offset(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(5, 2, 8, generator=generator).to(dtype)
    offsets = torch.randn(3, 2, 8, generator=generator)
    stored = subtract_key_offsets(key, offsets, POSITIONS)
    assert stored.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(stored, (key - offsets[SPANS]))
    torch.testing.assert_close(add_key_offsets(stored, offsets, POSITIONS).to(dtype), key)
    batch = torch.stack((stored, stored.flip(0)))
    added = add_key_offsets(batch, offsets, torch.stack((POSITIONS, POSITIONS.flip(0))))
    torch.testing.assert_close(added.to(dtype), torch.stack((key, key.flip(0))))


def test_what_does_not_fit_is_refused() -> None:
    cache = torch.zeros(4, 8, 2, 16, dtype=torch.float8_e4m3fn)
    good = torch.zeros(2, 2, 16)
    check_key_offsets(None, cache, 1000)
    check_key_offsets(good, cache, 2 * KEY_SPAN)
    for offsets, pages, num_positions in (
        (good, cache, 2 * KEY_SPAN + 1),
        (good, cache.float(), 0),
        (good[:, :1], cache, 0),
        (good.mT.contiguous().mT, cache, 0),
        (good.double(), cache, 0),
    ):
        with pytest.raises(ConfigError) as caught:
            check_key_offsets(offsets, pages, num_positions)
        assert caught.value.setting.startswith("key_offsets")
