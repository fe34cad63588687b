"""Triton's paged attention against attention written token by token in float64.

Tolerances are those of the query's dtype: weights are rounded to it before they meet the values, and so is the output.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final

import pytest
import torch
from paged_case import ARBITRARY, PagedCase
from torch import Tensor

pytest.importorskip("triton")

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.triton import paged_attention as paged_attention_module
from paged_sdk.kernels.triton import paged_decode, paged_prefill
from paged_sdk.kernels.triton.attention_tile import Tile
from paged_sdk.kernels.triton.paged_attention import paged_attention
from paged_sdk.kernels.triton.paged_batch import PagedBatch
from paged_sdk.kernels.triton.paged_decode import paged_decode_attention
from paged_sdk.kernels.triton.paged_prefill import paged_prefill_attention
from paged_sdk.kernels.triton.split_plan import SplitPlan, most_partial_bytes, plan_splits

SCALE: Final = 0.3
TOLERANCE: Final = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXED: Final = [(1, 1), (1, 37), (0, 0), (9, 9), (0, 9), (5, 40)]
HEADS: Final = (2, 1, 16)
SMALL: Final = Tile(block_m=16, block_n=16, num_warps=4, num_stages=2)
KERNELS: Final = ("decode", "splits", "prefill")
EVERY_KERNEL: Final = pytest.mark.parametrize("kernel", KERNELS)
NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(
    kernel: str, case: PagedCase, device: torch.device, *, launch: dict[str, Any] | None = None, **options: Any
) -> Tensor:
    """Run one kernel over a whole batch, by tiles small enough that rows have several.

    :param launch: arguments of what launches the kernel, in place of those for all rows
    """

    def placed(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    scores = {"scale": SCALE, "window": case.window} | options
    inputs = (
        placed(case.query),
        case.cache_on(device),
        case.rows_on(device),
        ScoreOptions(**{name: placed(value) for name, value in scores.items()}),
    )
    if kernel == "choice":
        return paged_attention(*inputs).cpu()
    batch = PagedBatch(*inputs)
    if kernel == "prefill":
        return paged_prefill_attention(batch, tile=SMALL, **launch or {}).cpu()
    bounds: dict[str, Any] = {"max_seqlen_q": case.max_seqlen_q, "max_context_len": case.max_context_len}
    splits = {"num_splits": 1 if kernel == "decode" else 3}
    return paged_decode_attention(batch, tile=SMALL, **bounds | splits | (launch or {})).cpu()


def check(output: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@EVERY_KERNEL
@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 24), (torch.float16, 256), (torch.bfloat16, 8)], ids=str
)
def test_mixed_batches(kernel: str, dtype: torch.dtype, block_size: int, triton_device: torch.device) -> None:
    case = PagedCase(MIXED, HEADS, dtype=dtype, block_size=block_size)
    output = run(kernel, case, triton_device)
    assert output.dtype == dtype
    check(output, case.expected(scale=SCALE), dtype)


@pytest.mark.thinned("kernel", "heads", of=1)
@EVERY_KERNEL
@pytest.mark.parametrize(
    "heads", [(6, 3, 32), (5, 1, 80), (7, 7, 16), (3, 3, 96), (20, 1, 32), (2, 1, 192), (2, 2, 256)], ids=str
)
def test_every_grouping_and_size_of_heads(
    kernel: str, heads: tuple[int, int, int], triton_device: torch.device
) -> None:
    case = PagedCase([(1, 17), (3, 20)], heads)
    scale = heads[2] ** -0.5
    check(run(kernel, case, triton_device, scale=scale), case.expected(scale=scale))


@EVERY_KERNEL
@pytest.mark.parametrize(
    ("head_dim", "dtype", "window", "softcap"),
    [(2, torch.float32, None, None), (100, torch.float16, 9, None), (112, torch.bfloat16, None, 0.7)],
    ids=str,
)
def test_sizes_of_heads_between_powers_of_two(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    triton_device: torch.device,
) -> None:
    case = PagedCase([(1, 17), (2, 20)], (2, 1, head_dim), dtype=dtype, window=window)
    check(run(kernel, case, triton_device, softcap=softcap), case.expected(scale=SCALE, softcap=softcap), dtype)


@EVERY_KERNEL
@pytest.mark.parametrize(
    ("head_dim", "dtype", "window", "offset"),
    [
        (36, torch.float16, None, None),
        (72, torch.bfloat16, 9, None),
        (80, torch.bfloat16, 9, 2.0),
        (160, torch.float32, None, 2.0),
    ],
    ids=str,
)
def test_sizes_of_heads_between_powers_of_two_in_fp8(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    offset: float | None,
    triton_device: torch.device,
) -> None:
    case = PagedCase([(1, 17), (2, 20)], (2, 1, head_dim), dtype=dtype, quantized=True, offset=offset, window=window)
    scale = head_dim**-0.5
    check(run(kernel, case, triton_device, scale=scale), case.expected(scale=scale), torch.bfloat16)


@pytest.mark.thinned("kernel", "heads", "key_only", "dtype", "quantized", of=1)
@EVERY_KERNEL
@pytest.mark.parametrize(
    ("heads", "key_only", "dtype", "quantized"),
    [
        ((20, 1, 576), 64, torch.bfloat16, False),  # DeepSeek's, and a tile with the end of a token's heads
        ((16, 1, 576), 64, torch.bfloat16, True),
        ((3, 1, 72), 8, torch.float16, False),
        ((2, 1, 40), 4, torch.float32, True),
        ((4, 1, 100), 0, torch.float32, False),
    ],
    ids=str,
)
def test_latent_vectors(
    kernel: str,
    heads: tuple[int, int, int],
    key_only: int,
    dtype: torch.dtype,
    *,
    quantized: bool,
    triton_device: torch.device,
) -> None:
    """Keys that are the values, too, from some element on: nothing is written for the elements before it."""
    rows = [(1, 17), (0, 3), (3, 22), (1, 0)]  # the last fills up a recorded step
    case = PagedCase(rows, heads, dtype=dtype, quantized=quantized, key_only=key_only)
    scale = heads[2] ** -0.5
    out = torch.full(case.query.shape, 7.0, dtype=dtype, device=triton_device)
    output = run(kernel, case, triton_device, scale=scale, launch={"out": out})
    assert (output[..., :key_only] == 7.0).all()
    expected = case.expected(scale=scale)
    tolerance = torch.bfloat16 if quantized and dtype == torch.float16 else dtype
    check(output[..., key_only:], expected[..., key_only:], tolerance)


@pytest.mark.thinned("kernel", "quantized", of=1)
@EVERY_KERNEL
@pytest.mark.parametrize("quantized", [False, True])
def test_what_shapes_the_scores_of_latent_vectors(kernel: str, *, quantized: bool, triton_device: torch.device) -> None:
    """No released model has any of these with latent attention; they are the same code as for other heads."""
    case = PagedCase([(1, 37), (3, 21)], (4, 1, 48), quantized=quantized, window=9, key_only=16)
    shaping: dict[str, Any] = {"softcap": 0.7, "alibi_slopes": case.alibi_slopes, "sinks": case.sinks}
    output = run(kernel, case, triton_device, **shaping)
    expected = case.expected(scale=SCALE, softcap=0.7, alibi=True, sinks=True)
    check(output[..., 16:], expected[..., 16:])


@pytest.mark.thinned("kernel", "dtype", "quantized", "offset", of=1)
@EVERY_KERNEL
@pytest.mark.parametrize(
    ("dtype", "quantized", "offset"),
    [(torch.bfloat16, False, None), (torch.bfloat16, True, 2.0), (torch.float32, False, None)],
    ids=str,
)
def test_heads_of_512(
    kernel: str, dtype: torch.dtype, *, quantized: bool, offset: float | None, triton_device: torch.device
) -> None:
    """Those of Gemma 4's layers with full attention."""
    case = PagedCase([(1, 17), (3, 20)], (8, 1, 512), dtype=dtype, quantized=quantized, offset=offset)
    scale = 512**-0.5
    check(run(kernel, case, triton_device, scale=scale), case.expected(scale=scale), dtype)


@EVERY_KERNEL
@pytest.mark.parametrize("window", [1, 7, 16, 33])
def test_sliding_windows(kernel: str, window: int, triton_device: torch.device) -> None:
    case = PagedCase([(1, 37), (9, 9), (10, 75)], HEADS, window=window)
    check(run(kernel, case, triton_device), case.expected(scale=SCALE))


@EVERY_KERNEL
def test_a_window_as_long_as_the_context_is_none(kernel: str, triton_device: torch.device) -> None:
    case = PagedCase(MIXED, HEADS)
    assert torch.equal(run(kernel, case, triton_device, window=40), run(kernel, case, triton_device))


@EVERY_KERNEL
@pytest.mark.parametrize(
    ("window", "softcap", "alibi", "sinks"),
    [(None, 0.7, False, False), (None, None, True, False), (None, None, False, True), (9, 0.7, True, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_shapes_the_scores(
    kernel: str,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    *,
    alibi: bool,
    sinks: bool,
    triton_device: torch.device,
) -> None:
    case = PagedCase([(1, 37), (3, 21), (0, 3)], (4, 2, 16), dtype=dtype, window=window)
    output = run(
        kernel,
        case,
        triton_device,
        softcap=softcap,
        alibi_slopes=case.alibi_slopes if alibi else None,
        sinks=case.sinks if sinks else None,
    )
    check(output, case.expected(scale=SCALE, softcap=softcap, alibi=alibi, sinks=sinks), dtype)


@EVERY_KERNEL
def test_a_sink_far_above_and_below_every_score(kernel: str, triton_device: torch.device) -> None:
    case = PagedCase([(1, 20), (2, 7)], (2, 1, 16))
    case.sinks = torch.tensor([300.0, -300.0])
    output = run(kernel, case, triton_device, sinks=case.sinks)
    assert output[:, 0].abs().max() < 1e-6
    check(output, case.expected(scale=SCALE, sinks=True))


@pytest.mark.thinned("dtype", "magnitude", of=1)
@EVERY_KERNEL
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-6])
def test_an_fp8_cache(kernel: str, dtype: torch.dtype, magnitude: float, triton_device: torch.device) -> None:
    """Against the values that the codes stand for: nothing is lost beyond the query's dtype, however small they are."""
    case = PagedCase([(1, 37), (3, 22)], HEADS, dtype=dtype, quantized=True)
    assert case.v_scale is not None
    case.v_scale *= magnitude
    expected = case.expected(scale=SCALE) * magnitude
    # float16 weights meet f8e4m3 values in bfloat16.
    tolerance = TOLERANCE[torch.bfloat16 if dtype == torch.float16 else dtype] * magnitude
    smallest = 6e-8 if dtype == torch.float16 else 0.0  # of an output in float16
    output = run(kernel, case, triton_device)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance / magnitude, atol=tolerance + smallest)


@pytest.mark.thinned("dtype", "head_dim", "window", of=1)
@EVERY_KERNEL
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("window", "head_dim"), [(None, 16), (40, 24)])
def test_keys_stored_without_their_offsets(
    kernel: str, dtype: torch.dtype, window: int | None, head_dim: int, triton_device: torch.device
) -> None:
    """Over several spans of keys, the last of which has begun; the offsets decide which keys matter."""
    rows = [(1, 270), (3, 129), (9, 40)]
    case = PagedCase(rows, (4, 2, head_dim), dtype=dtype, quantized=True, offset=2.0, window=window)
    check(run(kernel, case, triton_device), case.expected(scale=SCALE), dtype)


@EVERY_KERNEL
def test_where_the_blocks_lie_changes_no_bit(kernel: str, triton_device: torch.device) -> None:
    case = PagedCase(MIXED, HEADS)
    before = run(kernel, case, triton_device)
    order = torch.randperm(len(case.key_cache), generator=torch.Generator().manual_seed(1))
    case.key_cache, case.value_cache = case.key_cache[order], case.value_cache[order]
    used = case.block_tables != ARBITRARY
    case.block_tables[used] = order.argsort().int()[case.block_tables[used].long()]
    assert torch.equal(run(kernel, case, triton_device), before)


@EVERY_KERNEL
def test_chunks_are_the_whole(kernel: str, triton_device: torch.device) -> None:
    whole = PagedCase([(20, 40)], HEADS, window=13)
    whole.block_tables = PagedCase([(20, 40)], HEADS).block_tables
    expected = run(kernel, whole, triton_device)
    ends = torch.tensor([31, 32, 40], dtype=torch.int32)
    whole.block_tables = whole.block_tables.expand(3, -1).contiguous()
    whole.context_lens, whole.cu_seqlens_q = ends, torch.tensor([0, 11, 12, 20], dtype=torch.int32)
    check(run(kernel, whole, triton_device), expected.double())


@pytest.mark.parametrize("num_splits", [2, 7, 70])
def test_one_split_is_many(num_splits: int, triton_device: torch.device) -> None:
    """Also where most splits are empty, and where one program joins more than it holds at once."""
    case = PagedCase([(1, 300), (2, 19), (1, 1)], (2, 1, 128), block_size=16)
    one = run("splits", case, triton_device, launch={"num_splits": 1}, sinks=case.sinks)
    many = run("splits", case, triton_device, launch={"num_splits": num_splits}, sinks=case.sinks)
    check(many, one.double())
    assert torch.equal(many[-1], one[-1])  # a row of one split, finished by the same program


@EVERY_KERNEL
def test_padding_tokens_give_zero(kernel: str, triton_device: torch.device) -> None:
    """Rows with more query tokens than keys: what a batch of fixed size is filled up with."""
    case = PagedCase([(1, 0), (3, 20), (4, 2), (1, 0)], HEADS)
    output = run(kernel, case, triton_device, sinks=case.sinks)
    check(output, case.expected(scale=SCALE, sinks=True))
    assert output[[0, 4, 5, 8]].count_nonzero() == 0


@pytest.mark.parametrize(("row", "window"), [((200, 40), 8), ((60, 4), 2), ((60, 0), 2)], ids=str)
def test_tiles_of_padding_before_a_window(row: tuple[int, int], window: int, triton_device: torch.device) -> None:
    """Tiles of queries that are padding alone end before the first key."""
    case = PagedCase([row], HEADS, window=window)
    check(run("prefill", case, triton_device), case.expected(scale=SCALE))


@EVERY_KERNEL
def test_rows_left_out_are_not_written(kernel: str, triton_device: torch.device) -> None:
    case = PagedCase([(1, 20), (6, 9), (2, 30)], HEADS)
    out = torch.full(case.query.shape, 7.0, device=triton_device)
    limit = {"min_seqlen_q": 3} if kernel == "prefill" else {"max_seqlen_q": 2}
    output = run(kernel, case, triton_device, launch={"out": out, **limit})
    few = torch.tensor([True] + [False] * 6 + [True] * 2)
    taken = ~few if kernel == "prefill" else few
    assert (output[~taken] == 7.0).all()
    check(output[taken], case.expected(scale=SCALE)[taken])


@pytest.mark.parametrize(
    "rows", [[(1, 9), (1, 200)], [(5, 70), (3, 3)], [(70, 90)], [(40, 50), (1, 130), (9, 9)]], ids=str
)
def test_the_choice_of_kernels(rows: list[tuple[int, int]], triton_device: torch.device) -> None:
    """Decodes, drafts, a prompt, and a chunk of one beside decodes: by default tiles and splits."""
    case = PagedCase(rows, dtype=torch.float16)
    check(run("choice", case, triton_device), case.expected(scale=SCALE), torch.float16)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float, triton_device: torch.device) -> None:
    case = PagedCase([(1, 20), (3, 7)])
    check(run("choice", case, triton_device, scale=scale), case.expected(scale=scale))


def test_strided_arguments(triton_device: torch.device) -> None:
    case = PagedCase([(1, 20), (3, 7)])
    expected = run("choice", case, triton_device)
    case.query = case.query.mT.contiguous().mT
    case.block_tables = case.block_tables.T.contiguous().T
    assert torch.equal(run("choice", case, triton_device), expected)


@EVERY_KERNEL
def test_more_than_32768_blocks(kernel: str, triton_device: torch.device) -> None:
    case = PagedCase([(1, 21), (3, 9)], (2, 1, 32), dtype=torch.float16)
    expected = run(kernel, case, triton_device)
    for name in ("key_cache", "value_cache"):
        cache = getattr(case, name)
        setattr(case, name, torch.cat((torch.full((40_000, *cache.shape[1:]), torch.nan, dtype=cache.dtype), cache)))
    case.block_tables[case.block_tables != ARBITRARY] += 40_000
    assert torch.equal(run(kernel, case, triton_device), expected)


def test_splits_fill_the_device_and_end_with_the_keys() -> None:
    # One sequence: as many splits as programs fit, but none below 128 keys.
    assert plan_splits(8, 65_536, 64, 8 * 132, 999) == SplitPlan(num_splits=132, parts=132, shortest=128, longest=8192)
    assert plan_splits(8, 1024, 64, 8 * 132, 999).num_splits == 8
    # A full device: rows are split only where one is long.
    assert plan_splits(2048, 4096, 64, 8 * 132, 999).num_splits == 1
    assert plan_splits(2048, 65_536, 64, 8 * 132, 999).num_splits == 8
    assert plan_splits(8, 0, 64, 8 * 132, 999).num_splits == 1
    # No more than there is memory for: they hold all keys then.
    assert plan_splits(8, 65_536, 64, 8 * 132, 3) == SplitPlan(num_splits=3, parts=3, shortest=128, longest=21_888)
    assert plan_splits(2048, 65_536, 64, 8 * 132, 5) == SplitPlan(num_splits=5, parts=1, shortest=128, longest=13_120)
    assert plan_splits(8, 65_536, 64, 8 * 132, 1).num_splits == 1


class PartialBytes(dict[object, Any]):
    """Takes the place of a kernel, and notes the bytes of the partial results that it is given."""

    def __init__(self) -> None:
        self.found = 0

    def __missing__(self, grid: object) -> Any:
        return self.note

    def note(self, **arguments: Any) -> None:
        if arguments.get("partial") is not None:
            self.found = arguments["partial"].nbytes + arguments["partial_lse"].nbytes


@pytest.fixture
def partial_bytes(monkeypatch: pytest.MonkeyPatch) -> PartialBytes:
    noted = PartialBytes()
    for module, names in ((paged_decode, ("_attend_split", "_join_splits")), (paged_prefill, ("_attend_tile",))):
        for name in names:
            monkeypatch.setattr(module, name, noted)
    for each in (paged_attention_module, paged_decode):
        monkeypatch.setattr(each, "num_multiprocessors", lambda device: 132)
    return noted


def attend_without_device(counts: list[int], longest: int, heads: tuple[int, int, int], *, key_only: int = 0) -> None:
    """Launch attention of rows with so many new tokens; ``heads`` as in :class:`PagedCase`, and latent vectors if
    ``key_only`` is above 0.
    """
    meta = torch.device("meta")
    pages = torch.empty(1, 32, heads[1], heads[2], dtype=torch.bfloat16, device=meta)
    rows = PagedRows(
        block_tables=torch.empty(len(counts), 1, dtype=torch.int32, device=meta),
        context_lens=torch.empty(len(counts), dtype=torch.int32, device=meta),
        cu_seqlens_q=torch.empty(len(counts) + 1, dtype=torch.int32, device=meta),
        max_seqlen_q=max(counts),
        max_context_len=longest,
    )
    query = torch.empty(sum(counts), heads[0], heads[2], dtype=torch.bfloat16, device=meta)
    cache = LayerCache(pages, pages if key_only else torch.empty_like(pages), key_only=key_only)
    paged_attention(query, cache, rows, ScoreOptions(scale=SCALE))


@pytest.mark.parametrize(("heads", "count"), [((32, 8, 128), 16), ((32, 32, 96), 64), ((16, 1, 256), 4)])
def test_a_few_tokens_beside_many_decodes_take_little_memory(
    heads: tuple[int, int, int], count: int, partial_bytes: PartialBytes
) -> None:
    """As many places for each row as one row has tokens would be one to three gigabytes."""
    attend_without_device([*[1] * 255, count], 131_072, heads)
    of_token = 16 * heads[0] * (heads[2] + 1) * 4
    assert partial_bytes.found == (255 + count) * of_token


def test_partial_results_are_within_what_is_left_free(partial_bytes: PartialBytes) -> None:
    random = Random(0)
    most = 0
    for _ in range(300):
        group, num_kv_heads, head_dim, key_only = random.choice(
            (
                *((1, 32, 96, 0), (4, 8, 128, 0), (7, 4, 128, 0), (16, 1, 256, 0), (8, 8, 64, 0)),
                *((8, 4, 512, 0), (128, 1, 576, 64), (20, 1, 576, 64)),
            )
        )
        longest = random.choice((100, 4096, 8192, 32_768, 131_072))
        counts = [random.choice((1, 1, 5, 17))] * random.choice((1, 2, 9, 32, 256))
        counts[-1] = random.choice((1, 3, 16, 64, 700))
        partial_bytes.found = 0
        attend_without_device(counts, longest, (group * num_kv_heads, num_kv_heads, head_dim), key_only=key_only)
        allowed = most_partial_bytes(
            num_tokens=sum(counts),
            num_heads=group * num_kv_heads,
            value_dim=head_dim - key_only,
            max_context_len=longest,
            multiprocessors=132,
        )
        assert partial_bytes.found <= allowed <= 2**28, (group, longest, counts)
        most = max(most, partial_bytes.found)
    assert most > 2**27


@NEEDS_GPU
@EVERY_KERNEL
def test_offsets_past_32_bits(kernel: str) -> None:
    """A block whose first element is past 2**31, and whose first byte is past 2**32."""
    device = torch.device("cuda")
    case = PagedCase([(1, 21), (3, 9)], (2, 1, 256), dtype=torch.float16, block_size=256)
    expected = run(kernel, case, device)
    moved = 2**31 // (256 * 256) + 1
    for name in ("key_cache", "value_cache"):
        cache = getattr(case, name)
        far = torch.empty((moved + len(cache), *cache.shape[1:]), dtype=cache.dtype, device=device)
        far[moved:] = cache.to(device)
        setattr(case, name, far)
    case.block_tables[case.block_tables != ARBITRARY] += moved
    assert torch.equal(run(kernel, case, device), expected)


@NEEDS_GPU
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("quantized", "offset"), [(False, None), (True, None), (True, 2.0)])
def test_default_tiles(head_dim: int, dtype: torch.dtype, *, quantized: bool, offset: float | None) -> None:
    """What is slow to interpret: prompts of many tiles, one decode beside them."""
    rows = [(1, 700), (300, 500), (130, 130)]
    case = PagedCase(rows, (8, 2, head_dim), dtype=dtype, quantized=quantized, offset=offset)
    tolerance = torch.bfloat16 if quantized else dtype
    output = run("choice", case, torch.device("cuda"), scale=head_dim**-0.5)
    check(output, case.expected(scale=head_dim**-0.5), tolerance)


@NEEDS_GPU
def test_memory_of_a_prefill_is_linear() -> None:
    """Beyond query, cache and output, 64k tokens need nothing that grows with the context."""
    device = torch.device("cuda")

    def peak(num_tokens: int) -> int:
        query = torch.randn(num_tokens, 8, 128, dtype=torch.bfloat16, device=device)
        cache = torch.randn(2, num_tokens // 32, 32, 2, 128, dtype=torch.bfloat16, device=device)
        table = torch.arange(num_tokens // 32, dtype=torch.int32, device=device)[None]
        lengths = torch.tensor([num_tokens], dtype=torch.int32, device=device)
        ends = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows = PagedRows(
            block_tables=table,
            context_lens=lengths,
            cu_seqlens_q=ends,
            max_seqlen_q=num_tokens,
            max_context_len=num_tokens,
        )
        paged_attention(query, LayerCache(cache[0], cache[1]), rows, ScoreOptions(scale=0.1))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(65_536) <= 4 * peak(16_384) + 2**20
