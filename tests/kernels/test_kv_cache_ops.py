"""The ops `reshape_and_cache` and `copy_blocks`, and their torch references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.fp8 import quantize_f8e4m3
from paged_sdk.kernels.kv_cache import (
    copy_blocks,
    copy_blocks_reference,
    reshape_and_cache,
    reshape_and_cache_reference,
)

NUM_BLOCKS: Final = 6
BLOCK_SIZE: Final = 4
DTYPES: Final = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# torch's check of a schema multiplies every argument, which it cannot do in f8e4m3.
CHECKS: Final = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

Write = Callable[..., None]
EITHER: Final = pytest.mark.parametrize("write", [reshape_and_cache, reshape_and_cache_reference])
EITHER_COPY: Final = pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_reference])


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """Return what is stored, NaN included."""
    return tensor.view(torch.uint8)


def cache_of(dtype: torch.dtype, heads: tuple[int, int] = (3, 16)) -> Tensor:
    return torch.full((NUM_BLOCKS, BLOCK_SIZE, *heads), torch.nan).to(dtype)


def scales() -> Tensor:
    return torch.full((NUM_BLOCKS, BLOCK_SIZE, 3), torch.nan)


@EITHER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_go_to_their_slots_and_nowhere_else(write: Write, dtype: torch.dtype) -> None:
    key, value = draw(5, 3, 16, dtype=dtype), draw(5, 3, 16, dtype=dtype, seed=1)
    caches = cache_of(dtype), cache_of(dtype)
    slots = [7, -1, 0, 23, -5]
    write(key, value, *caches, torch.tensor(slots))
    for new, cache in zip((key, value), caches, strict=True):
        expected = cache_of(dtype)
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = new[token]
        assert torch.equal(bits(cache), bits(expected))


@EITHER
def test_an_fp8_cache_gets_codes_and_scales(write: Write) -> None:
    key, value = draw(4, 3, 16, dtype=torch.bfloat16), draw(4, 3, 16, dtype=torch.bfloat16, seed=1) * 1e4
    caches = cache_of(torch.float8_e4m3fn), cache_of(torch.float8_e4m3fn)
    k_scale, v_scale = scales(), scales()
    write(key, value, *caches, torch.tensor([9, 2, -1, 3]), k_scale, v_scale)
    for new, cache, scale in ((key, caches[0], k_scale), (value, caches[1], v_scale)):
        codes, expected = quantize_f8e4m3(new[[1, 3, 0]])
        written = torch.tensor([2, 3, 9])
        assert torch.equal(bits(cache.flatten(0, 1))[written], bits(codes))
        assert torch.equal(scale.flatten(0, 1)[written], expected)
        assert scale.isnan().sum() == (NUM_BLOCKS * BLOCK_SIZE - 3) * 3


@EITHER
@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_nothing_to_write(write: Write, slots: list[int]) -> None:
    key = draw(len(slots), 3, 16)
    caches = cache_of(torch.float32), cache_of(torch.float32)
    write(key, key, *caches, torch.tensor(slots, dtype=torch.int64))
    assert all(cache.isnan().all() for cache in caches)


def test_strided_keys_are_written() -> None:
    fused = draw(4, 9, 16)
    caches = cache_of(torch.float32), cache_of(torch.float32)
    reshape_and_cache(fused[:, 3:6], fused[:, 6:], *caches, torch.arange(4))
    assert torch.equal(caches[0][0], fused[:, 3:6])
    assert torch.equal(caches[1][0], fused[:, 6:])


@EITHER_COPY
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_blocks_are_copied_in_every_layer(copy: Write, dtype: torch.dtype) -> None:
    quantized = dtype == torch.float8_e4m3fn
    keys, values = ([draw(NUM_BLOCKS, 4, 3, 16, seed=s + n).to(dtype) for n in range(2)] for s in (0, 2))
    k_scales, v_scales = ([draw(NUM_BLOCKS, 4, 3, seed=s + n) for n in range(2)] if quantized else [] for s in (4, 6))
    every = [*keys, *values, *k_scales, *v_scales]
    expected = [tensor.clone() for tensor in every]
    pairs = [(0, 5), (3, 1), (0, 2)]
    for tensor in expected:
        for source, target in pairs:
            bits(tensor)[target] = bits(tensor)[source]
    copy(keys, values, torch.tensor(pairs), k_scales, v_scales)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(every, expected, strict=True))
    copy(keys, values, torch.empty(0, 2, dtype=torch.int64), k_scales, v_scales)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(every, expected, strict=True))


@pytest.mark.parametrize("quantized", [False, True])
def test_torch_finds_the_ops_well_made(*, quantized: bool) -> None:
    checks = CHECKS if quantized else (*CHECKS, "test_schema")
    key = draw(3, 3, 16)
    kind = torch.float8_e4m3fn if quantized else torch.float32
    caches = [draw(NUM_BLOCKS, 4, 3, 16).to(kind) for _ in range(2)]
    own = [draw(NUM_BLOCKS, 4, 3) for _ in range(2)] if quantized else [None, None]
    torch.library.opcheck(
        torch.ops.paged_sdk.reshape_and_cache.default,
        (key, key.clone(), *caches, torch.tensor([4, -1, 2]), *own),
        test_utils=checks,
    )
    layers = [draw(NUM_BLOCKS, 4, 3) for _ in range(2)] if quantized else []
    torch.library.opcheck(
        torch.ops.paged_sdk.copy_blocks.default,
        (caches[:1], caches[1:], torch.tensor([[0, 1]]), layers[:1], layers[1:]),
        test_utils=checks,
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(backend: str) -> None:
    key, value, slots, pairs = draw(3, 3, 16), draw(3, 3, 16, seed=1), torch.tensor([5, -1, 6]), torch.tensor([[1, 4]])

    def step(key_cache: Tensor, value_cache: Tensor) -> Tensor:
        reshape_and_cache(key, value, key_cache, value_cache, slots)
        copy_blocks([key_cache], [value_cache], pairs)
        return key_cache[4] + value_cache[4]

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    eager, traced = ([cache_of(torch.float32), cache_of(torch.float32)] for _ in range(2))
    assert torch.equal(compiled(*traced).nan_to_num(9), step(*eager).nan_to_num(9))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(traced, eager, strict=True))


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("key.shape", {"key": draw(3, 48)}),
        ("key.shape", {"key": draw(3, 2, 16), "value": draw(3, 2, 16)}),
        ("key.dtype", {"key": torch.zeros(3, 3, 16, dtype=torch.int8)}),
        ("value.shape", {"value": draw(2, 3, 16)}),
        ("value.dtype", {"value": draw(3, 3, 16).half()}),
        ("key_cache.dtype", {"key_cache": cache_of(torch.float16)}),
        ("key_cache.shape", {"key_cache": cache_of(torch.float32, (3, 8))}),
        ("value_cache.shape", {"value_cache": cache_of(torch.float32, (2, 16))}),
        ("value_cache.stride()", {"value_cache": cache_of(torch.float32, (16, 3)).mT}),
        ("k_scale", {"k_scale": scales()}),
        ("slot_mapping.dtype", {"slot_mapping": torch.arange(3, dtype=torch.int32)}),
        ("slot_mapping.shape", {"slot_mapping": torch.arange(4)}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 24, 1])}),
    ],
)
def test_what_cannot_be_written_is_named(setting: str, changed: dict[str, Tensor]) -> None:
    arguments: dict[str, Any] = {
        "key": draw(3, 3, 16),
        "value": draw(3, 3, 16),
        "key_cache": cache_of(torch.float32),
        "value_cache": cache_of(torch.float32),
        "slot_mapping": torch.arange(3),
    }
    with pytest.raises(ConfigError) as caught:
        reshape_and_cache(**arguments | changed)
    assert caught.value.setting == setting
    assert arguments["key_cache"].isnan().all()


@pytest.mark.parametrize(
    ("setting", "pairs"),
    [
        ("block_pairs", [[0, 6]]),
        ("block_pairs", [[-1, 2]]),
        ("block_pairs", [[0, 1], [2, 1]]),
        ("block_pairs", [[0, 1], [1, 2]]),
        ("block_pairs.shape", [[0, 1, 2]]),
    ],
)
def test_pairs_that_cannot_be_copied_are_named(setting: str, pairs: list[list[int]]) -> None:
    with pytest.raises(ConfigError) as caught:
        copy_blocks([cache_of(torch.float32)], [cache_of(torch.float32)], torch.tensor(pairs))
    assert caught.value.setting == setting


def test_caches_that_are_not_layers_of_one_model_are_named() -> None:
    pairs = torch.tensor([[0, 1]])
    one, other, quantized = cache_of(torch.float32), cache_of(torch.float16), cache_of(torch.float8_e4m3fn)
    for setting, arguments in (
        ("key_caches", ([], [], pairs)),
        ("key_caches", ([one], [one, one], pairs)),
        ("key_caches.dtype", ([one, other], [one, other], pairs)),
        ("k_scales", ([quantized], [quantized], pairs, [scales()])),
        ("k_scale", ([quantized], [quantized], pairs)),
        ("block_pairs.dtype", ([one], [one], pairs.int())),
    ):
        with pytest.raises(ConfigError) as caught:
            copy_blocks(*arguments)
        assert caught.value.setting == setting
