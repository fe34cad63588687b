"""Both backends against attention written out, over mixed batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from naive_attention import CPU, Text, naive_attention, shape
from torch import Tensor

from largest_tensor import LargestTensor
from paged_sdk.attention.backend import AttentionBackend, layer_scores
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.attention import prefill_attention
from spans import span

NUM_BLOCKS = 64
# Three texts: long prompts in chunks beside decodes and beside a text's first token; what each row computes, by step.
LENGTHS = (70, 41, 23)
STEPS: tuple[dict[int, int], ...] = (
    {0: 33, 1: 1},
    {1: 1, 0: 16},
    {0: 1, 1: 17, 2: 1},
    {2: 5, 0: 1, 1: 1},
    {1: 1, 0: 1, 2: 1},
    {0: 1, 2: 1, 1: 1},
    {0: 17, 1: 19, 2: 15},
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def run(backend: AttentionBackend, texts: Sequence[Text], step: dict[int, int], kv_ids: Sequence[list[int]]) -> float:
    """Run one step in all layers, and return the largest error."""
    spans = [span(texts[i].num_computed, count, kv_ids[i]) for i, count in step.items()]
    attention = backend.prepare(spans)
    worst = 0.0
    for layer in range(len(texts[0].query)):

        def rows(tensors: list[Tensor], layer: int = layer) -> Tensor:
            return torch.cat([t[layer, s.start : s.end] for t, s in zip(tensors, spans, strict=True)])

        chosen = [texts[i] for i in step]
        output = attention.forward(
            layer, rows([t.query for t in chosen]), rows([t.key for t in chosen]), rows([t.value for t in chosen])
        )
        assert output.is_contiguous()
        worst = max(worst, float((output.double() - rows([t.expected for t in chosen])).abs().max()))
    for i, count in step.items():
        texts[i].num_computed += count
    return worst


def tables(block_size: int, *, seed: int = 0) -> list[list[int]]:
    """Return block tables of scattered blocks."""
    order = torch.randperm(NUM_BLOCKS * 64 // block_size, generator=torch.Generator().manual_seed(seed)).tolist()
    taken = iter(order)
    return [[next(taken) for _ in range(-(-length // block_size))] for length in LENGTHS]


def poisoned(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> PagedBackend:
    """Return a pool whose every slot holds NaN."""
    settings = PoolSettings(block_size=block_size, dtype=dtype, device=CPU)
    backend = PagedBackend(config, settings, NUM_BLOCKS * 64 // block_size)
    for layer in backend._layers:
        for tensor in layer.tensors:
            tensor.fill_(torch.nan)
    return backend


def make_backend(config: DecoderConfig, *, paged: bool) -> tuple[AttentionBackend, list[list[int]]]:
    """Make a float64 backend, and say where it keeps each text."""
    if paged:
        return poisoned(config, 16, torch.float64), tables(16)
    return ContiguousBackend(config, dtype=torch.float64, device=CPU), [[0], [1], [2]]


@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("windows", "softcap"), [((None,), None), ((None,), 5.0), ((9, None, 32), None), ((9,), 5.0)])
def test_paged(windows: tuple[int | None, ...], softcap: float | None, dtype: torch.dtype, block_size: int) -> None:
    config = shape(windows=windows, softcap=softcap)
    texts = [Text(config, length, seed=length, dtype=dtype) for length in LENGTHS]
    backend = poisoned(config, block_size, dtype)
    kv_ids = tables(block_size)
    assert max(run(backend, texts, step, kv_ids) for step in STEPS) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("windows", "softcap"), [((None,), None), ((9, None), 5.0)])
def test_contiguous(windows: tuple[int | None, ...], softcap: float | None, dtype: torch.dtype) -> None:
    config = shape(windows=windows, softcap=softcap)
    texts = [Text(config, length, seed=length, dtype=dtype) for length in LENGTHS]
    backend = ContiguousBackend(config, dtype=dtype, device=CPU)
    assert max(run(backend, texts, step, [[5], [0], [2]]) for step in STEPS) < TOLERANCE[dtype]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 6), (6, 1), (9, 3)])
@pytest.mark.parametrize("paged", [True, False])
def test_every_grouping_of_heads(num_heads: int, num_kv_heads: int, *, paged: bool) -> None:
    config = shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    texts = [Text(config, length, seed=length, dtype=torch.float64) for length in LENGTHS]
    backend, kv_ids = make_backend(config, paged=paged)
    assert max(run(backend, texts, step, kv_ids) for step in STEPS) < 1e-12


def test_a_long_prompt_is_taken_in_tiles() -> None:
    config = shape(num_heads=2, num_kv_heads=1, head_dim=4, windows=(None, 100))
    text = Text(config, 300, seed=0, dtype=torch.float64)
    backend = poisoned(config, 16, torch.float64)
    kv_ids = [list(range(40, 60))]
    assert run(backend, [text], {0: 290}, kv_ids) < 1e-12
    assert run(backend, [text], {0: 10}, kv_ids) < 1e-12


def test_where_the_blocks_lie_changes_no_bit() -> None:
    config = shape(windows=(None, 9))

    def outputs(seed: int) -> list[Tensor]:
        backend = poisoned(config, 16, torch.float32)
        kv_ids = tables(16, seed=seed)
        text = Text(config, 70, seed=0, dtype=torch.float32)
        collected = []
        for first, last in ((0, 40), (40, 69), (69, 70)):
            step = backend.prepare([span(first, last - first, kv_ids[0])])
            collected += [
                step.forward(
                    layer, text.query[layer, first:last], text.key[layer, first:last], text.value[layer, first:last]
                )
                for layer in range(2)
            ]
        return collected

    assert all(torch.equal(a, b) for a, b in zip(outputs(0), outputs(1), strict=True))


def test_blocks_that_left_every_window_are_not_read() -> None:
    config = shape(windows=(9,))
    text = Text(config, 60, seed=0, dtype=torch.float64)
    backend = poisoned(config, 8, torch.float64)
    table = list(range(1, 9))
    assert run(backend, [text], {0: 40}, [table]) < 1e-12
    table[:3] = [0, 0, 0]  # positions 0 to 23; the next query, 40, sees 32 and on, its successors later ones
    assert run(backend, [text], {0: 1}, [table]) < 1e-12
    assert run(backend, [text], {0: 19}, [table]) < 1e-12


def test_decodes_of_very_different_lengths() -> None:
    """They are attended to in groups, so that short texts are not filled up to the longest."""
    config = shape(num_heads=2, num_kv_heads=1, head_dim=4)
    lengths = (3, 700, 5, 1500, 2, 705)
    texts = [Text(config, length, seed=length, dtype=torch.float64) for length in lengths]
    backend = poisoned(config, 16, torch.float64)
    kv_ids = [list(range(first, first + 100)) for first in (0, 1, 46, 48, 143, 144)]
    kv_ids[1][44:], kv_ids[5][45:] = [], []
    for i, length in enumerate(lengths):
        run(backend, texts, {i: length - 1}, kv_ids)
    assert run(backend, texts, dict.fromkeys(range(len(lengths)), 1), kv_ids) < 1e-12
    assert run(backend, [Text(config, 1, seed=9, dtype=torch.float64)], {0: 1}, [[200]]) < 1e-12


@pytest.mark.parametrize("paged", [True, False])
def test_a_sequence_of_nan_hurts_no_other(*, paged: bool) -> None:
    config = shape()
    texts = [Text(config, length, seed=length, dtype=torch.float64) for length in LENGTHS]
    texts[1].key.fill_(torch.nan)
    texts[1].value.fill_(torch.nan)
    backend, kv_ids = make_backend(config, paged=paged)
    for step in STEPS:
        parts = {i: slice(texts[i].num_computed, texts[i].num_computed + count) for i, count in step.items()}
        attention = backend.prepare([span(part.start, step[i], kv_ids[i]) for i, part in parts.items()])
        output = attention.forward(
            0,
            torch.cat([texts[i].query[0, part] for i, part in parts.items()]),
            torch.cat([texts[i].key[0, part] for i, part in parts.items()]),
            torch.cat([texts[i].value[0, part] for i, part in parts.items()]),
        )
        for (i, part), attended in zip(parts.items(), torch.split(output, list(step.values())), strict=True):
            texts[i].num_computed = part.stop
            if i == 1:
                assert attended.isnan().all()
            else:
                torch.testing.assert_close(attended, texts[i].expected[0, part], rtol=0, atol=1e-12)


@pytest.mark.parametrize("paged", [True, False])
def test_a_copy_goes_its_own_way(*, paged: bool) -> None:
    """A fork: the block that both would write to (or the slot) is copied, then both write on."""
    config = shape(windows=(None, 9))
    original, fork = (Text(config, 40, seed=1, dtype=torch.float64) for _ in range(2))
    fork.query[:, 20:] *= -1
    fork.key[:, 20:] *= -1
    backend, _ = make_backend(config, paged=paged)
    kv_ids = [[3, 5, 7], [3, 6, 8]] if paged else [[0], [1]]
    assert run(backend, [original], {0: 20}, kv_ids) < 1e-12
    backend.copy([(5, 6, 16) if paged else (0, 1, 20)])
    step = backend.prepare([span(20, 20, kv_ids[1])])
    for layer in range(config.num_layers):
        query, key, value = fork.query[layer], fork.key[layer], fork.value[layer]
        expected = naive_attention(config, layer, query, key, value)[20:]
        output = step.forward(layer, query[20:], key[20:], value[20:])
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert run(backend, [original], {0: 20}, kv_ids) < 1e-12


def test_contiguous_storage_doubles_and_goes() -> None:
    config = shape()
    backend = ContiguousBackend(config, dtype=torch.float32, device=CPU)
    per_token = config.kv_elements_per_token * 4
    backend.prepare([span(0, 10, [0])])
    assert backend.num_bytes == 64 * per_token
    backend.prepare([span(64, 1, [0])])
    assert backend.num_bytes == 128 * per_token
    backend.prepare([span(0, 1000, [1])])
    assert backend.num_bytes == 1128 * per_token
    backend.release([0, 1, 2])
    assert backend.num_bytes == 0


def test_the_pool_has_the_stated_size() -> None:
    config = shape(windows=(None, None))
    backend = PagedBackend(config, PoolSettings(block_size=16, dtype=torch.bfloat16, device=CPU), 10)
    assert backend.num_bytes == 10 * 16 * config.kv_elements_per_token * 2
    backend.release([1])
    assert backend.num_bytes == 10 * 16 * config.kv_elements_per_token * 2


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_memory_does_not_grow_with_the_chunk(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of all queries at once would be 8 times 200 times 300 numbers: a tile's are bounded."""
    monkeypatch.setattr("paged_sdk.kernels.attention._MAX_SCORES", 2**17)
    config = shape(num_heads=8, head_dim=4, softcap=softcap)
    text = Text(config, 300, seed=0, dtype=torch.float64)
    with LargestTensor() as watch:
        (scores,) = layer_scores(config, CPU)
        output = prefill_attention(text.query[0, 100:], text.key[0], text.value[0], scores)
    torch.testing.assert_close(output, text.expected[0, 100:], rtol=0, atol=1e-12)
    assert watch.num_elements <= 2**17
