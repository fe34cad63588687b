"""Native decoder layers against the same arithmetic in float64, one operation after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from native_weights import (
    every_level,
    hadamard_rows,
    hadamard_weight,
    library,
    needs_library,
    quantize_activations,
    random_weight,
    workspace,
)
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.fp8 import quantize_f8e4m3
from paged_sdk.kernels.kv_basis import KvBasis
from paged_sdk.kernels.native.decoder import EmbeddingTable, NativeDecoder, Turns
from paged_sdk.kernels.native.decoder_layer import DecoderLayer
from paged_sdk.kernels.native.packed import PackedWeight, decode_rows, pack_dense
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, cumulated
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.q4 import dequantize_q4, quantize_q4

pytestmark = needs_library

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, BLOCK = 256, 512, 4, 2, 64, 8
WIDTHS = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
CODES = [torch.float8_e4m3fn, torch.uint8]
"""Dtypes of codes with scales: of f8e4m3, and of 4 bits."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, *CODES]

every_cache = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MATRICES = frozenset({"qkv", "output", "gate", "up", "down"})
# Of a file whose matrices have several types, only some can be packed.
FORMS = [frozenset[str](), MATRICES, frozenset({"qkv", "down"}), frozenset({"output", "gate", "up"})]

every_form = pytest.mark.parametrize(
    "in_hadamard", FORMS, ids=["packed", "hadamard", "outer hadamard", "inner hadamard"]
)


def empty_cache(shape: AttentionShape, dtype: torch.dtype) -> LayerCache:
    """Return 16 blocks of NaN."""
    size = (16, BLOCK, shape.num_kv_heads, shape.head_dim)
    if dtype not in CODES:
        key, value = (torch.full(size, torch.nan, dtype=dtype) for _ in range(2))
        return LayerCache(key, value)
    (key, k_scale), (value, v_scale) = (quantized(torch.full(size, torch.nan), dtype) for _ in range(2))
    return LayerCache(key, value, k_scale, v_scale)


def shape_of(layer: DecoderLayer) -> AttentionShape:
    assert layer.shape is not None
    return layer.shape


def cache_of(layer: DecoderLayer) -> LayerCache:
    assert layer.cache is not None
    return layer.cache


def quantized(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize to a dtype of codes."""
    return quantize_q4(vectors) if dtype == torch.uint8 else quantize_f8e4m3(vectors)


def check_stored(cache: LayerCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Check bit for bit that slots of a quantized cache hold keys and values, as torch quantizes them."""
    for codes, scales, vectors in ((cache.key, cache.k_scale, keys), (cache.value, cache.v_scale, values)):
        expected_codes, expected_scales = quantized(vectors, cache.key.dtype)
        assert scales is not None
        assert torch.equal(scales.flatten(0, 1)[slots], expected_scales)
        assert torch.equal(codes.view(torch.uint8).flatten(0, 1)[slots], expected_codes.view(torch.uint8))


@frozen(kw_only=True)
class Parts:
    """Says what layers have beside what every layer has."""

    qkv_bias: bool = False
    other_biases: bool = False
    head_norms: bool = False
    output_norms: bool = False
    gelu: bool = False
    window: int | None = None
    softcap: float | None = None


LLAMA = Parts()
QWEN = Parts(qkv_bias=True, head_norms=True, gelu=True, window=20)
GEMMA = Parts(other_biases=True, head_norms=True, output_norms=True, gelu=True, window=20, softcap=3.0)


class Stack:
    """Holds two random layers, and their weights in float64.

    :param fused: whether query, key and value are one matrix
    :param in_hadamard: the matrices that are multiplied in the way for many rows
    :param dtype: the dtype of the cache
    """

    def __init__(
        self,
        *,
        fused: bool,
        parts: Parts,
        in_hadamard: frozenset[str] = frozenset(),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random_form(name: str, tensor_type: int, rows: int, cols: int) -> tuple[PackedWeight, Tensor]:
            packed, weight = random_weight(tensor_type, rows, cols, generator)
            if name in in_hadamard:
                return packed.hadamard_form(), hadamard_weight(packed)
            return packed, weight

        def biases(rows: Sequence[int], *, given: bool) -> list[Tensor | None]:
            return [torch.randn(n, generator=generator) if given else None for n in rows]

        self._in_hadamard = in_hadamard
        self.shape = AttentionShape(HEADS, KV_HEADS, SIZE, scale=SIZE**-0.5, window=parts.window, softcap=parts.softcap)
        self.dtype = dtype
        self.layers: list[DecoderLayer] = []
        self.weights: list[dict[str, Tensor]] = []
        for index in range(2):
            rows = (sum(WIDTHS),) if fused else WIDTHS
            matrices = {
                "output": random_form("output", 3, HIDDEN, HEADS * SIZE),
                "gate": random_form("gate", 12, INNER, HIDDEN),
                "up": random_form("up", 14, INNER, HIDDEN),
                "down": random_form("down", 13, HIDDEN, INNER),
            }
            qkv = [random_form("qkv", 12, n, HIDDEN) for n in rows]
            norms = {
                name: 0.2 * (1 + 0.1 * torch.randn(size, generator=generator))
                for name, size, given in (
                    ("attention_norm", HIDDEN, True),
                    ("attention_output_norm", HIDDEN, parts.output_norms),
                    ("mlp_norm", HIDDEN, True),
                    ("mlp_output_norm", HIDDEN, parts.output_norms),
                    ("query_norm", SIZE, parts.head_norms),
                    ("key_norm", SIZE, parts.head_norms),
                )
                if given
            }
            qkv_biases = biases(rows, given=parts.qkv_bias)
            other_biases = biases([weight.shape[0] for _, weight in matrices.values()], given=parts.other_biases)
            projections = {
                name: Projection(packed, bias)
                for (name, (packed, _)), bias in zip(matrices.items(), other_biases, strict=True)
            }
            self.weights.append(
                {name: weight for name, (_, weight) in matrices.items()}
                | {"qkv": torch.cat([weight for _, weight in qkv])}
                | {name: norm.double() for name, norm in norms.items()}
                | {f"{name}_bias": each.bias for name, each in projections.items() if each.bias is not None}
                | {"qkv_bias": torch.cat([bias for bias in qkv_biases if bias is not None] or [torch.zeros(1)])}
            )
            self.layers.append(
                DecoderLayer(
                    shape=self.shape,
                    cache=empty_cache(self.shape, dtype),
                    qkv=tuple(Projection(packed, bias) for (packed, _), bias in zip(qkv, qkv_biases, strict=True)),
                    norm_eps=1e-6,
                    activation="gelu_tanh" if parts.gelu else "silu",
                    rope=index,
                    output=projections["output"],
                    gate=projections["gate"],
                    up=projections["up"],
                    down=projections["down"],
                    attention_norm=norms["attention_norm"],
                    attention_output_norm=norms.get("attention_output_norm"),
                    mlp_norm=norms["mlp_norm"],
                    mlp_output_norm=norms.get("mlp_output_norm"),
                    query_norm=norms.get("query_norm"),
                    key_norm=norms.get("key_norm"),
                )
            )
        self.parts = parts

    def fresh(self) -> list[DecoderLayer]:
        """Return the same layers with empty caches."""
        return [evolve(layer, cache=empty_cache(self.shape, self.dtype)) for layer in self.layers]

    def quantize(self, name: str, rows: Tensor) -> Tensor:
        """Quantize the input of a matrix as the kernels do."""
        return hadamard_rows(rows) if name in self._in_hadamard else quantize_activations(rows)

    def stored(self, vectors: Tensor) -> Tensor:
        """Return vectors as a cache stores them."""
        if self.dtype in CODES:
            return values_of(*quantized(vectors, self.dtype))
        return vectors.to(self.dtype).double()

    def multiply(self, name: str, rows: Tensor, weights: dict[str, Tensor]) -> Tensor:
        product = self.quantize(name, rows) @ weights[name].T
        return product + weights[f"{name}_bias"] if f"{name}_bias" in weights else product

    def expected(self, hidden: Tensor, ropes: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Compute one whole sequence, in float64.

        :param ropes: for each layer cosines and sines, and factors of queries, if there are any
        """
        x, count = hidden.double(), len(hidden)
        distance = torch.arange(count)[:, None] - torch.arange(count)
        hidden_keys = distance < 0
        if self.shape.window is not None:
            hidden_keys |= distance >= self.shape.window

        def norm(rows: Tensor, weight: Tensor | None) -> Tensor:
            return rows if weight is None else F.rms_norm(rows, weight.shape, weight, 1e-6)

        for w, (cosines, sines, *scales) in zip(self.weights, ropes, strict=True):
            projected = self.multiply("qkv", norm(x, w["attention_norm"]), w)
            q, k, v = (part.reshape(count, -1, SIZE) for part in torch.split(projected, list(WIDTHS), dim=1))
            q, k = norm(q, w.get("query_norm")), norm(k, w.get("key_norm"))
            q = q * scales[0].double()[:, None, None] if scales else q
            q, k = turn(q, cosines, sines), self.stored(turn(k, cosines, sines).float())
            v = self.stored(v.float())
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            scores = torch.einsum("thd,shd->hts", q, k) * self.shape.scale
            if (cap := self.shape.softcap) is not None:
                scores = cap * (scores / cap).tanh()
            attended = torch.einsum("hts,shd->thd", scores.masked_fill(hidden_keys, -torch.inf).softmax(-1), v)
            x = x + norm(self.multiply("output", attended.flatten(1), w), w.get("attention_output_norm"))
            normed = norm(x, w["mlp_norm"])
            gate = self.multiply("gate", normed, w)
            gate = F.gelu(gate, approximate="tanh") if self.parts.gelu else F.silu(gate)
            gated = gate * self.multiply("up", normed, w)
            x = x + norm(self.multiply("down", gated, w), w.get("mlp_output_norm"))
        return x


def turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn elements i and n + i of each head by the angle of column i."""
    half = cosines.shape[1]
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    c, s = cosines.double()[:, None], sines.double()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)


# Instruction sets, which change first, share a stack: making it takes longer than a test.
latest_stack = functools.lru_cache(maxsize=1)(Stack)


class Prompt:
    """Holds one sequence of 45 tokens in shuffled blocks.

    :param halves: for each layer, half of the number of elements that its rotary embedding turns
    """

    def __init__(self, *halves: int, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.count = 45
        self.hidden = torch.randn(self.count, HIDDEN, generator=generator)
        positions = torch.arange(self.count)
        angles = [positions[:, None] * torch.rand(half, generator=generator) for half in halves]
        self.ropes: list[tuple[Tensor, ...]] = [(each.cos(), each.sin()) for each in angles]
        self.table = torch.randperm(16, generator=generator)[:6].int()
        self.slots = self.table.long()[positions // BLOCK] * BLOCK + positions % BLOCK

    def batch(self, chunk: int, done: int) -> VarlenBatch:
        """Return the step of the last ``chunk`` of ``done`` tokens."""
        return VarlenBatch(
            torch.tensor([0, chunk], dtype=torch.int32), self.table[None], torch.tensor([done], dtype=torch.int32)
        )

    def run(self, decoder: NativeDecoder, chunks: list[int]) -> Tensor:
        parts, done = [], 0
        for chunk in chunks:
            rows = slice(done, done + chunk)
            done += chunk
            batch = VarlenBatch(
                torch.tensor([0, chunk], dtype=torch.int32), self.table[None], torch.tensor([done], dtype=torch.int32)
            )
            ropes = [tuple(each[rows] for each in rope) for rope in self.ropes]
            parts.append(decoder(self.hidden[rows].clone(), ropes, self.slots[rows], batch))
        return torch.cat(parts)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.thinned("isa", "dtype", "fused", "in_hadamard", "parts")
@every_level
@every_cache
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@every_form
@pytest.mark.parametrize("parts", [LLAMA, QWEN, GEMMA], ids=["llama", "qwen", "gemma"])
def test_layers(isa: str, dtype: torch.dtype, fused: bool, parts: Parts, in_hadamard: frozenset[str]) -> None:
    """The second layer's rotary embedding is another one, of 48 of the 64 elements of a head."""
    stack = latest_stack(fused=fused, parts=parts, in_hadamard=in_hadamard, dtype=dtype)
    prompt = Prompt(SIZE // 2, 24)
    expected = stack.expected(prompt.hidden, prompt.ropes)
    got = prompt.run(NativeDecoder(workspace(isa, 2), stack.fresh()), [prompt.count])
    # Values on a rounding boundary fall either way: of int8 activations, and of the cache, whose f8e4m3 steps are 6 %,
    # and whose 4-bit steps are a fifteenth of a range.
    assert relative(got, expected) < {torch.float8_e4m3fn: 2e-2, torch.uint8: 5e-2}.get(dtype, 1e-2)
    if dtype == torch.float32:  # most tokens have none
        errors = [relative(row, each) for row, each in zip(got, expected, strict=True)]
        assert sorted(errors)[len(errors) // 2] < 1e-3


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_queries_with_factors(isa: str, dtype: torch.dtype) -> None:
    """After the norms of heads, in one of two layers, of rows in chunks and of those that are read."""
    stack, prompt = latest_stack(fused=False, parts=QWEN, dtype=dtype), Prompt(SIZE // 2, 24)
    without = stack.expected(prompt.hidden, prompt.ropes)
    prompt.ropes[0] += (torch.linspace(1, 4, prompt.count),)
    expected = stack.expected(prompt.hidden, prompt.ropes)
    got = prompt.run(NativeDecoder(workspace(isa, 2), stack.fresh()), [prompt.count])
    limit = 5e-2 if dtype == torch.uint8 else 1e-2
    assert relative(got, expected) < limit
    assert relative(without, expected) > 3 * limit
    assert torch.equal(prompt.run(NativeDecoder(workspace(isa, 2), stack.fresh()), [2, 30, 1, 12]), got)
    read = torch.tensor([0, 3], dtype=torch.int32)
    decoder, batch = NativeDecoder(workspace(isa, 2), stack.fresh()), prompt.batch(prompt.count, prompt.count)
    some = decoder(prompt.hidden.clone(), prompt.ropes, prompt.slots, batch, read)
    assert torch.equal(some[-3:], got[-3:])


@pytest.mark.thinned("isa", "in_hadamard", "dtype", "parts")
@every_level
@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, *CODES], ids=str)
@pytest.mark.parametrize("parts", [QWEN, GEMMA], ids=["qwen", "gemma"])
def test_a_token_depends_on_no_chunk_or_thread(
    isa: str, dtype: torch.dtype, parts: Parts, in_hadamard: frozenset[str]
) -> None:
    stack, prompt = latest_stack(fused=False, parts=parts, in_hadamard=in_hadamard, dtype=dtype), Prompt(16, 32)
    whole = prompt.run(NativeDecoder(workspace(isa, 1), stack.fresh()), [45])
    # Up to two rows every thread has a residual stream of its own where there are output norms.
    cases = (2, [45]), (1, [1] * 45), (1, [2, 30, 1, 12]), (2, [16, 9, 20]), (2, [2, 30, 1, 1, 11]), (3, [1, 2, 42])
    for num_threads, chunks in cases:
        assert torch.equal(prompt.run(NativeDecoder(workspace(isa, num_threads), stack.fresh()), chunks), whole)


@pytest.mark.thinned("isa", "in_hadamard", "precision", "parts")
@every_level
@every_form
@pytest.mark.parametrize("precision", Precision, ids=lambda each: each.name)
@pytest.mark.parametrize("parts", [QWEN, GEMMA], ids=["qwen", "gemma"])
def test_rows_that_are_read_are_computed_as_all_are(
    isa: str, parts: Parts, in_hadamard: frozenset[str], precision: Precision
) -> None:
    """Bit for bit, of a chunk of a prompt and two texts; keys and values are those of all rows in any case, and rows
    that are not read stay as they were before the last layer.
    """
    stack, prompt = (
        latest_stack(fused=False, parts=parts, in_hadamard=in_hadamard, dtype=torch.bfloat16),
        Prompt(16, 32),
    )
    lengths = (30, 8, 7)
    tables = torch.randperm(16)[:12].int().view(3, 4)
    places = [(table.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten() for table in tables]
    slots = torch.cat([place[:length] for place, length in zip(places, lengths, strict=True)])
    batch = VarlenBatch(
        cumulated(torch.tensor(lengths)), tables, torch.tensor(lengths).int(), torch.tensor([1, 0, 0]).byte()
    )
    firsts = batch.cu_seqlens_q.tolist()

    def run(read: Sequence[int] | None) -> tuple[Tensor, list[LayerCache]]:
        layers = [evolve(layer, shape=evolve(shape_of(layer), precision=precision)) for layer in stack.fresh()]
        decoder = NativeDecoder(workspace(isa, 2), layers)
        cu_seqlens_read = None if read is None else cumulated(torch.tensor(read))
        hidden = decoder(prompt.hidden.clone(), prompt.ropes, slots, batch, cu_seqlens_read)
        return hidden, [cache_of(layer) for layer in layers]

    (whole, whole_caches), (before, _) = run(None), run((0, 0, 0))
    for read in ((1, 0, 3), (0, 0, 0), (30, 8, 7), (0, 8, 1), (12, 8, 0), (29, 8, 7)):
        hidden, caches = run(read)
        for first, length, count in zip(firsts, lengths, read, strict=False):
            rows = slice(first + length - count, first + length)
            assert torch.equal(hidden[rows], whole[rows])
            rest = slice(first, first + length - count)
            assert torch.equal(hidden[rest], before[rest])
        for cache, expected in zip(caches, whole_caches, strict=True):
            assert torch.equal(cache.key.flatten(0, 1)[slots], expected.key.flatten(0, 1)[slots])
            assert torch.equal(cache.value.flatten(0, 1)[slots], expected.value.flatten(0, 1)[slots])


@every_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gated_products_of_many_wide_rows(isa: str, dtype: torch.dtype) -> None:
    """400 rows of 2,048 columns do not fit a second-level cache. Gate and up have 14 panels: eight, and six more."""
    generator = torch.Generator().manual_seed(8)
    hidden, inner, size, count = 2048, 112, 16, 400
    shape = AttentionShape(1, 1, size, scale=1.0)
    gate, up = (torch.randn(inner, hidden, generator=generator).div(hidden**0.5).bfloat16() for _ in range(2))
    down = torch.randn(hidden, inner, generator=generator).to(dtype)

    def packed(weight: Tensor) -> Projection:
        rows, cols = weight.shape
        return Projection(pack_dense(library(isa), [weight], (rows, cols), weight.dtype, num_threads=1))

    size_of_cache = (count // BLOCK, BLOCK, 1, size)
    layer = DecoderLayer(
        shape=shape,
        cache=LayerCache(torch.zeros(size_of_cache), torch.zeros(size_of_cache)),
        qkv=(packed(torch.zeros(3 * size, hidden, dtype=torch.bfloat16)),),
        output=packed(torch.zeros(hidden, size, dtype=torch.bfloat16)),
        gate=packed(gate),
        up=packed(up),
        down=packed(down),
        attention_norm=None,
        mlp_norm=None,
        norm_eps=1e-6,
    )
    x, rope = torch.randn(count, hidden, generator=generator), torch.zeros(count, 8)
    table = torch.arange(count // BLOCK).int()[None]

    def run(num_threads: int, chunks: list[int]) -> Tensor:
        decoder, parts, done = NativeDecoder(workspace(isa, num_threads), [layer]), [], 0
        for chunk in chunks:
            rows = slice(done, done + chunk)
            done += chunk
            batch = VarlenBatch(
                torch.tensor([0, chunk], dtype=torch.int32), table, torch.tensor([done], dtype=torch.int32)
            )
            parts.append(decoder(x[rows].clone(), [(rope[rows], rope[rows])], torch.arange(count)[rows], batch))
        return torch.cat(parts)

    whole = run(2, [count])
    gated = F.silu(x.bfloat16().double() @ gate.double().T) * (x.bfloat16().double() @ up.double().T)
    branch = (gated.bfloat16() if dtype == torch.bfloat16 else gated).double() @ down.double().T
    # A number that falls on the other side of a bfloat16 step; the stream's own rounding.
    assert relative(whole - x, branch) < (1e-3 if dtype == torch.bfloat16 else 2e-6)
    assert torch.equal(run(1, [1, 32, 33, 334]), whole)


@every_level
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_cached_values_are_the_references(isa: str, dtype: torch.dtype) -> None:
    """The codes and scales of keys and values are those of the torch quantizer."""
    stack, prompt = Stack(fused=True, parts=QWEN, dtype=dtype), Prompt(16, 16)
    other = Stack(fused=True, parts=QWEN, dtype=torch.float32)
    for each in (stack, other):
        prompt.run(NativeDecoder(workspace(isa), each.layers), [45])
    exact = cache_of(other.layers[0])
    keys, values = (pages.flatten(0, 1)[prompt.slots] for pages in (exact.key, exact.value))
    check_stored(cache_of(stack.layers[0]), prompt.slots, keys, values)


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_keys_and_values_in_a_basis_of_their_own(isa: str, dtype: torch.dtype) -> None:
    """They are those of torch, bit for bit, and what attention gives is in the heads' own basis: of few tokens and of
    many.
    """
    stack, prompt = Stack(fused=True, parts=QWEN), Prompt(16, 16)
    generator = torch.Generator().manual_seed(8)
    basis = KvBasis(2.0 ** torch.randn(KV_HEADS, SIZE, generator=generator))
    offsets = torch.randn(1, KV_HEADS, SIZE, generator=generator) if dtype in CODES else None
    own, changed = stack.fresh(), []
    for layer in own:
        cache = evolve(empty_cache(stack.shape, dtype), basis=basis, key_offsets=offsets)
        changed.append(evolve(layer, cache=cache))
    expected = prompt.run(NativeDecoder(workspace(isa, 2), own), [45])
    got = prompt.run(NativeDecoder(workspace(isa, 2), changed), [30, 1, 14])
    cache, plain = cache_of(changed[0]), cache_of(own[0])
    keys = basis.keys(plain.key.flatten(0, 1)[prompt.slots])
    values = basis.values(plain.value.flatten(0, 1)[prompt.slots])
    if offsets is None:
        assert torch.equal(cache.key.flatten(0, 1)[prompt.slots], keys)
        assert torch.equal(cache.value.flatten(0, 1)[prompt.slots], values)
    else:
        check_stored(cache, prompt.slots, keys - offsets, values)
    errors = [relative(row, each.double()) for row, each in zip(got, expected, strict=True)]
    # Most tokens have no int8 activation on a rounding boundary. Without the change back, errors are as large as rows.
    assert sorted(errors)[len(errors) // 2] < (1e-3 if offsets is None else 0.1)


@every_level
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_keys_are_stored_without_their_offsets(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit, of chunks and decodes of several sequences: each token's position chooses its vector."""
    stack = Stack(fused=True, parts=QWEN, dtype=dtype)
    generator = torch.Generator().manual_seed(6)
    offsets = 5 * torch.randn(3, KV_HEADS, SIZE, generator=generator)
    lengths = [(3, 129), (0, 7), (1, 300), (1, 1), (2, 256)]  # new tokens, context
    positions = torch.cat([torch.arange(context - count, context) for count, context in lengths])
    slots = torch.randperm(16 * BLOCK, generator=generator)[: len(positions)]
    batch = VarlenBatch(
        torch.tensor([0, 3, 3, 4, 5, 7], dtype=torch.int32),
        torch.zeros(5, 38, dtype=torch.int32),
        torch.tensor([context for _, context in lengths], dtype=torch.int32),
    )
    hidden = torch.randn(len(positions), HIDDEN, generator=generator)
    angles = torch.randn(len(positions), 24, generator=generator)
    caches = []
    for stored_dtype, key_offsets in ((torch.float32, None), (dtype, offsets)):
        cache = evolve(empty_cache(stack.shape, stored_dtype), key_offsets=key_offsets)
        layer = evolve(stack.layers[0], cache=cache)
        NativeDecoder(workspace(isa, 2), [layer])(hidden.clone(), [(angles.cos(), angles.sin())], slots, batch)
        caches.append(cache)
    whole, stored = caches
    keys = whole.key.flatten(0, 1)[slots] - offsets[positions // 128]
    check_stored(stored, slots, keys, whole.value.flatten(0, 1)[slots])


class Tokens:
    """Holds nine tokens of nine sequences in one layer, all zeros: their queries, keys and values are its biases."""

    def __init__(self, shape: AttentionShape, bias: Tensor, angles: Tensor) -> None:
        self.shape = shape
        self._bias = bias
        self._angles = angles
        self.slots = torch.randperm(16 * BLOCK, generator=torch.Generator().manual_seed(3))[:9]
        self._generator = torch.Generator().manual_seed(4)

    def cached(
        self,
        isa: str,
        dtype: torch.dtype,
        norms: tuple[Tensor, Tensor] | None = None,
        *,
        turned: tuple[Turns, Tensor] | None = None,
    ) -> LayerCache:
        """Return what the cache holds after the tokens.

        :param turned: of what the call makes angles, and the tokens' positions; None: it is given the angles
        """
        hidden, queries = 32, self.shape.num_heads * self.shape.head_dim
        query_norm, key_norm = norms or (None, None)
        layer = DecoderLayer(
            shape=self.shape,
            cache=empty_cache(self.shape, dtype),
            qkv=(evolve(self._weight(len(self._bias), hidden), bias=self._bias),),
            output=self._weight(hidden, queries),
            gate=self._weight(32, hidden),
            up=self._weight(32, hidden),
            down=self._weight(hidden, 32),
            attention_norm=torch.ones(hidden),
            mlp_norm=torch.ones(hidden),
            query_norm=query_norm,
            key_norm=key_norm,
            norm_eps=1e-6,
        )
        batch = VarlenBatch(
            torch.arange(10).int(), (self.slots // BLOCK).int()[:, None], (self.slots % BLOCK + 1).int()
        )
        decoder = NativeDecoder(workspace(isa, 2), [layer], turns=() if turned is None else turned[:1])
        ropes = [(self._angles.cos(), self._angles.sin())] if turned is None else turned[1]
        decoder(torch.zeros(9, hidden), ropes, self.slots, batch)
        return cache_of(layer)

    def _weight(self, rows: int, cols: int) -> Projection:
        return Projection(random_weight(2, rows, cols, self._generator)[0])

    def check_untouched(self, cache: LayerCache) -> None:
        """Check that all other slots still hold NaN."""
        others = torch.ones(16 * BLOCK, dtype=torch.bool)
        others[self.slots] = False
        for pages in (cache.key, cache.value, cache.k_scale, cache.v_scale):
            of_others = None if pages is None else pages.flatten(0, 1)[others]
            if of_others is not None and of_others.dtype == torch.uint8:
                assert (of_others == of_others[0]).all()  # as the reference stores NaN
            else:
                assert of_others is None or of_others.float().isnan().all()


def values_of(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Return keys or values as they are stored, in float64."""
    if scales is None:
        return codes.double()
    if codes.dtype == torch.uint8:
        return dequantize_q4(codes, scales, torch.float64)
    return codes.double() * scales.double()[..., None]


@pytest.mark.thinned("isa", "dtype", "heads", "normed")
@every_level
@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 64, 32), (4, 4, 32, 8), (2, 1, 48, 24), (2, 2, 64, 17)], ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
def test_new_keys_and_values(isa: str, heads: tuple[int, int, int, int], dtype: torch.dtype, normed: bool) -> None:
    num_heads, num_kv_heads, size, half = heads
    generator = torch.Generator().manual_seed(size)
    bias = torch.randn(num_heads + 2 * num_kv_heads, size, generator=generator)
    angles = 3 * torch.randn(9, half, generator=generator)
    norms = (torch.randn(size, generator=generator), torch.randn(size, generator=generator)) if normed else None
    tokens = Tokens(AttentionShape(num_heads, num_kv_heads, size, scale=1.0), bias.flatten(), angles)
    cache = tokens.cached(isa, dtype, norms)

    _, keys, values = torch.split(bias.double(), [num_heads, num_kv_heads, num_kv_heads])
    if norms is not None:
        keys = F.rms_norm(keys, (size,), norms[1].double(), 1e-6)
    turned = torch.view_as_complex(torch.stack((keys[:, :half], keys[:, half : 2 * half]), -1))
    turned = turned * torch.polar(torch.ones(9, 1, half).double(), angles.double()[:, None])
    keys = torch.cat((turned.real, turned.imag, keys[:, 2 * half :].expand(9, -1, -1)), -1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float8_e4m3fn: 7e-2}[dtype]
    for codes, scales, expected in (
        (cache.key, cache.k_scale, keys),
        (cache.value, cache.v_scale, values.expand(9, -1, -1)),
    ):
        # Steps of f8e4m3 below 2**-6 are 2**-9, and all of them in units of the largest over 448.
        least = float(expected.abs().max()) / 448 * 2**-9 if scales is not None else 0.0
        got = values_of(codes, scales).flatten(0, 1)[tokens.slots]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=1e-5 + least)
    tokens.check_untouched(cache)


def check_codes(codes: Tensor, scales: Tensor, expected: Tensor) -> None:
    """Check the 4-bit codes and scales of several tokens, all of them of the same vectors: bit for bit, except that
    groups with what is not finite only have to show that.
    """
    expected_codes, expected_scales = quantize_q4(expected)
    finite = expected_scales.isfinite().all(-1)
    assert torch.equal(scales.isfinite().all(-1), finite.expand(len(scales), -1, -1))
    groups, expected_groups = (torch.unflatten(each, -1, (finite.shape[-1], -1)) for each in (codes, expected_codes))
    for token, own_scales in zip(groups, scales, strict=True):
        assert torch.equal(token[finite], expected_groups[finite])
        assert torch.equal(own_scales[finite], expected_scales[finite])


@every_level
@every_cache
def test_the_cache_holds_what_torch_would_store(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit: values of all sizes, ties, and what is not finite."""
    generator = torch.Generator().manual_seed(5)
    size = 64
    exponents = torch.arange(size) - 20.0
    vectors = torch.stack(
        [
            torch.randn(size, generator=generator),
            torch.randn(size, generator=generator) * 2.0**-exponents,
            torch.randn(size, generator=generator) * 1e-38,
            torch.randn(size, generator=generator) * 1e-42,
            torch.randn(size, generator=generator) * (1e37 if dtype == torch.uint8 else 1e38),  # a range is a number
            torch.cat((torch.arange(448, 448 - size + 8, -1), 2.0 ** -torch.arange(2, 10))),  # in f8e4m3, many ties
            1 + torch.arange(size) * 2.0**-9,  # in bfloat16, every other one
            torch.zeros(size),
        ]
    ).repeat(4, 1)
    for row, bad in ((8, torch.nan), (17, torch.inf), (26, -torch.inf)):
        vectors[row, 40] = bad
    shape = AttentionShape(32, 32, size, scale=1.0)
    # Elements 0 and 1 are turned by nothing, the others not at all.
    tokens = Tokens(shape, torch.cat((vectors, vectors, vectors.flip(0))).flatten(), torch.zeros(9, 1))
    cache = tokens.cached(isa, dtype)
    for codes, scales, expected in ((cache.key, cache.k_scale, vectors), (cache.value, cache.v_scale, vectors.flip(0))):
        got = codes.flatten(0, 1)[tokens.slots]
        if dtype == torch.uint8:
            assert scales is not None
            check_codes(got, scales.flatten(0, 1)[tokens.slots], expected)
            continue
        expected_codes = expected.to(dtype)
        if scales is not None:
            expected_codes, expected_scales = quantize_f8e4m3(expected)
            torch.testing.assert_close(
                scales.flatten(0, 1)[tokens.slots], expected_scales.expand(9, -1), rtol=0, atol=0, equal_nan=True
            )
        torch.testing.assert_close(
            got.double(), expected_codes.double().expand(9, -1, -1), rtol=0, atol=0, equal_nan=True
        )
    tokens.check_untouched(cache)


@every_level
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_call_begins_with_embeddings_and_makes_angles(isa: str, num_threads: int) -> None:
    """Bit for bit as if it had been given both, and factors of queries; in chunks too, whose positions do not begin at
    0.
    """
    stack, prompt = latest_stack(fused=False, parts=LLAMA), Prompt(SIZE // 2, 24)
    space, generator = workspace(isa, num_threads), torch.Generator().manual_seed(5)
    table, _ = random_weight(14, 50, HIDDEN, generator)
    token_ids = torch.randint(50, (prompt.count,), generator=generator)
    turns = [
        Turns(torch.rand(32, generator=generator), query_scale_beta=0.3, query_scale_length=7),
        Turns(torch.rand(24, generator=generator), 1.25),
    ]
    positions = torch.arange(1000, 1000 + prompt.count)
    angles = [positions[:, None].float() * each.frequencies for each in turns]
    prompt.ropes = [
        (angle.double().cos().float() * each.factor, angle.double().sin().float() * each.factor)
        for angle, each in zip(angles, turns, strict=True)
    ]
    prompt.ropes[0] += (1 + 0.3 * (positions // 7).double().log1p().float(),)
    prompt.hidden = decode_rows(space.library, table, token_ids) * torch.tensor(0.3) * torch.tensor(1 / 7)
    embedding = EmbeddingTable(table, scale=0.3, stream_scale=1 / 7)
    given = prompt.run(NativeDecoder(space, stack.fresh()), [prompt.count])
    for chunks in ([prompt.count], [2, 30, 1, 12]):
        decoder, parts, done = NativeDecoder(space, stack.fresh(), turns=turns, embedding=embedding), [], 0
        for chunk in chunks:
            rows = slice(done, done + chunk)
            done += chunk
            hidden = torch.full((chunk, HIDDEN), torch.nan)
            own = token_ids[rows], positions[rows]
            parts.append(decoder(hidden, own[1], prompt.slots[rows], prompt.batch(chunk, done), token_ids=own[0]))
        assert torch.equal(torch.cat(parts), given)


@every_level
def test_made_angles_are_exact(isa: str) -> None:
    """Keys in the cache are (1, 0) turned by the angles: cosines and sines of angles up to a million radians are within
    a rounding of those in float64, and nearly all are rounded correctly.
    """
    size = 256
    head = torch.cat((torch.ones(size // 2), torch.zeros(size // 2)))
    tokens = Tokens(AttentionShape(1, 1, size, scale=1.0), head.repeat(3), torch.zeros(9, 1))
    frequencies = torch.cat((torch.zeros(1), 10 ** torch.linspace(-5, 1, size // 2 - 1)))
    positions = (torch.rand(9, generator=torch.Generator().manual_seed(0)) * 100_000).long()
    cache = tokens.cached(isa, torch.float32, turned=(Turns(frequencies), positions))
    keys = cache.key.flatten(0, 1)[tokens.slots][:, 0]
    angles = (positions[:, None].float() * frequencies).double()
    for got, exact in ((keys[:, : size // 2], angles.cos()), (keys[:, size // 2 :], angles.sin())):
        assert float((got.double() - exact).abs().max()) <= 2**-25 + 1e-9
        assert int((got != exact.float()).sum()) <= 1


def test_tokens_without_embeddings_are_refused() -> None:
    stack, prompt = Stack(fused=False, parts=LLAMA), Prompt(32, 32)
    table, _ = random_weight(14, 50, HIDDEN, torch.Generator().manual_seed(5))
    turns, down = [Turns(torch.rand(32)), Turns(torch.rand(32))], stack.layers[0].down
    assert down is not None
    of_no_length = Turns(torch.rand(32), query_scale_beta=0.1, query_scale_length=0)
    decoder = NativeDecoder(workspace(), stack.layers, turns=turns, embedding=EmbeddingTable(table))
    batch, positions = prompt.batch(prompt.count, prompt.count), torch.arange(prompt.count)
    for token in (-1, 50, 2**40):
        token_ids = torch.zeros(prompt.count, dtype=torch.int64)
        token_ids[-1] = token
        with pytest.raises(IndexError, match=r"not all below 50"):
            decoder(prompt.hidden, positions, prompt.slots, batch, token_ids=token_ids)
    without = NativeDecoder(workspace(), stack.layers)
    calls: list[Callable[[], object]] = [
        lambda: without(prompt.hidden, prompt.ropes, prompt.slots, batch, token_ids=token_ids),
        lambda: without(prompt.hidden, positions, prompt.slots, batch),
        lambda: decoder(prompt.hidden, positions.int(), prompt.slots, batch),
        lambda: decoder(prompt.hidden, positions[1:], prompt.slots, batch),
        lambda: decoder(prompt.hidden, positions, prompt.slots, batch, token_ids=token_ids.int()),
        lambda: NativeDecoder(workspace(), stack.layers, turns=turns[1:]),
        lambda: NativeDecoder(workspace(), stack.layers, turns=[*turns[1:], of_no_length]),
        lambda: NativeDecoder(workspace(), stack.layers, turns=[*turns[1:], Turns(torch.rand(33))]),
        lambda: NativeDecoder(workspace(), stack.layers, turns=[*turns[1:], Turns(torch.rand(32).double())]),
        lambda: NativeDecoder(workspace(), stack.layers, embedding=EmbeddingTable(down.weight)),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()


def test_what_does_not_fit_is_refused() -> None:
    stack, prompt = Stack(fused=False, parts=LLAMA), Prompt(32, 32)
    layer = stack.layers[0]
    query, *key_and_value = layer.qkv
    assert layer.gate is not None
    assert layer.output is not None
    hadamard_gate, hadamard_query = (Projection(each.weight.hadamard_form()) for each in (layer.gate, query))
    for change in (
        {"output": layer.gate},
        {"qkv": layer.qkv[:2]},
        {"gate": hadamard_gate},
        {"qkv": (hadamard_query, *key_and_value)},
        {"mlp_output_norm": layer.mlp_norm},
        {"gates": "apart"},
    ):
        with pytest.raises(ConfigError):
            evolve(layer, **change)
    gemma = Stack(fused=False, parts=GEMMA).layers[0]
    for layers in (
        [layer, gemma],
        [evolve(layer, output=evolve(layer.output, bias=torch.zeros(HIDDEN - 1)))],
        [evolve(gemma, attention_output_norm=torch.zeros(HIDDEN + 1))],
    ):
        with pytest.raises(ConfigError):
            NativeDecoder(workspace(), layers)
    for interleaved in ([True], [True] * (len(prompt.ropes) + 1)):
        with pytest.raises(ConfigError, match=rf"0 or {len(prompt.ropes)}"):
            NativeDecoder(workspace(), stack.layers, interleaved=interleaved)
    decoder = NativeDecoder(workspace(), stack.layers)
    batch = VarlenBatch(
        torch.tensor([0, 45], dtype=torch.int32), prompt.table[None], torch.tensor([45], dtype=torch.int32)
    )
    hidden, slots = prompt.hidden, prompt.slots
    first, (cosines, sines) = prompt.ropes
    calls: list[Callable[[], Tensor]] = [
        lambda: decoder(hidden[:, :128], prompt.ropes, slots, batch),
        lambda: decoder(hidden, [first], slots, batch),
        lambda: decoder(hidden, [first, (cosines.double(), sines)], slots, batch),
        lambda: decoder(hidden, [first, (cosines.repeat(1, 2), sines.repeat(1, 2))], slots, batch),
        lambda: decoder(hidden, [first, (cosines, sines[1:])], slots, batch),
        lambda: decoder(hidden, [first, (cosines, sines, torch.ones(44))], slots, batch),
        lambda: decoder(hidden, [first, (cosines, sines, torch.ones(45).double())], slots, batch),
        lambda: decoder(hidden, prompt.ropes, slots.int(), batch),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()
