"""The native backend against attention written out and against torch's backends, over mixed batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from naive_attention import CPU, Text, naive_attention, shape
from test_backends import LENGTHS, NUM_BLOCKS, STEPS, TOLERANCE, run, tables
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.attention.backend import AttentionBackend, AttentionSetup
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.native_paged import NativePagedBackend, why_not_native
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import Precision
from spans import span

NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOWS_AND_CAPS: tuple[tuple[tuple[int | None, ...], float | None], ...] = (
    ((None,), None),
    ((None,), 5.0),
    ((9, None, 32), None),
    ((9,), 5.0),
)


def native(
    config: DecoderConfig, *, block_size: int = 16, precision: Precision = Precision.FLOAT32, **settings: Any
) -> NativePagedBackend:
    """Return a pool whose every slot, and every scale, holds NaN."""
    pool = PoolSettings(block_size=block_size, device=CPU, **settings)
    num_blocks = NUM_BLOCKS * 64 // block_size
    backend = NativePagedBackend(config, pool, num_blocks, workspace=workspace(), precision=precision)
    for cache in backend.native_pages.caches:
        for tensor in (cache.key, cache.value, cache.k_scale, cache.v_scale):
            if tensor is not None:
                tensor.copy_(torch.full(tensor.shape, torch.nan))
    return backend


def attended(
    backend: AttentionBackend, texts: Sequence[Text], steps: Sequence[dict[int, int]], kv_ids: Sequence[list[int]]
) -> list[Tensor]:
    """Return what every token of each text attends to in the last layer, however the steps cut the texts."""
    computed, parts = [0] * len(texts), [[] for _ in texts]  # type: tuple[list[int], list[list[Tensor]]]
    last = len(texts[0].query) - 1
    for step in steps:
        spans = [span(computed[i], count, kv_ids[i]) for i, count in step.items()]
        query, key, value = (
            torch.cat([getattr(texts[i], name)[last, s.start : s.end] for i, s in zip(step, spans, strict=True)])
            for name in ("query", "key", "value")
        )
        output = backend.prepare(spans).forward(last, query, key, value)
        for i, part in zip(step, torch.split(output, list(step.values())), strict=True):
            parts[i].append(part)
            computed[i] += len(part)
    return [torch.cat(each) for each in parts]


@needs_library
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("windows", "softcap"), WINDOWS_AND_CAPS)
def test_mixed_batches(
    windows: tuple[int | None, ...], softcap: float | None, dtype: torch.dtype, block_size: int
) -> None:
    config = shape(windows=windows, softcap=softcap)
    texts = [Text(config, length, seed=length, dtype=dtype) for length in LENGTHS]
    backend = native(config, block_size=block_size, dtype=dtype)
    kv_ids = tables(block_size)
    assert max(run(backend, texts, step, kv_ids) for step in STEPS) < TOLERANCE[dtype]


@needs_library
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 6), (6, 1), (9, 3)])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_every_grouping_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    config = shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    texts = [Text(config, length, seed=length, dtype=torch.float32) for length in LENGTHS]
    backend = native(config, dtype=torch.float32)
    assert max(run(backend, texts, step, tables(16)) for step in STEPS) < TOLERANCE[torch.float32]


@needs_library
@pytest.mark.parametrize(("windows", "softcap"), WINDOWS_AND_CAPS)
def test_what_torchs_backends_give(windows: tuple[int | None, ...], softcap: float | None) -> None:
    config = shape(windows=windows, softcap=softcap)
    texts = [Text(config, length, seed=length, dtype=torch.float32) for length in LENGTHS]
    own = attended(native(config, dtype=torch.float32), texts, STEPS, tables(16))
    paged = PagedBackend(config, PoolSettings(block_size=16, dtype=torch.float32, device=CPU), NUM_BLOCKS * 4)
    contiguous = ContiguousBackend(config, dtype=torch.float32, device=CPU)
    for backend, kv_ids in ((paged, tables(16)), (contiguous, [[0], [1], [2]])):
        for got, expected in zip(own, attended(backend, texts, STEPS, kv_ids), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


@needs_library
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("windows", [(None,), (24,)])
def test_f8e4m3_caches_hold_what_torchs_do(windows: tuple[int | None, ...], dtype: torch.dtype) -> None:
    """The codes and scales are the same, so the outputs are: far nearer than the codes are to the exact values."""
    config = shape(windows=windows, head_dim=64)
    texts = [Text(config, length, seed=length, dtype=dtype) for length in LENGTHS]
    kind = PagedCacheType.F8E4M3
    own = native(config, dtype=dtype, cache_type=kind)
    settings = PoolSettings(block_size=16, dtype=dtype, device=CPU, cache_type=kind)
    paged = PagedBackend(config, settings, NUM_BLOCKS * 4)
    assert own.num_bytes == paged.num_bytes
    pairs = zip(attended(own, texts, STEPS, tables(16)), attended(paged, texts, STEPS, tables(16)), texts, strict=True)
    for got, expected, text in pairs:
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])
        assert (got.double() - text.expected[0]).abs().max() > 2 * TOLERANCE[torch.float32]


@needs_library
def test_a_tokens_result_depends_on_no_batch_chunk_or_table() -> None:
    config = shape(windows=(None, 9))
    texts = [Text(config, length, seed=length, dtype=torch.float32) for length in LENGTHS]
    expected = attended(native(config, dtype=torch.float32), texts, STEPS, tables(16))
    cuts: tuple[tuple[dict[int, int], ...], ...] = (
        tuple({i: 1} for i, length in enumerate(LENGTHS) for _ in range(length)),
        tuple({i: length} for i, length in enumerate(LENGTHS)),
        (dict(enumerate(LENGTHS)),),
    )
    for seed, steps in enumerate(cuts):
        got = attended(native(config, dtype=torch.float32), texts, steps, tables(16, seed=seed))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@needs_library
@pytest.mark.parametrize("cache_type", [PagedCacheType.AUTO, PagedCacheType.F8E4M3])
@pytest.mark.parametrize("num_prompt_tokens", [0, 17, 60])
def test_it_follows_from_a_tokens_place_alone_where_tokens_need_not_be_exact(
    num_prompt_tokens: int, cache_type: PagedCacheType
) -> None:
    """Rounded products differ between prompts and generated tokens, but not whether these come one by one, or as
    drafts, or many at once after a preemption.
    """
    config = shape(head_dim=64, windows=(None, 24))
    text = Text(config, 60, seed=1, dtype=torch.bfloat16, spread=1)

    def outputs(*lengths: int) -> Tensor:
        backend = native(config, dtype=torch.bfloat16, precision=Precision.INT8, cache_type=cache_type)
        parts, start = [], 0
        for count in lengths:
            step = backend.prepare([span(start, count, tables(16)[0], num_prompt_tokens=num_prompt_tokens)])
            new = slice(start, start + count)
            parts.append(step.forward(1, text.query[1, new], text.key[1, new], text.value[1, new]))
            start += count
        return torch.cat(parts)

    one_by_one = outputs(*[1] * 60)
    for lengths in ((60,), (16, 44), (17, 43), (50, 2, 8), (1, 9, 8, 42)):
        assert torch.equal(outputs(*lengths), one_by_one)


@needs_library
def test_tokens_need_not_be_exact() -> None:
    """bfloat16 numbers have 8 bits, and codes as many of a vector's largest: 1 % of values near 1."""
    config = shape(head_dim=64)
    texts = [Text(config, 60, seed=1, dtype=torch.bfloat16, spread=1)]
    steps = ({0: 50}, *({0: 1} for _ in range(10)))
    exact, *rounded = (
        attended(native(config, dtype=torch.bfloat16, precision=precision), texts, steps, tables(16))[0]
        for precision in Precision
    )
    for fast in rounded:
        torch.testing.assert_close(fast, exact, rtol=0, atol=0.03)


@needs_library
def test_blocks_that_left_every_window_are_not_read() -> None:
    config = shape(windows=(9,))
    text = Text(config, 60, seed=0, dtype=torch.float32)
    backend = native(config, block_size=8, dtype=torch.float32)
    table = list(range(1, 9))
    tolerance = TOLERANCE[torch.float32]
    assert run(backend, [text], {0: 40}, [table]) < tolerance
    table[:3] = [0, 0, 0]  # positions 0 to 23; the next query, 40, sees 32 and on, its successors later ones
    assert run(backend, [text], {0: 1}, [table]) < tolerance
    assert run(backend, [text], {0: 19}, [table]) < tolerance


@needs_library
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sequence_that_is_not_finite_hurts_no_other(bad: float) -> None:
    config = shape()
    texts = [Text(config, length, seed=length, dtype=torch.float32) for length in LENGTHS]
    clean = attended(native(config, dtype=torch.float32), texts, STEPS, tables(16))
    for values in (texts[1].key, texts[1].value):
        values.fill_(bad)
    got = attended(native(config, dtype=torch.float32), texts, STEPS, tables(16))
    assert not got[1].isfinite().any()
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[2], clean[2])


@needs_library
def test_a_copy_goes_its_own_way() -> None:
    """A fork: the block that both would write to is copied, then both write on."""
    config = shape(windows=(None, 9))
    original, fork = (Text(config, 40, seed=1, dtype=torch.float32) for _ in range(2))
    fork.query[:, 20:] *= -1
    fork.key[:, 20:] *= -1
    backend = native(config, dtype=torch.float32)
    kv_ids = [[3, 5, 7], [3, 6, 8]]
    tolerance = TOLERANCE[torch.float32]
    assert run(backend, [original], {0: 20}, kv_ids) < tolerance
    backend.copy([(5, 6, 16)])
    step = backend.prepare([span(20, 20, kv_ids[1])])
    for layer in range(config.num_layers):
        query, key, value = fork.query[layer], fork.key[layer], fork.value[layer]
        expected = naive_attention(config, layer, query, key, value)[20:]
        output = step.forward(layer, query[20:], key[20:], value[20:])
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
    assert run(backend, [original], {0: 20}, kv_ids) < tolerance


@needs_library
def test_keys_and_values_may_lie_between_the_queries() -> None:
    """As the one product for all three leaves them."""
    config = shape()
    text = Text(config, 20, seed=0, dtype=torch.float32)
    heads = torch.cat((text.query[0], text.key[0], text.value[0]), dim=1)
    step = native(config, dtype=torch.float32).prepare([span(0, 20, [9, 4])])
    output = step.forward(0, heads[:, :4], heads[:, 4:6], heads[:, 6:])
    torch.testing.assert_close(output.double(), text.expected[0], rtol=0, atol=TOLERANCE[torch.float32])


@needs_library
def test_why_the_kernels_cannot_serve() -> None:
    setup = AttentionSetup(
        model=shape(head_dim=64), engine=EngineConfig(), dtype=torch.float32, device=CPU, workspace=workspace()
    )
    for dtype in NATIVE_DTYPES:
        assert why_not_native(evolve(setup, dtype=dtype)) is None
    encoder = evolve(shape(head_dim=64, windows=(9, None)), bidirectional=True)
    assert why_not_native(evolve(setup, model=encoder)) is None
    reason = why_not_native(evolve(setup, dtype=torch.float64))
    assert reason == "its dtype is torch.float64, and the kernels take float32, bfloat16 and float16"
    reason = why_not_native(evolve(setup, model=shape(head_dim=72)))
    assert reason == "its heads have 72 elements, and the kernels take multiples of 16"
    assert why_not_native(evolve(setup, workspace=None)) == "they are absent"
