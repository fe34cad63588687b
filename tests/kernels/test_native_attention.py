"""Native paged attention against a float64 softmax over gathered keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property, lru_cache

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from native_weights import UNIT_ROUNDOFF, every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.fp8 import quantize_f8e4m3
from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, native_paged_attention
from paged_sdk.kernels.q4 import dequantize_q4, quantize_q4

pytestmark = needs_library

BLOCK_SIZE = 16
OUTPUT_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
"""What storing a result adds, in proportion to it: bfloat16 has 8 bits, and what is rounded is itself a little off."""
CACHE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]
CODES = [torch.float8_e4m3fn, torch.uint8]
"""Dtypes of codes with scales: of f8e4m3, and of 4 bits."""


def caches(*heads: tuple[int, int, int]) -> list[tuple[torch.dtype, tuple[int, int, int]]]:
    """Return the dtypes of caches with each of the heads. 4-bit codes are of 32 elements each."""
    return [(dtype, each) for dtype in CACHE_DTYPES for each in heads if dtype != torch.uint8 or each[2] % 32 == 0]


def _quantized(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize keys or values ``[num_blocks, ...]``, so few at a time that what is made of them stays in the cache.

    Returns the codes, their scales, and what they stand for in float64.
    """
    quantize = quantize_q4 if dtype == torch.uint8 else quantize_f8e4m3
    parts = zip(*map(quantize, torch.split(vectors, 64)), strict=True)
    codes, scales = (torch.cat(part) for part in parts)
    if dtype == torch.uint8:
        return codes, scales, dequantize_q4(codes, scales, torch.float64)
    return codes, scales, codes.double() * scales.double()[..., None]


@frozen(eq=False)
class Attended:
    """Holds one sequence's attention in float64, and what it was made of.

    :ivar key: ``[context, heads, head_dim]`` as stored; ``value`` likewise, and ``offsets`` of keys if there are any
    :ivar hidden: ``[tokens, context]``: what a token does not see
    :ivar scores: ``[heads, tokens, context]``, and their softmax ``weights``
    :ivar output: ``[tokens, heads, head_dim]``, like ``query``
    """

    query: Tensor
    key: Tensor
    offsets: Tensor | None
    value: Tensor
    hidden: Tensor
    scores: Tensor
    weights: Tensor
    output: Tensor


class Case:
    """Holds sequences with random keys and values in shuffled pages; unused slots hold NaN.

    :param offset: the size of the offset that is subtracted from the keys of a quantized cache; None: there is none
    """

    def __init__(
        self,
        shape: AttentionShape,
        lengths: list[tuple[int, int]],
        dtype: torch.dtype,
        *,
        offset: float | None = None,
        bidirectional_from: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.lengths = lengths  # (query tokens, context)
        self._bidirectional_from = bidirectional_from or [-1] * len(lengths)
        counts = [-(-context // BLOCK_SIZE) for _, context in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).int()
        tables = torch.full((len(lengths), max(counts)), -(1 << 30), dtype=torch.int32)
        size = (len(order), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        key, value = torch.full(size, torch.nan), torch.full(size, torch.nan)
        starts = list(itertools.accumulate(counts, initial=0))
        for s, (tokens, context) in enumerate(lengths):
            blocks = order[starts[s] : starts[s + 1]]
            tables[s, : len(blocks)] = blocks
            slots = (blocks.long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:context]
            for cache in (key, value):
                cache.flatten(0, 1)[slots] = torch.randn(context, *size[2:], generator=generator)
            if shape.window is not None:  # what left the window may be gone
                oldest = max(0, context - tokens - shape.window + 1)
                if self._bidirectional_from[s] >= 0:
                    oldest = min(oldest, self._bidirectional_from[s])
                tables[s, : oldest // BLOCK_SIZE] = -(1 << 30)
        if dtype in CODES:
            (k_codes, k_scale, stored_key), (v_codes, v_scale, stored_value) = (
                _quantized(vectors, dtype) for vectors in (key, value)
            )
            offsets = None
            if offset is not None:
                num_spans = -(-max(context for _, context in lengths) // KEY_SPAN)
                offsets = offset * torch.randn(num_spans, *size[2:], generator=generator)
            self.cache = LayerCache(k_codes, v_codes, k_scale, v_scale, offsets)
            key, value = stored_key, stored_value
        else:
            self.cache = LayerCache(key.to(dtype), value.to(dtype))
            key, value = self.cache.key.double(), self.cache.value.double()
        self._vectors = (key.flatten(0, 1), value.flatten(0, 1))
        self._slots = [
            (order[starts[s] : starts[s + 1]].long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[
                :context
            ]
            for s, (_, context) in enumerate(lengths)
        ]
        ends = list(itertools.accumulate((tokens for tokens, _ in lengths), initial=0))
        self.batch = VarlenBatch(
            torch.tensor(ends, dtype=torch.int32),
            tables,
            torch.tensor([c for _, c in lengths], dtype=torch.int32),
            bidirectional_from=torch.tensor(bidirectional_from, dtype=torch.int32) if bidirectional_from else None,
        )
        self.query = torch.randn(ends[-1], shape.num_heads, shape.head_dim, generator=generator)

    @cached_property
    def once_expected(self) -> Tensor:
        """Is what is expected, for a case that stays as it is while several kernels compute it."""
        return self.expected()

    def expected(self) -> Tensor:
        """Return the result in float64, ``[tokens, heads, head_dim]``."""
        return torch.cat([each.output for each in self._sequences()])

    @cached_property
    def _once_bounded(self) -> tuple[Tensor, Tensor]:
        bounded = [(each.output, self._bound(each)) for each in self._sequences()]
        expected, bound = (torch.cat(parts) for parts in zip(*bounded, strict=True))
        return expected, bound

    def check(self, got: Tensor) -> None:
        """Compare with the float64 result, as near as float32 arithmetic has to come. What is expected is computed
        once, so the case has to stay as it is from then on.
        """
        expected, bound = self._once_bounded
        assert ((got.double() - expected).abs() <= bound + OUTPUT_ROUNDING[got.dtype] * expected.abs()).all()

    def _sequences(self) -> Iterator[Attended]:
        shape = self.shape
        for s, (tokens, context) in enumerate(self.lengths):
            first = int(self.batch.cu_seqlens_q[s])
            query = self.query[first : first + tokens].double()
            key, value = (
                vectors[self._slots[s]].repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
                for vectors in self._vectors
            )
            offsets = None
            if self.cache.key_offsets is not None:
                offsets = self.cache.key_offsets.double()[torch.arange(context) // KEY_SPAN]
                offsets = offsets.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
            whole = key if offsets is None else key + offsets
            scores = torch.einsum("thd,shd->hts", query, whole) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            distance = torch.arange(context - tokens, context)[:, None] - torch.arange(context)
            hidden = distance < 0
            if shape.window is not None:
                hidden |= distance >= shape.window
            if self._bidirectional_from[s] >= 0 and shape.window_reaches_ahead:
                hidden = distance.abs() >= (shape.window or context)
            elif self._bidirectional_from[s] >= 0:
                hidden[:, self._bidirectional_from[s] :] = False
            scores = scores.masked_fill(hidden, -torch.inf)
            weights = scores.softmax(-1)
            output = torch.einsum("hts,shd->thd", weights, value)
            yield Attended(query, key, offsets, value, hidden, scores, weights, output)

    def _bound(self, found: Attended) -> Tensor:
        """Return how far float32 arithmetic may be off, whatever the order of its sums. -> float64 like the output

        A sum of n products is off by at most n roundings of its terms' magnitudes (Higham, Accuracy and Stability of
        Numerical Algorithms, 3.1): so is a score, to which its factors, its scale and its offset add a few, and a cap
        a few of its own size. What a score is off by, its exponential is off by in proportion, beside the rounding of
        its argument (as large as the distance to the largest score) and 4 of the exponential itself. Numerator and
        denominator are sums over the context, which rescale as often as a span of keys has passed.
        """
        shape, scores, hidden, context = self.shape, found.scores, found.hidden, len(found.key)
        magnitudes = found.key.abs() if found.offsets is None else found.key.abs() + found.offsets.abs()
        errors = (shape.head_dim + 4) * torch.einsum("thd,shd->hts", found.query.abs(), magnitudes) * shape.scale
        if shape.softcap is not None:
            # The slope is at most 1; e^(2x) has a rounded argument, 2 / (1 + e^(2x)) a few roundings of up to 2.
            errors = errors + 10 * shape.softcap
        below = (scores.amax(-1, keepdim=True) - scores).masked_fill(hidden, 0)
        # A score's own size is rounded where it is scaled by log2 e; so is its distance to the largest.
        roundings = errors + 2 * scores.abs().masked_fill(hidden, 0) + 2 * below
        roundings = found.weights * (roundings + context + 8 + 4 * (context // KEY_SPAN))
        numerator = torch.einsum("hts,shd->thd", roundings, found.value.abs())
        denominator = roundings.sum(-1).transpose(0, 1)[..., None] * found.output.abs()
        return (numerator + denominator + 4 * found.output.abs()) * UNIT_ROUNDOFF


@lru_cache(maxsize=1)
def made_once(
    shape: AttentionShape,
    lengths: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    *,
    offset: float | None = None,
    bidirectional_from: tuple[int, ...] = (),
) -> Case:
    """Return one case for all levels: to make it, and what is expected, takes longer than they take."""
    return Case(shape, list(lengths), dtype, offset=offset, bidirectional_from=list(bidirectional_from))


MIXED = [(1, 1), (1, 37), (5, 300), (1, 128), (70, 70), (130, 400), (3, 3), (1, 513)]


@every_level
@pytest.mark.parametrize(("dtype", "heads"), caches((4, 4, 32), (6, 2, 64), (7, 1, 48), (2, 2, 16)), ids=str)
def test_mixed_batches(isa: str, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    case = made_once(AttentionShape(*heads, scale=heads[2] ** -0.5), tuple(MIXED), dtype)
    got = native_paged_attention(workspace(isa, 2), case.query, case.cache, case.batch, case.shape)
    case.check(got)


@pytest.mark.thinned("window", "softcap", "dtype", "head_dim")
@every_level
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float8_e4m3fn, 48), (torch.uint8, 96)], ids=str)
def test_keys_stored_without_their_offsets(
    isa: str, dtype: torch.dtype, head_dim: int, softcap: float | None, window: int | None
) -> None:
    shape = AttentionShape(6, 2, head_dim, scale=0.15, window=window, softcap=softcap)
    case = made_once(shape, tuple(MIXED), dtype, offset=2.0)
    got = native_paged_attention(workspace(isa, 2), case.query, case.cache, case.batch, case.shape)
    case.check(got)


@every_level
@pytest.mark.parametrize("window", [1, 20, 128, 200])
def test_sliding_windows(isa: str, window: int) -> None:
    case = made_once(AttentionShape(4, 2, 32, scale=0.2, window=window), tuple(MIXED), torch.bfloat16)
    got = native_paged_attention(workspace(isa, 2), case.query, case.cache, case.batch, case.shape)
    case.check(got)


IN_BOTH_WAYS = [(1, 1), (5, 300), (70, 70), (130, 400), (3, 3), (16, 40), (200, 700)]
SEEN_BY_ALL = [-1, 290, 0, 270, 0, 20, 500]


@every_level
@pytest.mark.parametrize("window", [None, 12, 150])
def test_tokens_that_see_one_another(isa: str, window: int | None) -> None:
    shape = AttentionShape(6, 2, 32, scale=0.2, window=window)
    case = made_once(shape, tuple(IN_BOTH_WAYS), torch.bfloat16, bidirectional_from=tuple(SEEN_BY_ALL))
    got = native_paged_attention(workspace(isa, 2), case.query, case.cache, case.batch, case.shape)
    case.check(got)
    alone = native_paged_attention(workspace(isa, 1), case.query, case.cache, case.batch, case.shape)
    assert torch.equal(alone, got)


WHOLE_TEXTS = [(1, 1), (5, 5), (300, 300), (70, 70), (130, 130), (3, 3)]
"""Are an encoder's: each has all its tokens in one step."""


@every_level
@pytest.mark.parametrize("window", [None, 1, 12, 128, 150])
def test_windows_that_reach_both_ways(isa: str, window: int | None) -> None:
    shape = AttentionShape(6, 2, 32, scale=0.2, window=window, window_reaches_ahead=True)
    case = made_once(shape, tuple(WHOLE_TEXTS), torch.bfloat16, bidirectional_from=(0,) * len(WHOLE_TEXTS))
    got = native_paged_attention(workspace(isa, 2), case.query, case.cache, case.batch, case.shape)
    case.check(got)
    alone = native_paged_attention(workspace(isa, 1), case.query, case.cache, case.batch, case.shape)
    assert torch.equal(alone, got)


@every_level
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_capping(isa: str, softcap: float) -> None:
    case = made_once(AttentionShape(4, 2, 32, scale=2.0, softcap=softcap), tuple(MIXED), torch.float32)
    got = native_paged_attention(workspace(isa), case.query, case.cache, case.batch, case.shape)
    case.check(got)


@every_level
def test_bfloat16_queries_and_strided_rows(isa: str) -> None:
    case = Case(AttentionShape(4, 2, 32, scale=0.2), MIXED, torch.bfloat16)
    wide = torch.zeros(len(case.query), 8, 32, dtype=torch.bfloat16)
    wide[:, :4] = case.query.bfloat16()
    case.query = wide[:, :4].float()
    out = torch.full_like(wide, torch.nan)[:, 4:]
    got = native_paged_attention(workspace(isa), wide[:, :4], case.cache, case.batch, case.shape, out=out)
    assert got is out
    case.check(got)


@every_level
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_a_tokens_result_depends_on_no_batch_chunk_or_thread(isa: str, dtype: torch.dtype, window: int | None) -> None:
    """One prompt of 300 tokens, whole, in chunks, and token by token, beside other sequences or alone."""
    shape = AttentionShape(6, 2, 32, scale=0.3, window=window)
    case = Case(AttentionShape(6, 2, 32, scale=0.3), [(300, 300), (1, 90)], dtype)
    whole = native_paged_attention(workspace(isa), case.query, case.cache, case.batch, shape)
    tables = case.batch.block_tables
    for chunks in ([150, 150], [1] * 300, [97, 3, 8, 9, 183]):
        parts, done = [], 0
        for chunk in chunks:
            done += chunk
            batch = VarlenBatch(
                torch.tensor([0, chunk], dtype=torch.int32), tables[:1], torch.tensor([done], dtype=torch.int32)
            )
            query = case.query[done - chunk : done]
            parts.append(native_paged_attention(workspace(isa, 2), query, case.cache, batch, shape))
        assert torch.equal(torch.cat(parts), whole[:300])


@every_level
@pytest.mark.parametrize("window", [None, 1300])
def test_a_token_of_a_long_text_depends_on_no_chunk(isa: str, window: int | None) -> None:
    """The last 30 of 2,300 tokens: of their keys, tiles take 1,024 at a time, and few tokens 128 at a time."""
    shape = AttentionShape(2, 1, 16, scale=0.3, window=window)
    case = Case(evolve(shape, window=None), [(30, 2300)], torch.float32)
    whole = native_paged_attention(workspace(isa), case.query, case.cache, case.batch, shape)
    for chunks in ([1] * 30, [8, 9, 8, 5]):
        parts, done = [], 0
        for chunk in chunks:
            done += chunk
            batch = VarlenBatch(
                torch.tensor([0, chunk], dtype=torch.int32),
                case.batch.block_tables,
                torch.tensor([2270 + done], dtype=torch.int32),
            )
            query = case.query[done - chunk : done]
            parts.append(native_paged_attention(workspace(isa, 2), query, case.cache, batch, shape))
        assert torch.equal(torch.cat(parts), whole)


@every_level
def test_what_is_not_finite_stays_in_its_sequence(isa: str) -> None:
    case = Case(AttentionShape(4, 2, 32, scale=0.2), [(1, 40), (1, 40), (3, 60)], torch.float32)
    clean = native_paged_attention(workspace(isa), case.query, case.cache, case.batch, case.shape)
    case.query[1, 2, 5] = torch.inf
    got = native_paged_attention(workspace(isa), case.query, case.cache, case.batch, case.shape)
    assert got[1, 2].isnan().all()
    others = torch.ones(5, 4, dtype=torch.bool)
    others[1, 2] = False
    assert torch.equal(got[others], clean[others])


def test_what_does_not_fit_is_refused() -> None:
    case = Case(AttentionShape(4, 2, 32, scale=0.2), [(1, 40)], torch.float32)
    good = (case.query, case.cache, case.batch, case.shape)
    for call in (
        lambda: AttentionShape(4, 2, 40, scale=1.0),
        lambda: AttentionShape(5, 2, 32, scale=1.0),
        lambda: LayerCache(case.cache.key, case.cache.value.bfloat16()),
        lambda: LayerCache(case.cache.key, case.cache.value, torch.ones(1), torch.ones(1)),
        lambda: LayerCache(case.cache.key, case.cache.value, key_offsets=torch.zeros(1, 2, 32)),
        lambda: VarlenBatch(case.batch.cu_seqlens_q.long(), case.batch.block_tables, case.batch.context_lens),
        lambda: VarlenBatch(case.batch.context_lens, case.batch.block_tables, case.batch.context_lens),
        lambda: evolve(case.batch, in_chunks=torch.ones(1, dtype=torch.bool)),
        lambda: evolve(case.batch, in_chunks=torch.ones(2, dtype=torch.uint8)),
        lambda: native_paged_attention(workspace(), case.query[:, :3], *good[1:]),
        lambda: native_paged_attention(workspace(), case.query.double(), *good[1:]),
        lambda: native_paged_attention(workspace(), *good[:3], AttentionShape(4, 4, 32, scale=1.0)),
    ):
        with pytest.raises(ConfigError):
            call()
