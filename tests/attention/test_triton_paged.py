"""The Triton backend against torch's, over mixed batches. Without CUDA, Triton's interpreter runs the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve
from naive_attention import CPU, Text, naive_attention, shape
from torch import Tensor

from plain_varlen import plain_varlen

pytest.importorskip("triton")

from paged_sdk.attention.backend import AttentionBackend, AttentionSetup
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.triton_paged import TritonPagedBackend, choose_prefills, triton_storage
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.layer_shape import LayerShape
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.transfer import to_device
from paged_sdk.layers.rotary import RotaryEmbedding
from spans import span

NUM_BLOCKS: Final = 40
#: What each text computes, step by step: chunks of prompts beside decodes and beside a text's first token.
STEPS: Final = ({0: 17, 1: 1}, {1: 1, 0: 7}, {0: 1, 1: 11, 2: 1}, {2: 5, 0: 1, 1: 1}, {0: 1, 1: 1, 2: 1})
LENGTHS: Final = (27, 15, 7)
TABLES: Final = ([7, 2, 30, 11], [4, 39], [0])
WINDOWS_AND_CAPS: Final = (((None, 9), None), ((9,), 5.0))
#: Both backends round weights and outputs to the dtype, the values being near 1.
TOLERANCE: Final = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
CACHE_TYPES: Final = (PagedCacheType.AUTO, PagedCacheType.F8E4M3)
NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pool(
    kind: Callable[[DecoderConfig, PoolSettings, int], PagedBackend],
    config: DecoderConfig,
    device: torch.device,
    **settings: Any,
) -> PagedBackend:
    """Return a pool whose every slot, and every scale, holds NaN."""
    backend = kind(config, PoolSettings(block_size=8, device=device, **settings), NUM_BLOCKS)
    for layer in backend._layers:
        for tensor in layer.tensors:
            tensor.copy_(torch.full(tensor.shape, torch.nan))
    return backend


def attended(
    backend: AttentionBackend,
    texts: Sequence[Text],
    device: torch.device,
    steps: Sequence[Mapping[int, int]] = STEPS,
) -> list[Tensor]:
    """Return what every step's tokens attend to in every layer."""
    computed = [0] * len(texts)
    outputs = []
    for step in steps:
        spans = [span(computed[i], count, TABLES[i]) for i, count in step.items()]
        attention = backend.prepare(spans)
        for layer in range(len(texts[0].query)):
            query, key, value = (
                torch.cat([getattr(texts[i], name)[layer, s.start : s.end] for i, s in zip(step, spans, strict=True)])
                for name in ("query", "key", "value")
            )
            output = attention.forward(layer, query.to(device), key.to(device), value.to(device))
            assert output.is_contiguous()
            outputs.append(output.cpu())
        for i, count in step.items():
            computed[i] += count
    assert tuple(computed) == LENGTHS
    return outputs


@pytest.mark.thinned("cache_type", "dtype", "windows", "softcap")
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("windows", "softcap"), WINDOWS_AND_CAPS)
def test_what_torchs_backend_gives(
    windows: tuple[int | None, ...],
    softcap: float | None,
    dtype: torch.dtype,
    cache_type: PagedCacheType,
    triton_device: torch.device,
) -> None:
    config = shape(windows=windows, softcap=softcap)
    texts = [Text(config, length, seed=length, dtype=dtype) for length in LENGTHS]
    own = pool(TritonPagedBackend, config, triton_device, dtype=dtype, cache_type=cache_type)
    torchs = pool(PagedBackend, config, CPU, dtype=dtype, cache_type=cache_type)
    assert own.num_bytes == torchs.num_bytes
    for got, expected in zip(attended(own, texts, triton_device), attended(torchs, texts, CPU), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("windows", "cache_type"),
    [
        ((None, 9), PagedCacheType.AUTO),
        ((9,), PagedCacheType.AUTO),
        pytest.param((None, 9), PagedCacheType.F8E4M3, marks=pytest.mark.long),
    ],
)
def test_chunks_by_another_backend(
    windows: tuple[int | None, ...],
    cache_type: PagedCacheType,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks go to what was chosen for them, decodes beside them stay."""
    monkeypatch.setattr("paged_sdk.kernels.prefill_choice._TILE", 1)
    monkeypatch.setattr("paged_sdk.kernels.prefill_choice._WORTH_DECODING", 1)
    # A device with more would not be kept busy by chunks of 5 tokens.
    monkeypatch.setattr("paged_sdk.kernels.prefill_choice.num_multiprocessors", lambda device: 1)
    config = shape(windows=windows)
    texts = [Text(config, length, seed=length, dtype=torch.float32) for length in LENGTHS]
    calls: list[int] = []

    def flash(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(len(query))
        return plain_varlen(query, *arguments, **options)

    chosen = choose_prefills(
        config, PoolSettings(block_size=8, dtype=torch.float32, device=triton_device, cache_type=cache_type)
    )
    prefills = [evolve(choice, flash=flash) for choice in chosen]
    kind = partial(TritonPagedBackend, prefills=prefills)
    backend = pool(kind, config, triton_device, dtype=torch.float32, cache_type=cache_type)
    torchs = pool(PagedBackend, config, CPU, dtype=torch.float32, cache_type=cache_type)
    steps = [dict(sorted(step.items(), key=lambda item: item[1] > 1)) for step in STEPS]
    expected = attended(torchs, texts, CPU, steps)
    for got, wanted in zip(attended(backend, texts, triton_device, steps), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
    assert calls == [count for count in (17, 7, 11, 5) for _ in windows]


def test_room_is_left_for_splits_of_long_contexts() -> None:
    """The least that steps over long contexts take, whatever serves chunks of prompts."""
    engine = EngineConfig(max_num_batched_tokens=2048, max_model_len=131_072)
    setup = AttentionSetup(model=shape(), engine=engine, dtype=torch.float32, device=CPU)
    storage = triton_storage(setup)
    assert storage.scratch == {CPU: 2048 * 4 * 16 * (16 + 1) * 4}  # tokens, heads, splits, a vector and a sum
    short = evolve(setup, engine=evolve(engine, max_model_len=4096))
    assert triton_storage(short).scratch[CPU] == 2 * 8 * 64 * (16 + 1) * 4  # programs of one processor, rows of each
    sizes = [LayerShape(num_kv_heads=2, head_dim=size, intermediate_size=1) for size in (256, 512)]
    mixed = evolve(shape(windows=(None, None)), layer_shapes=tuple(sizes))
    # Larger heads fill the processor with fewer programs.
    assert triton_storage(evolve(short, model=mixed)).scratch[CPU] == 2 * 8 * 64 * (256 + 1) * 4


@pytest.mark.thinned("cache_type", "rotary_dim", of=1)
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotation_and_write_are_one(rotary_dim: int, cache_type: PagedCacheType, triton_device: torch.device) -> None:
    """Of heads as the one product for queries, keys and values leaves them."""
    config = shape()
    text = Text(config, 12, seed=0, dtype=torch.float32)
    own = pool(TritonPagedBackend, config, triton_device, dtype=torch.float32, cache_type=cache_type)
    torchs = pool(PagedBackend, config, CPU, dtype=torch.float32, cache_type=cache_type)
    for first, last in ((0, 11), (11, 12)):

        def output(backend: AttentionBackend, device: torch.device, first: int = first, last: int = last) -> Tensor:
            heads = torch.cat((text.query[0], text.key[0], text.value[0]), dim=1)[first:last].to(device)
            rope = RotaryEmbedding(RopeConfig(rotary_dim=rotary_dim), device=device)
            rotation = rope.at(torch.arange(first, last, device=device))
            step = backend.prepare([span(first, last - first, [9, 4])])
            return step.rotate_and_forward(0, heads[:, :6], heads[:, 6:], rotation).cpu()

        torch.testing.assert_close(output(own, triton_device), output(torchs, CPU), rtol=0, atol=2e-5)


def test_decodes_whose_indices_are_made_on_the_device(triton_device: torch.device) -> None:
    """What a CUDA graph records: the same results, and rows that only fill up the batch write and read nothing."""
    config = shape(windows=(None, 9))
    texts = [Text(config, length, seed=length, dtype=torch.float32) for length in LENGTHS]
    backend = pool(TritonPagedBackend, config, triton_device, dtype=torch.float32)
    assert isinstance(backend, TritonPagedBackend)
    for i, text in enumerate(texts):
        step = backend.prepare([span(0, LENGTHS[i] - 1, TABLES[i])])
        for layer in range(2):
            heads = (getattr(text, name)[layer, : LENGTHS[i] - 1] for name in ("query", "key", "value"))
            step.forward(layer, *(each.to(triton_device) for each in heads))
    before = [tensor.clone() for layer in backend._layers for tensor in layer.tensors]
    seats = [
        *backend.seats([table[0] for table in TABLES], [0] * len(TABLES), TABLES).tolist(),
        backend.empty_seat,
        backend.empty_seat,
    ]
    positions = torch.tensor([*(length - 1 for length in LENGTHS), -1, -1], device=triton_device)
    step = backend.decode(torch.tensor(seats, device=triton_device), positions, max(LENGTHS))
    for layer in range(2):
        query, key, value = (
            torch.cat([*(getattr(text, name)[layer, -1:] for text in texts), torch.ones(2, heads, 16)])
            for name, heads in (("query", 4), ("key", 2), ("value", 2))
        )
        output = step.forward(layer, query.to(triton_device), key.to(triton_device), value.to(triton_device)).cpu()
        for i, text in enumerate(texts):
            whole = naive_attention(config, layer, text.query[layer], text.key[layer], text.value[layer])
            torch.testing.assert_close(output[i].double(), whole[-1], rtol=0, atol=2e-5)
        assert output[3:].eq(0).all()
    written = [
        tensor.cpu().nan_to_num() != old.cpu().nan_to_num()
        for tensor, old in zip((tensor for layer in backend._layers for tensor in layer.tensors), before, strict=True)
    ]
    for mask in written:
        assert mask.flatten(2).any(-1).sum() == len(texts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str)
def test_keys_are_stored_without_their_offsets(dtype: torch.dtype, triton_device: torch.device) -> None:
    """Rotated in the same launch, or before: prompts, chunks and decodes, over a span's end."""
    config = shape()
    text = Text(config, 140, seed=0, dtype=dtype, spread=1)
    offsets = 3 * torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(0))
    rope = RotaryEmbedding(RopeConfig(rotary_dim=16), device=triton_device)
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()

    def outputs(kind: type[PagedBackend], device: torch.device, *, at_once: bool) -> Tensor:
        options: dict[str, Any] = {"dtype": dtype, "cache_type": PagedCacheType.F8E4M3}
        backend = pool(kind, config, device, key_offsets=(offsets.to(device),), **options)
        parts = []
        for first, last in ((0, 120), (120, 139), (139, 140)):
            heads = torch.cat((text.query[0], text.key[0], text.value[0]), dim=1)[first:last].to(device)
            rotation = rope.at(torch.arange(first, last, device=triton_device))
            step = backend.prepare([span(first, last - first, table)])
            if at_once:
                parts.append(step.rotate_and_forward(0, heads[:, :6], heads[:, 6:], rotation).cpu())
            else:
                heads = heads.to(triton_device)
                rotation.rotate_(heads[:, :6])
                query, key, value = torch.split(heads.to(device), [4, 2, 2], dim=1)
                parts.append(step.forward(0, query, key, value).cpu())
        return torch.cat(parts)

    expected = outputs(PagedBackend, CPU, at_once=False)
    for at_once in (True, False):
        got = outputs(TritonPagedBackend, triton_device, at_once=at_once)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_copied_blocks_hold_the_same(cache_type: PagedCacheType, triton_device: torch.device) -> None:
    config = shape(windows=(None, 9, None))
    backend = pool(TritonPagedBackend, config, triton_device, dtype=torch.float32, cache_type=cache_type)
    tensors = [tensor for layer in backend._layers for tensor in layer.tensors]
    for seed, tensor in enumerate(tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    before = [tensor.cpu().float() for tensor in tensors]
    backend.copy([(5, 39, 8), (7, 2, 8), (5, 3, 8)])
    for tensor, old in zip(tensors, before, strict=True):
        old[[39, 2, 3]] = old[[5, 7, 5]]
        assert torch.equal(tensor.cpu().float(), old)


def test_arrays_go_to_the_device_as_one(triton_device: torch.device) -> None:
    arrays = (np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3), np.array([-1], dtype=np.int32))
    tensors = to_device(triton_device, *arrays)
    if triton_device.type == "cuda":
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.device.type == triton_device.type
        assert tensor.data_ptr() % 16 == 0
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))


@NEEDS_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_step_waits_for_nothing(cache_type: PagedCacheType, triton_device: torch.device) -> None:
    config = shape(windows=(None, 9))
    texts = [Text(config, length, seed=length, dtype=torch.bfloat16) for length in LENGTHS]
    backend = pool(TritonPagedBackend, config, triton_device, dtype=torch.bfloat16, cache_type=cache_type)
    attended(backend, texts, triton_device)  # compiles
    backend.copy([(0, 1, 8)])
    query, key, value = (torch.randn(3, count, 16, dtype=torch.bfloat16, device=triton_device) for count in (4, 2, 2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = backend.prepare([span(length, 1, table) for length, table in zip(LENGTHS, TABLES, strict=True)])
        for layer in range(2):
            step.forward(layer, query, key, value)
        backend.copy([(0, 1, 8)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
