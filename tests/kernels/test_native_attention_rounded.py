"""Attention of rounded numbers, where the CPU multiplies them faster: codes of chunks, bfloat16 of few tokens."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from test_native_attention import CODES, IN_BOTH_WAYS, SEEN_BY_ALL, WHOLE_TEXTS, Case, caches, made_once
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.kernels.attention_inputs import PagedRows, Precision, ScoreOptions
from paged_sdk.kernels.native.library import available_levels
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, native_paged_attention
from paged_sdk.kernels.paged_attention import paged_attention_reference

pytestmark = needs_library

CHUNKS = [(1, 37), (9, 300), (70, 70), (130, 400), (8, 200), (20, 513)]

#: So many query tokens of a sequence are computed in another form than more.
FEW_TOKENS = 8

#: Queries, keys, weights and values have the 8 significant bits of bfloat16 each; sums are exact.
ROUNDING = 2.0**-8
#: The same as codes: 7 bits of a vector's largest element. An average of hundreds of random values is as small as their
#: errors' average, which is why an eighth of the values' size is not reached.
CODED = 2.0**-5.5
#: The same as codes of 16 bits. Half a code is 2^-13 of a vector's largest element with 128 elements, and 2^-12.5 with
#: 256; the largest of normal numbers is some three times as large as they are; errors of queries, keys and values add
#: up at random. An average of random values is smaller than they are, as above.
CODED_16 = 2.0**-10
#: Queries of few tokens over 4-bit pages have 7 bits of their largest element, and the other numbers more.
CODED_QUERIES = 2.0**-6.5
ROUNDINGS = {Precision.BFLOAT16: ROUNDING, Precision.INT8: CODED}
LEVELS_16 = ("avx2", "avx_vnni")
ROUNDED_LEVELS = {
    Precision.BFLOAT16: (*LEVELS_16, "avx512_bf16", "amx"),
    Precision.INT8: (*LEVELS_16, "avx512_vnni", "avx512_bf16", "amx"),
}


QUERY_LEVELS = ("avx512_vnni", "avx512_bf16", "amx")


def rounding_of(isa: str, precision: Precision) -> float:
    if isa == "amx":  # the matrix unit multiplies bfloat16 numbers as fast as codes are made
        return ROUNDING
    return CODED_16 if isa in LEVELS_16 else ROUNDINGS[precision]


def rounding_of_few(isa: str, dtype: torch.dtype) -> float:
    """Return the rounding of few tokens over a cache of a dtype."""
    return CODED_QUERIES if dtype == torch.uint8 and isa in QUERY_LEVELS else ROUNDING


def run(isa: str, case: Case, shape: AttentionShape, num_threads: int = 2) -> Tensor:
    return native_paged_attention(workspace(isa, num_threads), case.query, case.cache, case.batch, shape)


def check(got: Tensor, case: Case, rounding: float = ROUNDING) -> None:
    check_with(case.once_expected, got, rounding)


def check_with(expected: Tensor, got: Tensor, rounding: float = ROUNDING) -> None:
    assert float((got.double() - expected).norm() / expected.norm()) < rounding
    torch.testing.assert_close(got.double(), expected, rtol=4 * rounding, atol=4 * rounding)


@pytest.mark.thinned("isa", "dtype", "heads")
@every_level
@pytest.mark.parametrize("precision", ROUNDINGS, ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("dtype", "heads"),
    caches((4, 4, 32), (6, 2, 64), (12, 2, 128), (7, 1, 48), (3, 3, 16), (4, 2, 256), (32, 2, 64)),
    ids=str,
)
def test_mixed_batches(isa: str, dtype: torch.dtype, heads: tuple[int, int, int], precision: Precision) -> None:
    case = made_once(AttentionShape(*heads, scale=heads[2] ** -0.5, precision=precision), tuple(CHUNKS), dtype)
    got = run(isa, case, case.shape)
    check_with(case.once_expected, got, max(rounding_of(isa, precision), rounding_of_few(isa, dtype)))
    exact = run(isa, case, evolve(case.shape, precision=Precision.FLOAT32))
    in_chunks = torch.cat([torch.full((count,), count > FEW_TOKENS) for count, _ in CHUNKS])
    if isa in ROUNDED_LEVELS[precision]:
        assert not torch.equal(got[in_chunks], exact[in_chunks])
    else:  # a few tokens have their keys multiplied where they lie, and add up in another order
        assert torch.equal(got[in_chunks], exact[in_chunks])
        if rounding_of_few(isa, dtype) == ROUNDING:
            torch.testing.assert_close(got[~in_chunks], exact[~in_chunks], rtol=0, atol=2e-6)


@every_level
@pytest.mark.parametrize("precision", ROUNDINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("window", [None, 12, 150])
def test_tokens_that_see_one_another(isa: str, window: int | None, precision: Precision) -> None:
    shape = AttentionShape(6, 2, 64, scale=0.125, window=window, precision=precision)
    case = made_once(shape, tuple(IN_BOTH_WAYS), torch.bfloat16, bidirectional_from=tuple(SEEN_BY_ALL))
    check(run(isa, case, shape), case, rounding_of(isa, precision))


@pytest.mark.thinned("precision", "window", of=1)
@every_level
@pytest.mark.parametrize("precision", ROUNDINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("window", [None, 1, 12, 150])
def test_windows_that_reach_both_ways(isa: str, window: int | None, precision: Precision) -> None:
    shape = AttentionShape(6, 2, 64, scale=0.125, window=window, window_reaches_ahead=True, precision=precision)
    case = made_once(shape, tuple(WHOLE_TEXTS), torch.bfloat16, bidirectional_from=(0,) * len(WHOLE_TEXTS))
    check(run(isa, case, shape), case, rounding_of(isa, precision))


@every_level
@pytest.mark.parametrize("precision", Precision, ids=lambda each: each.name)
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(isa: str, window: int | None, precision: Precision) -> None:
    """They are one more logit, far above the others in one head and far below in another."""
    shape = AttentionShape(6, 2, 64, scale=0.125, window=window, precision=precision)
    case = Case(shape, [*CHUNKS, (1, 1), (1, 700), (3, 131)], torch.float32)
    sinks = torch.tensor([-90.0, -1.0, 0.0, 1.0, 4.0, 90.0])
    got = native_paged_attention(workspace(isa, 2), case.query, case.cache, case.batch, shape, sinks=sinks)
    rows = PagedRows(
        block_tables=case.batch.block_tables,
        context_lens=case.batch.context_lens,
        cu_seqlens_q=case.batch.cu_seqlens_q,
        max_seqlen_q=512,
        max_context_len=None,
    )
    options = ScoreOptions(scale=shape.scale, window=window, sinks=sinks)
    expected = paged_attention_reference(case.query, case.cache, rows, options)
    rounding = 1e-6 if precision is Precision.FLOAT32 else rounding_of(isa, precision)
    assert float((got - expected).norm() / expected.norm()) < rounding
    assert got[:, 5].abs().max() < 1e-20 * got[:, 0].abs().max()


@pytest.mark.thinned("isa", "window", "softcap", "heads", "dtype")
@every_level
@pytest.mark.parametrize("window", [None, 1, 20, 128, 200])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("heads", [(6, 2, 64), (5, 1, 96), (12, 2, 128), (2, 2, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *CODES], ids=str)
def test_few_tokens_over_pages_in_place(
    isa: str, dtype: torch.dtype, heads: tuple[int, int, int], softcap: float | None, window: int | None
) -> None:
    lengths = ((1, 1), (1, 2), (1, 127), (1, 128), (1, 129), (1, 400), (3, 131), (8, 300), (2, 2))
    shape = AttentionShape(*heads, scale=heads[2] ** -0.5, window=window, softcap=softcap, precision=Precision.INT8)
    case = made_once(shape, lengths, dtype)
    check_with(case.once_expected, run(isa, case, shape), rounding_of_few(isa, dtype))


@pytest.mark.thinned("window", "heads", "dtype", of=1)  # their pairs are in the test of shorter runs
@every_level
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 96), (12, 2, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *CODES], ids=str)
def test_few_tokens_over_runs_of_several_spans(
    isa: str, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None
) -> None:
    """Runs get longer at 1,024, 4,096 and 16,384 keys."""
    lengths = ((1, 1024), (8, 1030), (1, 1152), (3, 4099), (1, 4608), (1, 17_500))
    shape = AttentionShape(*heads, scale=heads[2] ** -0.5, window=window, precision=Precision.INT8)
    offset = 2.0 if dtype in CODES else None
    case = made_once(shape, lengths, dtype, offset=offset)
    case.query = case.query.bfloat16().float()
    check_with(case.once_expected, run(isa, case, shape), rounding_of_few(isa, dtype))


@every_level
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *CODES], ids=str)
def test_few_tokens_depend_on_no_batch_thread_or_draft(isa: str, dtype: torch.dtype, window: int | None) -> None:
    shape = AttentionShape(12, 2, 128, scale=0.1, window=window, precision=Precision.INT8)
    case = made_once(shape, ((8, 1028), (5, 4098), (1, 130), (8, 1500)), dtype)
    expected = run(isa, case, shape, 1)
    assert torch.equal(run(isa, case, shape, 3), expected)
    token = 0
    for sequence, (tokens, context) in enumerate(case.lengths):
        for end in range(context - tokens + 1, context + 1):
            batch = VarlenBatch(
                torch.tensor([0, 1], dtype=torch.int32),
                case.batch.block_tables[sequence : sequence + 1],
                torch.tensor([end], dtype=torch.int32),
            )
            alone = native_paged_attention(workspace(isa, 2), case.query[token : token + 1], case.cache, batch, shape)
            assert torch.equal(alone, expected[token : token + 1])
            token += 1


@pytest.mark.thinned("isa", "precision", "window", "heads")
@every_level
@pytest.mark.parametrize("precision", ROUNDINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("heads", [(4, 2, 32), (6, 2, 64), (12, 2, 128)], ids=str)
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_keys_stored_without_their_offsets(
    isa: str, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, precision: Precision
) -> None:
    """Few tokens and many."""
    shape = AttentionShape(*heads, scale=heads[2] ** -0.5, window=window, precision=precision)
    case = made_once(shape, (*CHUNKS, (1, 400), (3, 257)), dtype, offset=2.0)
    case.query = case.query.bfloat16().float()  # rounding would be of each score, of which the offset's part is large
    check(run(isa, case, shape), case, max(rounding_of(isa, precision), rounding_of_few(isa, dtype)))


@every_level
@pytest.mark.parametrize("magnitude", [2.0**-64, 2.0**27])
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_coded_values_of_any_size(isa: str, dtype: torch.dtype, magnitude: float) -> None:
    case = Case(AttentionShape(6, 2, 64, scale=0.2, precision=Precision.INT8), [(1, 300), (3, 131)], dtype)
    assert case.cache.v_scale is not None
    case.cache.v_scale.mul_(magnitude)
    check(run(isa, case, case.shape) / magnitude, case, rounding_of_few(isa, dtype))


@every_level
@pytest.mark.parametrize("precision", ROUNDINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("window", [1, 20, 128, 200])
def test_sliding_windows(isa: str, window: int, precision: Precision) -> None:
    case = Case(AttentionShape(4, 2, 32, scale=0.2, window=window, precision=precision), CHUNKS, torch.bfloat16)
    check(run(isa, case, case.shape), case, rounding_of(isa, precision))


@every_level
@pytest.mark.parametrize("precision", ROUNDINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_capping(isa: str, softcap: float, precision: Precision) -> None:
    case = Case(AttentionShape(4, 2, 32, scale=0.2, softcap=softcap, precision=precision), CHUNKS, torch.float32)
    check(run(isa, case, case.shape), case, rounding_of(isa, precision))


@every_level
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_a_tokens_result_depends_on_no_chunking(
    isa: str, dtype: torch.dtype, window: int | None, *, marked: bool
) -> None:
    """Of more than eight tokens each, or of any number where chunks are marked as such."""
    shape = AttentionShape(6, 2, 32, scale=0.3, window=window, precision=Precision.INT8)
    case = Case(AttentionShape(6, 2, 32, scale=0.3), [(300, 300), (30, 90)], dtype)
    whole = run(isa, case, shape, 1)
    for chunks in ([290, 8, 1, 1], [1] * 20 + [280]) if marked else ([150, 150], [97, 9, 11, 183], [20] * 15):
        parts, done = [], 0
        for chunk in chunks:
            done += chunk
            batch = VarlenBatch(
                torch.tensor([0, chunk], dtype=torch.int32),
                case.batch.block_tables[:1],
                torch.tensor([done], dtype=torch.int32),
                torch.ones(1, dtype=torch.uint8) if marked else None,
            )
            query = case.query[done - chunk : done]
            parts.append(native_paged_attention(workspace(isa, 2), query, case.cache, batch, shape))
        assert torch.equal(torch.cat(parts), whole[:300])


@every_level
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("window", [None, 1500])
def test_a_deep_tokens_result_depends_on_no_chunk_or_thread(isa: str, window: int | None, precision: Precision) -> None:
    """Few tokens behind many are cut by keys where there are several threads."""
    shape = AttentionShape(2, 1, 32, scale=0.3, window=window, precision=precision)
    case = Case(shape, [(60, 2100)], torch.bfloat16)
    whole = run(isa, case, shape, 1)
    for num_threads, chunks in ((2, [60]), (3, [9, 51]), (1, [50, 10])):
        parts, done = [], 0
        for chunk in chunks:
            batch = VarlenBatch(
                torch.tensor([0, chunk], dtype=torch.int32),
                case.batch.block_tables,
                torch.tensor([2040 + done + chunk], dtype=torch.int32),
            )
            query = case.query[done : done + chunk]
            parts.append(native_paged_attention(workspace(isa, num_threads), query, case.cache, batch, shape))
            done += chunk
        assert torch.equal(torch.cat(parts), whole)


@every_level
def test_what_is_not_finite_stays_in_its_query(isa: str) -> None:
    case = Case(AttentionShape(4, 2, 32, scale=0.2, precision=Precision.INT8), [(40, 140)], torch.bfloat16)
    clean = run(isa, case, case.shape)
    for bad in (torch.nan, torch.inf):
        case.query[17, 2, 5] = bad
        got = run(isa, case, case.shape)
        assert got[17, 2].isnan().all()
        others = torch.ones(40, 4, dtype=torch.bool)
        others[17, 2] = False
        assert torch.equal(got[others], clean[others])


available_16 = pytest.mark.parametrize("isa", [level for level in available_levels() if level in LEVELS_16])


@available_16
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_the_largest_sums_of_codes_fit_32_bits(isa: str, head_dim: int, sign: int) -> None:
    """Every element is as large as any other: codes are the largest, and so are all products' sums."""
    shape = AttentionShape(2, 1, head_dim, scale=head_dim**-0.5, precision=Precision.INT8)
    case = Case(shape, [(40, 512)], torch.bfloat16)
    case.query.fill_(1.0)
    case.cache.key.fill_(sign)
    case.cache.value.fill_(sign)
    got = run(isa, case, shape)
    torch.testing.assert_close(got, torch.full_like(got, sign), rtol=CODED_16, atol=0)


@available_16
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [None, 30])
def test_keys_and_values_that_are_not_finite_stay_in_the_queries_that_see_them(
    isa: str, window: int | None, bad: float
) -> None:
    shape = AttentionShape(4, 2, 32, scale=0.2, window=window, precision=Precision.INT8)
    for name in ("key", "value"):
        case = Case(shape, [(140, 240)], torch.bfloat16)
        clean = run(isa, case, shape)
        place = 190
        block_size = case.cache.key.shape[1]
        pages = getattr(case.cache, name)
        pages[case.batch.block_tables[0, place // block_size], place % block_size, 1, 7] = bad
        got = run(isa, case, shape)
        positions = torch.arange(100, 240)
        sees = (positions >= place) & (positions < place + (window or 240))
        assert got[sees, 2:].isnan().all()
        assert torch.equal(got[:, :2], clean[:, :2])
        assert torch.equal(got[~sees, 2:], clean[~sees, 2:])


@every_level
@pytest.mark.parametrize(("precision", "scale"), [(Precision.BFLOAT16, 4.0), (Precision.INT8, 0.5)], ids=str)
def test_scores_of_any_size(isa: str, precision: Precision, scale: float) -> None:
    """The largest score is far from zero, and moves from span to span; as codes, its error grows with its size."""
    case = Case(AttentionShape(2, 1, 32, scale=scale, precision=precision), [(60, 600)], torch.bfloat16)
    case.query = case.query.sign()  # exact in bfloat16, and so are the products' sums but for float32's own rounding
    got = run(isa, case, case.shape)
    grows = scale / 0.5 if isa in LEVELS_16 else 1.0  # codes' errors of scores do, by which weights are wrong
    tolerance = 4 * grows * rounding_of(isa, precision)
    torch.testing.assert_close(got.double(), case.expected(), rtol=tolerance, atol=tolerance)


@every_level
def test_a_first_key_with_nearly_all_the_weight_leaves_the_others_theirs(isa: str) -> None:
    """Its value is zero, and theirs make the result: 1 part in 1,000 each, which no byte beside it could hold."""
    case = Case(AttentionShape(1, 1, 64, scale=0.125, precision=Precision.INT8), [(40, 120)], torch.bfloat16)
    case.query.abs_()
    case.cache.key.mul_(0.1)
    case.cache.key[case.batch.block_tables[0, 0], 0] = 1.2
    case.cache.value.abs_()
    case.cache.value[case.batch.block_tables[0, 0], 0] = 0.0
    got, exact = (
        run(isa, case, evolve(case.shape, precision=precision)) for precision in (Precision.INT8, Precision.FLOAT32)
    )
    assert 0 < exact.max() < 0.2
    assert float((got - exact).norm() / exact.norm()) < CODED
