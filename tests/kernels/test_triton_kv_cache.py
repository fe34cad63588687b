"""Writing and copying pages in Triton, bit for bit as torch's operations do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import pytest
import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.fp8 import quantize_f8e4m3
from paged_sdk.kernels.kv_cache import copy_blocks_reference, reshape_and_cache_reference
from paged_sdk.kernels.rotary import rotate_and_cache, rotate_and_cache_reference

pytest.importorskip("triton")

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
CPU: Final = torch.device("cpu")
SLOTS: Final = (3, -1, 31, 0, 7, 12)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_cache = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "f8e4m3"])


def random_heads(num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return a view into a wider tensor, as of a fused projection: six tokens, of which one has a head of zeros."""
    generator = torch.Generator().manual_seed(num_heads)
    heads = (torch.randn(6, num_heads + 2, head_dim, generator=generator) * 3).to(dtype)
    heads[2, 1] = 0
    heads[3] *= 1e-4
    return heads[:, 1 : num_heads + 1]


class Cache(NamedTuple):
    key: Tensor
    value: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def new_cache(
    num_heads: int, head_dim: int, dtype: torch.dtype, *, quantized: bool, device: torch.device = CPU
) -> Cache:
    """Return pages of 4 blocks of 8 tokens that hold 7 everywhere, so that slots not written show."""
    shape = (4, 8, num_heads, head_dim)
    stored = torch.float8_e4m3fn if quantized else dtype
    key, value = (torch.full(shape, 7.0).to(stored).to(device) for _ in range(2))
    k_scale, v_scale = (torch.full(shape[:3], 7.0, device=device) if quantized else None for _ in range(2))
    return Cache(key, value, k_scale, v_scale)


def assert_same_bits(actual: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@every_dtype
@every_cache
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 32), (3, 40), (17, 96)])
def test_tokens_go_to_their_slots(
    triton_device: torch.device, dtype: torch.dtype, quantized: bool, num_heads: int, head_dim: int
) -> None:
    from paged_sdk.kernels.triton.kv_cache import reshape_and_cache

    key, value = random_heads(num_heads, head_dim, dtype), random_heads(num_heads, head_dim, dtype).flip(0)
    slots = torch.tensor(SLOTS)
    expected = new_cache(num_heads, head_dim, dtype, quantized=quantized)
    actual = new_cache(num_heads, head_dim, dtype, quantized=quantized, device=triton_device)
    reshape_and_cache_reference(key, value, expected.key, expected.value, slots, expected.k_scale, expected.v_scale)
    key, value, slots = (tensor.to(triton_device) for tensor in (key, value, slots))
    reshape_and_cache(key, value, actual.key, actual.value, slots, actual.k_scale, actual.v_scale)
    assert_same_bits(actual, expected)


def test_every_f8e4m3_code_and_every_tie_between_two(triton_device: torch.device) -> None:
    """One head whose largest elements are exact only as 448: its scale is 1, and its elements are the codes' values."""
    from paged_sdk.kernels.triton.kv_cache import reshape_and_cache

    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, torch.tensor(bound)) for bound in (0.0, 500.0)])
    values = torch.cat([codes, ties, near, torch.tensor([448.0, 416, 384, 352, 320, 288, 256]).repeat(100)])
    head = torch.cat([values, -values])[None, None]
    cache = new_cache(1, head.shape[2], torch.float32, quantized=True, device=triton_device)
    own = head.to(triton_device)
    reshape_and_cache(
        own, own, cache.key, cache.value, torch.tensor([5], device=triton_device), cache.k_scale, cache.v_scale
    )
    expected, scale = quantize_f8e4m3(head)
    assert scale.item() == 1
    assert cache.k_scale is not None
    assert cache.k_scale[0, 5].item() == 1
    for pages in (cache.key, cache.value):
        assert_same_bits([pages[0, 5]], [expected[0]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_head_that_is_not_finite_stays_visible_and_alone(triton_device: torch.device, bad: float) -> None:
    from paged_sdk.kernels.triton.kv_cache import reshape_and_cache

    key = torch.ones(1, 2, 32, device=triton_device)
    key[0, 0, 3] = bad
    cache = new_cache(2, 32, torch.float32, quantized=True, device=triton_device)
    reshape_and_cache(
        key, key, cache.key, cache.value, torch.tensor([0], device=triton_device), cache.k_scale, cache.v_scale
    )
    assert cache.k_scale is not None
    assert not cache.k_scale[0, 0, 0].isfinite()
    assert cache.k_scale[0, 0, 1].item() == pytest.approx(1 / 448)


@every_dtype
@every_cache
@pytest.mark.parametrize("n", [20, 7, 0])
def test_rotation_and_cache_in_one(triton_device: torch.device, dtype: torch.dtype, quantized: bool, n: int) -> None:
    from paged_sdk.kernels.triton.rotary import rotate_and_cache

    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(6, 5 + 3 + 3, 40, generator=generator).to(dtype)
    angles = torch.randn(6, n, generator=generator) * 10
    slots = torch.tensor(SLOTS)

    def run(serve: Callable[..., None], device: torch.device) -> tuple[Tensor, Cache]:
        own = heads.clone().to(device)
        cache = new_cache(3, 40, dtype, quantized=quantized, device=device)
        rotation = angles.cos().to(device), angles.sin().to(device)
        serve(own[:, :5], own[:, 5:8], own[:, 8:], *rotation, LayerCache(*cache), slots.to(device))
        return own.cpu(), cache

    rotated, cache = run(rotate_and_cache, triton_device)
    expected, expected_cache = run(rotate_and_cache_reference, CPU)
    # A multiplication and an addition may be one operation, and the interpreter rounds bfloat16 towards zero.
    torch.testing.assert_close(rotated, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(rotated[:, 8:], heads[:, 8:])
    assert_same_bits([cache.value, cache.v_scale], [expected_cache.value, expected_cache.v_scale])
    # The keys in the cache are the rotated keys, quantized or not.
    again = new_cache(3, 40, dtype, quantized=quantized)
    reshape_and_cache_reference(
        rotated[:, 5:8], heads[:, 8:], again.key, again.value, slots, again.k_scale, again.v_scale
    )
    assert_same_bits(cache, again)


@every_dtype
@pytest.mark.parametrize("n", [20, 7])
def test_rotated_keys_are_stored_without_their_offsets(triton_device: torch.device, dtype: torch.dtype, n: int) -> None:
    from paged_sdk.kernels.triton.rotary import rotate_and_cache

    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(6, 5 + 3 + 3, 40, generator=generator).to(dtype)
    angles = torch.randn(6, n, generator=generator) * 10
    offsets = 20 * torch.randn(3, 3, 40, generator=generator)
    slots, positions = torch.tensor(SLOTS), torch.tensor([0, -1, 127, 128, 300, 255])

    def run(serve: Callable[..., None], device: torch.device) -> tuple[Tensor, Cache]:
        own = heads.clone().to(device)
        cache = new_cache(3, 40, dtype, quantized=True, device=device)
        rotation = angles.cos().to(device), angles.sin().to(device)
        written_to = LayerCache(*cache, offsets.to(device)), slots.to(device), positions.to(device)
        serve(own[:, :5], own[:, 5:8], own[:, 8:], *rotation, *written_to)
        return own.cpu(), cache

    rotated, cache = run(rotate_and_cache, triton_device)
    expected, expected_cache = run(rotate_and_cache_reference, CPU)
    torch.testing.assert_close(rotated, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert_same_bits([cache.value, cache.v_scale], [expected_cache.value, expected_cache.v_scale])
    again = new_cache(3, 40, torch.float32, quantized=True)
    stored = rotated[:, 5:8].float() - offsets[positions.clamp(min=0) // 128]
    reshape_and_cache_reference(stored, heads[:, 8:], again.key, again.value, slots, again.k_scale, again.v_scale)
    assert_same_bits(cache, again)


def test_offsets_come_with_positions() -> None:
    key = torch.zeros(1, 1, 32)
    cache = new_cache(1, 32, torch.float32, quantized=True)
    angles, slots = key[:, 0, :4], torch.tensor([0])
    with_offsets = LayerCache(*cache, torch.zeros(2, 1, 32))
    rotate_and_cache(key, key, key, angles, angles, with_offsets, slots, torch.tensor([255]))
    for pages, positions in (
        (with_offsets, None),
        (LayerCache(*cache), torch.tensor([0])),
        (with_offsets, torch.tensor([256])),
        (with_offsets, torch.tensor([0], dtype=torch.int32)),
    ):
        with pytest.raises(ConfigError):
            rotate_and_cache(key, key, key, angles, angles, pages, slots, positions)


def test_the_op_is_its_reference_without_a_device() -> None:
    from paged_sdk.kernels.rotary import Rotation

    heads = random_heads(4, 32, torch.float32).contiguous()
    query, key, value = heads[:, :2], heads[:, 2:3], heads[:, 3:]
    angles = torch.linspace(0, 3, 6 * 8).view(6, 8)
    cos, sin = angles.cos(), angles.sin()
    expected = heads[:, :3].clone()
    Rotation(cos, sin).rotate_(expected)
    caches = torch.zeros(4, 8, 1, 32), torch.zeros(4, 8, 1, 32)
    rotate_and_cache(query, key, value, cos, sin, LayerCache(*caches), torch.tensor(SLOTS))
    torch.testing.assert_close(heads[:, :3], expected)
    torch.testing.assert_close(caches[0].flatten(0, 1)[31], expected[2, 2:])


@every_cache
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 32), (1, 5)])
def test_blocks_are_copied_in_all_layers(
    triton_device: torch.device, quantized: bool, num_heads: int, head_dim: int
) -> None:
    from paged_sdk.kernels.triton.kv_cache import copy_blocks

    generator = torch.Generator().manual_seed(2)
    dtype = torch.float8_e4m3fn if quantized else torch.float16
    caches = [torch.randn(6, 8, num_heads, head_dim, generator=generator).to(dtype) for _ in range(6)]
    scales = [torch.randn(6, 8, num_heads, generator=generator) for _ in range(6 if quantized else 0)]
    pairs = torch.tensor([[0, 3], [1, 5], [0, 4]])
    moved = [[tensor.clone().to(triton_device) for tensor in tensors] for tensors in (caches, scales)]
    copy_blocks_reference(caches[:3], caches[3:], pairs, scales[:3], scales[3:])
    copy_blocks([*moved[0], *moved[1]], pairs.to(triton_device))
    assert_same_bits([*moved[0], *moved[1]], [*caches, *scales])


def test_no_tokens_and_no_pairs(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.kv_cache import copy_blocks, reshape_and_cache
    from paged_sdk.kernels.triton.rotary import rotate_and_cache

    cache = torch.zeros(2, 8, 1, 32, device=triton_device)
    none = torch.zeros(0, 1, 32, device=triton_device)
    slots = torch.zeros(0, dtype=torch.int64, device=triton_device)
    reshape_and_cache(none, none, cache, cache, slots)
    rotate_and_cache(none, none, none, none[:, 0, :16], none[:, 0, :16], LayerCache(cache, cache), slots)
    copy_blocks([cache], torch.zeros(0, 2, dtype=torch.int64, device=triton_device))
    assert not cache.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 5 GB of a CUDA device's memory")
def test_offsets_past_two_to_the_31(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.kv_cache import copy_blocks, reshape_and_cache

    num_blocks = 40_000
    cache = torch.zeros(num_blocks, 32, 8, 256, dtype=torch.uint8, device=triton_device).view(torch.float8_e4m3fn)
    scale = torch.zeros(num_blocks, 32, 8, device=triton_device)
    key = torch.full((1, 8, 256), 448.0, dtype=torch.bfloat16, device=triton_device)
    slots = torch.tensor([num_blocks * 32 - 1], device=triton_device)
    reshape_and_cache(key, key, cache, cache, slots, scale, scale)
    assert cache[-1, -1].float().eq(448).all()
    copy_blocks([cache], torch.tensor([[num_blocks - 1, num_blocks - 2]], device=triton_device))
    assert cache[-2, -1].float().eq(448).all()
