"""The op `paged_attention` on whatever device serves it here, and its torch reference, against float64."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from paged_case import ARBITRARY, PagedCase
from torch import Tensor

from largest_tensor import LargestTensor
from paged_sdk.errors import ConfigError
from paged_sdk.kernels import fallback
from paged_sdk.kernels.attention_inputs import ScoreOptions
from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.paged_attention import (
    paged_attention,
    paged_attention_reference,
    why_not_native,
    why_not_triton,
)

SCALE: Final = 0.3
MIXED: Final = [(1, 1), (1, 37), (5, 30), (0, 0), (19, 19), (23, 60), (0, 9), (3, 3), (1, 8), (17, 33)]
TOLERANCE: Final = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Attention = Callable[..., Tensor]
EITHER: Final = pytest.mark.parametrize("attention", [paged_attention, paged_attention_reference])


def run(attention: Attention, case: PagedCase, **options: Any) -> Tensor:
    given = {"scale": SCALE, "window": case.window} | options
    if attention is paged_attention_reference:
        return paged_attention_reference(case.query, case.cache, case.paged_rows, ScoreOptions(**given))
    return attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        case.context_lens,
        case.cu_seqlens_q,
        max_seqlen_q=case.max_seqlen_q,
        max_context_len=case.max_context_len,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        key_offsets=case.key_offsets,
        **given,
    )


def check(output: Tensor, expected: Tensor, tolerance: float) -> None:
    assert output.is_contiguous()
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@EITHER
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_mixed_batches(attention: Attention, dtype: torch.dtype, block_size: int) -> None:
    case = PagedCase(MIXED, dtype=dtype, block_size=block_size)
    output = run(attention, case)
    assert output.dtype == dtype
    check(output, case.expected(scale=SCALE), TOLERANCE[dtype])


@EITHER
@pytest.mark.parametrize("heads", [(1, 1, 32), (5, 5, 16), (7, 1, 16), (9, 3, 48), (6, 2, 20)], ids=str)
def test_every_grouping_of_heads(attention: Attention, heads: tuple[int, int, int]) -> None:
    case = PagedCase(MIXED, heads)
    check(run(attention, case), case.expected(scale=SCALE), TOLERANCE[torch.float32])


@EITHER
@pytest.mark.parametrize("window", [1, 7, 8, 20, 60, 1000])
def test_sliding_windows(attention: Attention, window: int) -> None:
    case = PagedCase(MIXED, window=window)
    check(run(attention, case), case.expected(scale=SCALE), TOLERANCE[torch.float32])


@EITHER
def test_a_window_as_long_as_the_context_is_none(attention: Attention) -> None:
    case = PagedCase(MIXED)
    torch.testing.assert_close(run(attention, case, window=60), run(attention, case), rtol=1e-6, atol=1e-6)


@EITHER
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 9])
def test_what_shapes_the_scores(
    attention: Attention, window: int | None, softcap: float | None, *, sinks: bool, alibi: bool
) -> None:
    case = PagedCase(MIXED, (6, 2, 16), window=window)
    output = run(
        attention,
        case,
        softcap=softcap,
        alibi_slopes=case.alibi_slopes if alibi else None,
        sinks=case.sinks if sinks else None,
    )
    check(output, case.expected(scale=SCALE, softcap=softcap, alibi=alibi, sinks=sinks), TOLERANCE[torch.float32])


@EITHER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_cache(attention: Attention, dtype: torch.dtype) -> None:
    """Against the values that the codes stand for: nothing is lost beyond the query's dtype."""
    case = PagedCase(MIXED, dtype=dtype, quantized=True)
    check(run(attention, case), case.expected(scale=SCALE), TOLERANCE[dtype])


@EITHER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (150, None), (None, 5.0)])
@pytest.mark.parametrize("block_size", [5, 16])
def test_keys_stored_without_their_offsets(
    attention: Attention, dtype: torch.dtype, window: int | None, softcap: float | None, block_size: int
) -> None:
    """Over several spans of keys, the last of which has begun; the offsets decide which keys matter."""
    rows = [(1, 270), (3, 129), (40, 300), (9, 40)]
    case = PagedCase(rows, dtype=dtype, block_size=block_size, quantized=True, offset=2.0, window=window)
    output = run(attention, case, softcap=softcap)
    check(output, case.expected(scale=SCALE, softcap=softcap), TOLERANCE[dtype])


@EITHER
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("chunks", [[40, 40], [1] * 80, [33, 3, 8, 9, 27]])
def test_chunks_are_the_whole(attention: Attention, chunks: list[int], window: int | None) -> None:
    """One after another, and all of them as rows of one call."""
    whole = PagedCase([(80, 80)], window=window)
    whole.block_tables = PagedCase([(80, 80)]).block_tables
    expected = run(attention, whole)
    ends = torch.tensor(chunks).cumsum(0).int()
    parts = []
    for part, end in zip(torch.split(whole.query, chunks), ends, strict=True):
        alone = PagedCase([(len(part), int(end))])
        alone.query, alone.key_cache, alone.value_cache = part, whole.key_cache, whole.value_cache
        alone.block_tables = whole.block_tables
        parts.append(run(attention, alone, window=window))
    check(torch.cat(parts), expected.double(), 1e-5)
    whole.block_tables = whole.block_tables.expand(len(chunks), -1)
    whole.context_lens, whole.cu_seqlens_q = ends, torch.cat((ends.new_zeros(1), ends))
    check(run(attention, whole), expected.double(), 1e-5)


@EITHER
def test_where_the_blocks_lie_changes_no_bit(attention: Attention) -> None:
    case = PagedCase(MIXED)
    before = run(attention, case)
    order = torch.randperm(len(case.key_cache), generator=torch.Generator().manual_seed(1))
    case.key_cache, case.value_cache = case.key_cache[order], case.value_cache[order]
    used = case.block_tables != ARBITRARY
    case.block_tables[used] = order.argsort().int()[case.block_tables[used].long()]
    assert torch.equal(run(attention, case), before)


@EITHER
def test_padding_tokens_give_zero(attention: Attention) -> None:
    """Rows with more query tokens than keys: what a batch of fixed size is filled up with."""
    case = PagedCase([(1, 0), (3, 20), (4, 2), (1, 0)])
    output = run(attention, case)
    check(output, case.expected(scale=SCALE), TOLERANCE[torch.float32])
    assert output[[0, 4, 5, 8]].count_nonzero() == 0


@EITHER
def test_an_empty_batch(attention: Attention) -> None:
    case = PagedCase([(0, 0), (0, 5)])
    assert run(attention, case).shape == (0, 4, 16)


def test_strided_queries_and_tables() -> None:
    case = PagedCase(MIXED)
    expected = run(paged_attention, case)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    case.block_tables = case.block_tables.T.contiguous().T
    assert torch.equal(run(paged_attention, case), expected)


def test_memory_is_linear_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the reference: twice the prompt, twice the largest tensor; all scores at once would be four times."""
    monkeypatch.setattr("paged_sdk.kernels.attention._MAX_SCORES", 2**10)

    def largest(length: int) -> int:
        case = PagedCase([(length, length)], (2, 1, 16), block_size=16)
        with LargestTensor() as watch:
            run(paged_attention_reference, case, alibi_slopes=case.alibi_slopes, sinks=case.sinks)
        return int(watch.num_elements)

    assert largest(1024) <= 2 * largest(512) + 2**10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("quantized", [False, True])
def test_a_cuda_device_is_served_without_waiting_for_it(*, quantized: bool, caplog: pytest.LogCaptureFixture) -> None:
    case = PagedCase(MIXED, dtype=torch.float16, block_size=16, quantized=quantized)
    expected = case.expected(scale=SCALE)
    for name, tensor in vars(case).items():
        if isinstance(tensor, Tensor):
            setattr(case, name, tensor.cuda())
    run(paged_attention, case)  # compiles
    fallback.log_fallback.cache_clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with caplog.at_level(logging.INFO, logger="paged_sdk"):
            output = run(paged_attention, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not caplog.records
    check(output.cpu(), expected, TOLERANCE[torch.float16])


@pytest.mark.parametrize("quantized", [False, True])
def test_torch_finds_the_op_well_made(*, quantized: bool) -> None:
    case = PagedCase([(2, 9), (1, 4)], quantized=quantized, offset=1.0 if quantized else None, window=5)
    # torch's check of the schema multiplies every argument, which it cannot do in f8e4m3.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.paged_sdk.paged_attention.default,
        (
            *(case.query, case.key_cache, case.value_cache, case.block_tables, case.context_lens, case.cu_seqlens_q),
            *(2, 9, SCALE, 5, 30.0, case.alibi_slopes, case.sinks, case.k_scale, case.v_scale, case.key_offsets),
        ),
        test_utils=checks if quantized else (*checks, "test_schema"),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(backend: str) -> None:
    case = PagedCase(MIXED)
    compiled = torch.compile(lambda: run(paged_attention, case) * 2, fullgraph=True, backend=backend)
    assert torch.equal(compiled(), run(paged_attention, case) * 2)


def test_exported() -> None:
    case = PagedCase(MIXED)

    class Attend(torch.nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            case.query = query
            return run(paged_attention, case)

    query = case.query
    program = torch.export.export(Attend(), (query,))
    assert torch.equal(program.module()(query), Attend()(query))


WRONG: Final[dict[str, tuple[str, Callable[[PagedCase], dict[str, Any]]]]] = {
    "flat query": ("query.shape", lambda c: {"query": c.query.flatten(1)}),
    "integer query": ("query.dtype", lambda c: {"query": c.query.int()}),
    "uneven groups": ("num_heads", lambda c: {"query": c.query[:, :3]}),
    "another head size": ("key_cache.shape", lambda c: {"query": c.query[..., :8]}),
    "another cache dtype": ("key_cache.dtype", lambda c: {"key_cache": c.key_cache.half()}),
    "another value shape": ("value_cache.shape", lambda c: {"value_cache": c.value_cache[1:]}),
    "strided cache": ("key_cache.stride()", lambda c: {"key_cache": c.key_cache.mT.contiguous().mT}),
    "scales without fp8": ("k_scale", lambda c: {"k_scale": c.key_cache[..., 0].contiguous()}),
    "fp8 without scales": (
        "k_scale",
        lambda c: {k: getattr(c, k).to(torch.float8_e4m3fn) for k in ("key_cache", "value_cache")},
    ),
    "offsets without fp8": ("key_offsets", lambda c: {"key_offsets": torch.zeros(1, 2, 16)}),
    "int64 tables": ("block_tables.dtype", lambda c: {"block_tables": c.block_tables.long()}),
    "too few tables": ("block_tables.shape", lambda c: {"block_tables": c.block_tables[1:]}),
    "too few ends": ("cu_seqlens_q.shape", lambda c: {"cu_seqlens_q": c.cu_seqlens_q[1:]}),
    "ends of fewer tokens": ("cu_seqlens_q", lambda c: {"cu_seqlens_q": c.cu_seqlens_q.clamp_max(7)}),
    "descending ends": ("cu_seqlens_q", lambda c: {"cu_seqlens_q": c.cu_seqlens_q[[0, 2, 1, 3]]}),
    "contexts past the tables": ("context_lens", lambda c: {"context_lens": c.context_lens + 1000}),
    "a block that is not there": ("block_tables", lambda c: {"block_tables": c.block_tables + len(c.key_cache)}),
    "a low bound of tokens": ("max_seqlen_q", lambda c: {"max_seqlen_q": 4}),
    "a low bound of keys": ("max_context_len", lambda c: {"max_context_len": 8}),
    "too few slopes": ("alibi_slopes.shape", lambda c: {"alibi_slopes": c.alibi_slopes[1:]}),
    "double sinks": ("sinks.dtype", lambda c: {"sinks": c.sinks.double()}),
    "no window": ("window", lambda c: {"window": 0}),
    "no cap": ("softcap", lambda c: {"softcap": 0.0}),
    "no scale": ("scale", lambda c: {"scale": float("nan")}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    case = PagedCase([(1, 9), (5, 5), (2, 2)])
    setting, change = WRONG[name]
    arguments: dict[str, Any] = {
        "query": case.query,
        "key_cache": case.key_cache,
        "value_cache": case.value_cache,
        "block_tables": case.block_tables,
        "context_lens": case.context_lens,
        "cu_seqlens_q": case.cu_seqlens_q,
        "max_seqlen_q": 5,
        "max_context_len": 9,
        "scale": SCALE,
    }
    paged_attention(**arguments)
    with pytest.raises(ConfigError) as caught:
        paged_attention(**arguments | change(case))
    assert caught.value.setting == setting
    assert caught.value.allowed


def test_a_tensor_on_another_device_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_tensor("sinks", torch.zeros(3), (3,), (torch.float32,), torch.device("meta"))
    assert caught.value.setting == "sinks.device"


def test_each_backend_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def native(case: PagedCase, **options: Any) -> str:
        return why_not_native(case.query, case.paged_rows, ScoreOptions(scale=SCALE, **options)) or ""

    case = PagedCase([(1, 9)])
    assert native(PagedCase([(1, 9)], dtype=torch.float16)) == ""
    assert "float64" in native(PagedCase([(1, 9)], dtype=torch.float64))
    assert "not 24" in native(PagedCase([(1, 9)], (1, 1, 24)))
    assert native(case, sinks=case.sinks) == ""
    assert "alibi" in native(case, alibi_slopes=case.alibi_slopes)
    assert "padding" in native(PagedCase([(2, 1)]))
    monkeypatch.setattr("paged_sdk.kernels.native.library.why_not", lambda: "it is not here")
    assert native(case) == "it is not here"
    case.query = case.query.to("meta")
    assert "'meta'" in native(case)
    assert "'meta'" in str(why_not_triton(case.query))
    assert "float64" in str(why_not_triton(case.query.double()))
    assert "not 528" in str(why_not_triton(case.query.repeat(1, 1, 33)))
    latent = case.query.repeat(1, 1, 36)
    assert "not 576" in str(why_not_triton(latent))
    assert "'meta'" in str(why_not_triton(latent, key_only=64))
    assert "not 80" in str(why_not_triton(latent, key_only=80))
    assert "even head sizes, not 511" in str(why_not_triton(latent[..., 1:], key_only=64))
    assert "even head sizes, not 63" in str(why_not_triton(latent[..., 1:], key_only=63))


def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fallback.log_fallback.cache_clear()
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        for _ in range(2):
            run(paged_attention, PagedCase([(1, 9)], dtype=torch.float64))
    (line,) = [record.message for record in caplog.records]
    assert line == (
        "paged_attention runs on torch operations: native kernels take float32, bfloat16 and float16, not torch.float64"
    )
