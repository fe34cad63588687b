"""The attention layer against attention written out token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from paged_case import attend
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels import InputMetadata, PagedAttention, paged_attention_layer, prefill_choice
from paged_sdk.kernels.attention import masked_attention
from paged_sdk.kernels.attention_inputs import ScoreOptions
from paged_sdk.kernels.flash_prefill import why_not
from paged_sdk.kernels.paged_attention import paged_attention_reference
from paged_sdk.kernels.prefill_choice import PagedPrefill, PrefillShape
from plain_varlen import plain_varlen

HEADS: Final = 6
KV_HEADS: Final = 2
SIZE: Final = 16
SCALE: Final = SIZE**-0.5
BLOCK_SIZE: Final = 4
CUDA: Final = torch.device("cuda")


class Text:
    """Holds queries, keys and values of a sequence, and what attention over it gives."""

    def __init__(self, length: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query, self.key, self.value = (
            torch.randn(length, heads, SIZE, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def expected(self, *, slopes: list[float] | None = None, **options: Any) -> Tensor:
        query, key, value = self.query.double(), self.key.double(), self.value.double()
        rows = [
            attend(
                query[position, head],
                key[:, head * KV_HEADS // HEADS],
                value[:, head * KV_HEADS // HEADS],
                position,
                scale=SCALE,
                slope=0.0 if slopes is None else slopes[head],
                **options,
            )
            for position in range(len(query))
            for head in range(HEADS)
        ]
        return torch.stack(rows).view(query.shape)


class Cache:
    """Holds pages of NaN, and hands out blocks in a scattered order."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        shape = (16, BLOCK_SIZE, KV_HEADS, SIZE)
        self.key, self.value = torch.full(shape, torch.nan).to(dtype), torch.full(shape, torch.nan).to(dtype)
        quantized = dtype == torch.float8_e4m3fn
        self.k_scale, self.v_scale = (torch.full(shape[:3], torch.nan) if quantized else None for _ in range(2))
        self.table = torch.tensor([[9, 3, 12, 0, 7, 5, 14, 1]])

    def slots(self, first: int, last: int) -> Tensor:
        position = torch.arange(first, last)
        return self.table[0, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def close(output: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def run(layer: PagedAttention, text: Text, cache: Cache, first: int, last: int, metadata: InputMetadata) -> Tensor:
    part = slice(first, last)
    output: Tensor = layer(
        text.query[part],
        text.key[part],
        text.value[part],
        None,
        cache.key,
        cache.value,
        metadata,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
    return output


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 7},
        {"softcap": 0.8},
        {"slopes": [0.5, 0.25, 0.1, 0.05, 0.02, 0.01]},
        {"window": 5, "softcap": 0.8, "slopes": [0.5, 0.25, 0.1, 0.05, 0.02, 0.01]},
    ],
    ids=str,
)
def test_a_prompt_in_chunks_and_then_decodes(options: dict[str, Any]) -> None:
    text, cache = Text(24), Cache()
    layer = PagedAttention(
        *(HEADS, SIZE, SCALE, KV_HEADS),
        sliding_window=options.get("window"),
        alibi_slopes=options.get("slopes"),
        softcap=options.get("softcap"),
    )
    outputs = []
    for first, last in ((0, 9), (9, 20)):
        metadata = InputMetadata(True, cache.slots(first, last), cache.table, torch.tensor([last]))
        outputs.append(run(layer, text, cache, first, last, metadata))
    for first in range(20, 24):
        metadata = InputMetadata(False, cache.slots(first, first + 1), cache.table, torch.tensor([first + 1]))
        outputs.append(run(layer, text, cache, first, first + 1, metadata))
    close(torch.cat(outputs), text.expected(**options))


@pytest.mark.parametrize("lengths", [[20], [8, 12, 20]], ids=["one length", "each its own"])
@pytest.mark.parametrize("window", [None, 6])
def test_chunks_of_one_prompt_in_one_call(lengths: list[int], window: int | None) -> None:
    text, cache = Text(20), Cache()
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS, sliding_window=window)
    first = InputMetadata(True, cache.slots(0, 4), cache.table, torch.tensor([4]))
    start = run(layer, text, cache, 0, 4, first)
    chunks = InputMetadata(
        is_prefill=True,
        slot_mapping=cache.slots(4, 20),
        block_tables=cache.table,
        context_lens=torch.tensor(lengths),
        cu_seqlens_q=torch.tensor([0, 4, 8, 16]),
        max_seqlen_q=8,
        max_context_len=20,
    )
    close(torch.cat((start, run(layer, text, cache, 4, 20, chunks))), text.expected(window=window))


@pytest.mark.parametrize("cached", [False, True])
def test_a_first_prefill_without_block_tables(*, cached: bool) -> None:
    """Two prompts attend over their own keys; caches, if given, are filled all the same."""
    texts, cache = [Text(5, seed=1), Text(9, seed=2)], Cache()
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    query, key, value = (torch.cat([getattr(text, name) for text in texts]) for name in ("query", "key", "value"))
    slots = cache.slots(0, 14)
    metadata = InputMetadata(True, slots, cu_seqlens_q=torch.tensor([0, 5, 14]), max_seqlen_q=9, max_seqlen_k=9)
    caches = (cache.key, cache.value) if cached else (None, None)
    close(layer(query, key, value, None, *caches, metadata), torch.cat([text.expected() for text in texts]))
    assert cached == torch.equal(cache.key.flatten(0, 1)[slots], key)


def test_keys_before_the_queries_without_a_cache() -> None:
    text = Text(12)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    metadata = InputMetadata(
        True, torch.full((12,), -1), cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=torch.tensor([0, 12])
    )
    close(layer(text.query[7:], text.key, text.value, None, None, None, metadata), text.expected()[7:])


def test_padding_is_not_written() -> None:
    text, cache = Text(3), Cache()
    slots = cache.slots(0, 3)
    slots[1] = -1
    run(PagedAttention(HEADS, SIZE, SCALE, KV_HEADS), text, cache, 0, 3, InputMetadata(True, slots))
    assert cache.key.flatten(0, 1)[slots[[0, 2]]].isfinite().all()
    assert cache.key.isnan().sum() == (16 * BLOCK_SIZE - 2) * KV_HEADS * SIZE


def test_an_fp8_cache_is_within_six_percent() -> None:
    """Root mean square. Keys and values lose up to 1/16 each; the vectors are independent and random."""
    text, cache = Text(24, dtype=torch.bfloat16), Cache(dtype=torch.float8_e4m3fn)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    output = run(layer, text, cache, 0, 24, InputMetadata(True, cache.slots(0, 24), cache.table, torch.tensor([24])))
    error = output.double() - text.expected()
    assert error.square().mean().sqrt() < 0.06 * text.expected().square().mean().sqrt()


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x,
        lambda x: x.flatten(1),
        lambda x: x[None],
        lambda x: x.flatten(1)[None],
        lambda x: x.unflatten(0, (5, 1)),
        lambda x: x.flatten(1)[:, None],
    ],
)
def test_any_layout_of_tokens(shape: Callable[[Tensor], Tensor]) -> None:
    text = Text(5)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    metadata = InputMetadata(True, torch.arange(5))
    query = shape(text.query)
    output = layer(query, shape(text.key), shape(text.value), None, None, None, metadata)
    assert output.shape == query.shape
    close(output.view(text.query.shape), text.expected())


def test_slices_of_one_projection_are_taken_as_they_are() -> None:
    text, cache = Text(6), Cache()
    fused = torch.cat([x.flatten(1) for x in (text.query, text.key, text.value)], 1)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    parts = torch.split(fused, [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], 1)
    for metadata in (
        InputMetadata(True, cache.slots(0, 6)),
        InputMetadata(True, cache.slots(0, 6), cache.table, torch.tensor([6])),
    ):
        output = layer(*parts, None, cache.key, cache.value, metadata)
        close(output.view(text.query.shape), text.expected())


def test_a_cap_for_one_call() -> None:
    text = Text(7)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS, softcap=3.0)
    metadata = InputMetadata(True, torch.arange(7))
    output = layer(text.query, text.key, text.value, None, None, None, metadata, softcapping=0.5)
    close(output, text.expected(softcap=0.5))


def masked(text: Text, mask: Tensor, **options: Any) -> Tensor:
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS, **options)
    metadata = InputMetadata(True, torch.arange(len(text.query)))
    output: Tensor = layer(text.query, text.key, text.value, mask, None, None, metadata)
    return output


def additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("form", [lambda m: m, additive, lambda m: m[None, None], lambda m: m.expand(HEADS, -1, -1)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 0.8), (4, 0.8)])
def test_a_causal_mask_changes_nothing(
    form: Callable[[Tensor], Tensor], window: int | None, softcap: float | None
) -> None:
    text = Text(11)
    mask = form(torch.ones(11, 11, dtype=torch.bool).tril())
    output = masked(text, mask, sliding_window=window, softcap=softcap, alibi_slopes=[0.1] * HEADS)
    close(output, text.expected(window=window, softcap=softcap, slopes=[0.1] * HEADS))


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_a_mask_says_what_is_seen(softcap: float | None) -> None:
    """Random ones, some of their rows empty, per head, in tiles: against one softmax over everything."""
    text = Text(40)
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(HEADS, 40, 40, generator=generator) < 0.5
    seen[:, 7] = False
    bias = torch.randn(HEADS, 40, 40, generator=generator)
    key, value = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (text.key, text.value))
    scores = torch.einsum("qhd,khd->hqk", text.query.double(), key) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    for mask in (seen, bias.masked_fill(~seen, -torch.inf)):
        added = additive(seen) if mask.dtype == torch.bool else mask
        expected = torch.einsum("hqk,khd->qhd", (scores + added).softmax(-1).nan_to_num(0), value)
        close(masked(text, mask, softcap=softcap), expected)


def test_masked_attention_is_taken_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(50)
    monkeypatch.setattr("paged_sdk.kernels.attention._MAX_SCORES", 1)
    mask = torch.ones(1, 43, 50, dtype=torch.bool).tril(7)
    output = masked_attention(text.query[7:], text.key, text.value, mask, ScoreOptions(scale=SCALE, window=9))
    close(output, text.expected(window=9)[7:])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(backend: str) -> None:
    text = Text(9)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS, sliding_window=4, alibi_slopes=[0.1] * HEADS)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for paged in (True, False):
        cache = Cache()
        table, lengths = (cache.table, torch.tensor([9])) if paged else (None, None)
        metadata = InputMetadata(True, cache.slots(0, 9), table, lengths)
        output = compiled(text.query, text.key, text.value, None, cache.key, cache.value, metadata)
        close(output, text.expected(window=4, slopes=[0.1] * HEADS))
        assert torch.equal(cache.key.flatten(0, 1)[cache.slots(0, 9)], text.key)


def test_slopes_move_and_convert_with_the_layer() -> None:
    text = Text(5, dtype=torch.bfloat16)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS, alibi_slopes=[0.5] * HEADS).bfloat16()
    assert not layer.state_dict()
    output = layer(text.query, text.key, text.value, None, None, None, InputMetadata(True, torch.arange(5)))
    close(output, text.expected(slopes=[0.5] * HEADS), 2e-2)
    assert str(layer) == (
        "PagedAttention(num_heads=6, head_size=16, num_kv_heads=2, sliding_window=None, softcap=None)"
    )


@pytest.mark.parametrize(
    ("setting", "arguments"),
    [
        ("num_heads", (6, 16, 1.0, 4)),
        ("num_heads", (0, 16, 1.0)),
        ("head_size", (6, 0, 1.0)),
        ("scale", (6, 16, float("inf"))),
        ("window", (6, 16, 1.0, 2, 0)),
        ("alibi_slopes", (6, 16, 1.0, 2, None, [1.0])),
        ("softcap", (6, 16, 1.0, 2, None, None, -1.0)),
    ],
)
def test_settings_that_cannot_be_used_are_named(setting: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        PagedAttention(*arguments)
    assert caught.value.setting == setting


PAGES: Final = Cache()
PAGED: Final = InputMetadata(True, PAGES.slots(0, 6), PAGES.table, torch.tensor([6]))
TWO: Final = InputMetadata(True, torch.arange(6), cu_seqlens_q=torch.tensor([0, 2, 6]))


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("query.shape", {"query": torch.zeros(6, 3, 16)}),
        ("key.shape", {"key": torch.zeros(6, 6, 16)}),
        ("value.shape", {"value": torch.zeros(32)}),
        ("key.shape", {"query": torch.zeros(5, 6, 16)}),
        ("key.dtype", {"query": torch.zeros(6, 6, 16, dtype=torch.bfloat16)}),
        ("value.dtype", {"value": torch.zeros(6, 2, 16, dtype=torch.float16)}),
        ("slot_mapping.device", {"input_metadata": InputMetadata(True, torch.arange(6, device="meta"))}),
        ("slot_mapping.shape", {"input_metadata": InputMetadata(True, torch.arange(5))}),
        ("value_cache", {"key_cache": PAGES.key}),
        ("key_cache", {"value_cache": PAGES.value}),
        ("key_cache", {"input_metadata": PAGED}),
        ("k_scale", {"key_cache": PAGES.key, "value_cache": PAGES.value, "k_scale": torch.zeros(16, 4, 2)}),
        ("attention_mask.shape", {"attention_mask": torch.zeros(6, 5)}),
        ("attention_mask.shape", {"attention_mask": torch.zeros(6)}),
        ("attention_mask.shape", {"attention_mask": torch.zeros(2, 6, 6)}),
        ("attention_mask.shape", {"attention_mask": torch.zeros(6, 6), "input_metadata": TWO}),
        ("attention_mask.dtype", {"attention_mask": torch.zeros(6, 6, dtype=torch.int64)}),
        (
            "attention_mask.shape",
            {
                "attention_mask": torch.zeros(6, 6),
                "input_metadata": PAGED,
                "key_cache": PAGES.key,
                "value_cache": PAGES.value,
            },
        ),
        ("softcap", {"softcapping": 0.0}),
        ("softcap", {"softcapping": 0.0, "attention_mask": torch.zeros(6, 6)}),
    ],
)
@pytest.mark.parametrize("prefill", ["op", "flash"])
def test_what_does_not_fit_is_named(
    setting: str, changed: dict[str, Any], prefill: str, request: pytest.FixtureRequest
) -> None:
    """Whoever attends."""
    if prefill == "flash":
        request.getfixturevalue("flash")
    text = Text(6)
    arguments: dict[str, Any] = {
        "query": text.query,
        "key": text.key,
        "value": text.value,
        "attention_mask": None,
        "key_cache": None,
        "value_cache": None,
        "input_metadata": InputMetadata(True, torch.arange(6)),
    }
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    layer(**arguments)
    with pytest.raises(ConfigError) as caught:
        layer(**arguments | changed)
    assert caught.value.setting == setting
    assert caught.value.allowed


# Prefill by torch's FlashAttention


class CountedFlash:
    """Stands in for torch's FlashAttention where there is no CUDA device."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        self.num_calls += 1
        return plain_varlen(*arguments, **options)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> CountedFlash:
    """Let FlashAttention win against Triton wherever it may serve, on a device of one multiprocessor with tiles of 8
    tokens.
    """
    counted = CountedFlash()

    def fastest(shape: PrefillShape) -> PagedPrefill:
        refusal = why_not(torch.bfloat16, shape.head_dim, CUDA, softcap=shape.softcap)
        assert refusal is not None
        serves = "this build of torch" in refusal
        return PagedPrefill(
            shape=shape, paged=paged_attention_reference, flash=counted if serves else None, reason="it is a test"
        )

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.setattr(paged_attention_layer, "_has_choice", lambda tokens: True)
    monkeypatch.setattr(paged_attention_layer, "_is_recording", lambda: False)
    monkeypatch.setattr(paged_attention_layer, "_fastest_prefill", fastest)
    monkeypatch.setattr(prefill_choice, "_TILE", 8)
    return counted


@pytest.mark.parametrize("window", [None, 6])
def test_flash_serves_prefills_and_no_decodes(window: int | None, flash: CountedFlash) -> None:
    text, cache = Text(24), Cache()
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS, sliding_window=window)
    outputs = []
    for first, last in ((0, 9), (9, 20)):
        metadata = InputMetadata(True, cache.slots(first, last), cache.table, torch.tensor([last]))
        outputs.append(run(layer, text, cache, first, last, metadata))
    for first in range(20, 24):
        metadata = InputMetadata(False, cache.slots(first, first + 1), cache.table, torch.tensor([first + 1]))
        outputs.append(run(layer, text, cache, first, first + 1, metadata))
    close(torch.cat(outputs), text.expected(window=window))
    assert flash.num_calls == 2


@pytest.mark.parametrize("max_context_len", [None, 20, 29])
def test_flash_takes_chunks_of_one_prompt_in_one_call(max_context_len: int | None, flash: CountedFlash) -> None:
    text, cache = Text(20), Cache()
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    whole = InputMetadata(
        is_prefill=True,
        slot_mapping=cache.slots(0, 20),
        block_tables=cache.table,
        context_lens=torch.tensor([20]),
        cu_seqlens_q=torch.tensor([0, 4, 13, 20]),
        max_context_len=max_context_len,
    )
    close(run(layer, text, cache, 0, 20, whole), text.expected())
    assert flash.num_calls == 1


def test_flash_gives_zero_for_tokens_that_only_fill_up_a_row(flash: CountedFlash) -> None:
    text, cache = Text(20), Cache()
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    slots = torch.cat((torch.full((4,), -1), cache.slots(0, 20)))
    query, key, value = (F.pad(each, (0, 0, 0, 0, 4, 0), value=3.0) for each in (text.query, text.key, text.value))
    metadata = InputMetadata(True, slots, cache.table, torch.tensor([20]), max_context_len=24)
    output = layer(query, key, value, None, cache.key, cache.value, metadata)
    close(output, F.pad(text.expected(), (0, 0, 0, 0, 4, 0)))
    assert flash.num_calls == 1


@pytest.mark.parametrize("window", [None, 6])
def test_flash_gives_zero_where_no_row_has_keys(window: int | None, flash: CountedFlash) -> None:
    """The block table is arbitrary then."""
    text, cache = Text(20), Cache()
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS, sliding_window=window)
    slots, nowhere = torch.full((20,), -1), torch.full((1, 8), 10**6)
    metadata = InputMetadata(True, slots, nowhere, torch.tensor([0]))
    close(run(layer, text, cache, 0, 20, metadata), torch.zeros(20, HEADS, SIZE, dtype=torch.float64))
    assert flash.num_calls == 1


@pytest.mark.parametrize("layout", ["heads last", "a column more", "an element further"])
@pytest.mark.parametrize("cached", [False, True])
def test_flash_is_given_what_it_can_read(layout: str, flash: CountedFlash, *, cached: bool) -> None:
    def laid_out(tensor: Tensor) -> Tensor:
        if layout == "heads last":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "a column more":
            return F.pad(tensor.flatten(1), (0, 1))[:, :-1].view(tensor.shape)
        return F.pad(tensor.flatten(), (1, 0))[1:].view(tensor.shape)

    text, cache = Text(20), Cache()
    text.query, text.key, text.value = (laid_out(each) for each in (text.query, text.key, text.value))
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    metadata = InputMetadata(True, cache.slots(0, 20))
    if cached:
        metadata = evolve(metadata, block_tables=cache.table, context_lens=torch.tensor([20]))
    pages = (cache.key, cache.value) if cached else (None, None)
    close(layer(text.query, text.key, text.value, None, *pages, metadata), text.expected())
    assert flash.num_calls == 1


@pytest.mark.parametrize("first", [0, 5])
def test_flash_without_a_cache(first: int, flash: CountedFlash) -> None:
    text = Text(12)
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    metadata = InputMetadata(
        is_prefill=True,
        slot_mapping=torch.full((12,), -1),
        cu_seqlens_q=torch.tensor([0, 12 - first]),
        cu_seqlens_k=torch.tensor([0, 12]) if first else None,
    )
    output = layer(text.query[first:], text.key, text.value, None, None, None, metadata)
    close(output, text.expected()[first:])
    assert flash.num_calls == 1


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"softcap": 0.8}, torch.float32),
        ({"slopes": [0.5, 0.25, 0.1, 0.05, 0.02, 0.01]}, torch.float32),
        ({}, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_what_flash_cannot_do_is_done_all_the_same(
    options: dict[str, Any], dtype: torch.dtype, flash: CountedFlash
) -> None:
    text, cache = Text(20), Cache(dtype=dtype)
    layer = PagedAttention(
        *(HEADS, SIZE, SCALE, KV_HEADS), alibi_slopes=options.get("slopes"), softcap=options.get("softcap")
    )
    metadata = InputMetadata(True, cache.slots(0, 20), cache.table, torch.tensor([20]))
    tolerance = 2e-5 if dtype is torch.float32 else 0.1
    close(run(layer, text, cache, 0, 20, metadata), text.expected(**options), tolerance)
    assert flash.num_calls == 0


def test_flash_takes_no_scale_below_zero(flash: CountedFlash) -> None:
    """It subtracts the largest product before it scales, which then is the smallest score."""
    text, cache = Text(20), Cache()
    layer = PagedAttention(HEADS, SIZE, -SCALE, KV_HEADS)
    metadata = InputMetadata(True, cache.slots(0, 20), cache.table, torch.tensor([20]))
    close(layer(-text.query, text.key, text.value, None, cache.key, cache.value, metadata), text.expected())
    assert flash.num_calls == 0


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_flash_does_not_hide_that_there_is_no_gradient(name: str, flash: CountedFlash) -> None:
    """It has one of its own, which knows nothing of keys and values that went through a cache."""
    text, cache = Text(20), Cache()
    getattr(text, name).requires_grad_()
    layer = PagedAttention(HEADS, SIZE, SCALE, KV_HEADS)
    metadata = InputMetadata(True, cache.slots(0, 20), cache.table, torch.tensor([20]))
    with torch.no_grad():
        run(layer, text, cache, 0, 20, metadata)
    assert flash.num_calls == 1
    run(layer, text, cache, 0, 20, metadata)
    assert flash.num_calls == 1


def test_a_recording_goes_on_as_the_layer_did_before(flash: CountedFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm-up has compiled that, and nothing else."""
    text, layers = Text(20), [PagedAttention(HEADS, SIZE, SCALE, KV_HEADS) for _ in range(2)]

    def attend_in(layer: PagedAttention) -> None:
        cache = Cache()
        metadata = InputMetadata(True, cache.slots(0, 20), cache.table, torch.tensor([20]))
        close(run(layer, text, cache, 0, 20, metadata), text.expected())

    attend_in(layers[0])
    monkeypatch.setattr(paged_attention_layer, "_is_recording", lambda: True)
    assert flash.num_calls == 1
    attend_in(layers[0])
    assert flash.num_calls == 2
    attend_in(layers[1])
    assert flash.num_calls == 2


def test_layers_share_what_is_known_of_a_batch(flash: CountedFlash) -> None:
    text, cache = Text(20), Cache()
    metadata = InputMetadata(True, cache.slots(0, 20), cache.table, torch.tensor([20]))
    for _ in range(2):
        run(PagedAttention(HEADS, SIZE, SCALE, KV_HEADS), text, cache, 0, 20, metadata)
    assert flash.num_calls == 2
    assert metadata.prefill_rows(20, BLOCK_SIZE) is metadata.prefill_rows(20, BLOCK_SIZE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cached", [False, True])
def test_prefill_on_a_gpu_whoever_is_faster(*, cached: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 3000, 128, generator=generator) for heads in (32, 8, 8))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    layer = PagedAttention(32, 128, 128**-0.5, 8)
    cache = torch.zeros(2, 100, 32, 8, 128, dtype=torch.bfloat16, device=CUDA)
    metadata = InputMetadata(
        is_prefill=True,
        slot_mapping=torch.arange(3000, device=CUDA),
        block_tables=torch.arange(100, device=CUDA)[None] if cached else None,
        context_lens=torch.tensor([3000], device=CUDA) if cached else None,
    )
    tensors = (each[0].transpose(0, 1).to(CUDA, torch.bfloat16) for each in (query, key, value))
    output: Tensor = layer(*tensors, None, *(cache if cached else (None, None)), metadata)
    torch.testing.assert_close(output.cpu().float(), expected[0].transpose(0, 1), rtol=3e-2, atol=3e-2)
