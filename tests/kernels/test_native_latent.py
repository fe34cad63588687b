"""Native decoder layers with latent attention against the same arithmetic in float64, one operation after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from native_weights import every_level, library, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.fp8 import quantize_f8e4m3
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.kernels.native.decoder_layer import DecoderLayer
from paged_sdk.kernels.native.latent_attention import LatentAttention, PackedLatentHeads
from paged_sdk.kernels.native.packed import PackedWeight, pack_dense
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, cumulated
from paged_sdk.kernels.native.projection import Projection

pytestmark = needs_library

HIDDEN, INNER, HEADS, BLOCK, LAYERS = 64, 96, 5, 8, 2
FP8 = torch.float8_e4m3fn
# Tokens of each sequence in a step: a prompt; a chunk beside a decode and another prompt; a chunk beside two decodes,
# one of several tokens; decodes. Marked are chunks of prompts, of which the last is too short to be decompressed.
STEPS: Sequence[dict[int, int]] = ({0: 90}, {1: 64, 0: 1, 2: 40}, {0: 1, 1: 100, 2: 3}, {2: 1, 1: 1, 0: 1}, {3: 31})
PROMPTS = (90, 164, 40, 31)
LENGTHS = (93, 165, 44, 31)


@frozen(kw_only=True)
class Sizes:
    """Holds the sizes of latent attention, whether neighbouring elements are rotated together, and how much queries
    grow with each position.
    """

    rank: int = 48
    rope: int = 16
    nope: int = 32
    value: int = 80
    query_rank: int | None = None
    interleaved: bool = False
    growth: float = 0.0

    @property
    def query(self) -> int:
        return self.nope + self.rope


WIDE_VALUES = Sizes()
NARROW_VALUES = Sizes(rank=64, value=16, query_rank=32, interleaved=True)
every_size = pytest.mark.parametrize("sizes", [WIDE_VALUES, NARROW_VALUES], ids=["wide values", "narrow values"])


class LatentStack:
    """Holds random layers of dense float32 matrices, and computes a text with them in float64."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(4)
        self.sizes, self.dtype = sizes, dtype
        self.shape = AttentionShape(HEADS, 1, sizes.rope + sizes.rank, scale=sizes.query**-0.5)

        def matrix(rows: int, cols: int) -> Tensor:
            return torch.randn(rows, cols, generator=generator) * (1.5 / math.sqrt(cols))

        def vector(size: int) -> Tensor:
            return 1 + 0.2 * torch.randn(size, generator=generator)

        queries, inputs = HEADS * sizes.query, sizes.query_rank or HIDDEN
        self.weights = [
            {
                "query": matrix(queries if sizes.query_rank is None else inputs, HIDDEN),
                "query_up": matrix(queries, inputs),
                "down": matrix(sizes.rank + sizes.rope, HIDDEN),
                "key_up": matrix(HEADS * sizes.nope, sizes.rank),
                "values": matrix(HEADS * sizes.value, sizes.rank),
                "output": matrix(HIDDEN, HEADS * sizes.value),
                "gate": matrix(INNER, HIDDEN),
                "up": matrix(INNER, HIDDEN),
                "mlp_down": matrix(HIDDEN, INNER),
                "attention_norm": vector(HIDDEN),
                "mlp_norm": vector(HIDDEN),
                "query_norm": vector(inputs),
                "norm": vector(sizes.rank),
                "bias": torch.randn(sizes.rank + sizes.rope, generator=generator),
            }
            for _ in range(LAYERS)
        ]
        self.frequencies = torch.rand(sizes.rope // 2, generator=generator)

    def rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        angles = positions[:, None] * self.frequencies
        scales = (1 + self.sizes.growth * positions,) if self.sizes.growth else ()
        return angles.cos(), angles.sin(), *scales

    def turned(self, rotated: Tensor) -> Tensor:
        """Turn the elements of a whole text that are rotated, ``[tokens, .., rope]``."""
        cosines, sines, *_ = (each.double()[:, None] for each in self.rope(torch.arange(len(rotated))))
        if self.sizes.interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
        else:
            a, b = rotated.chunk(2, -1)
        turned: Tensor = torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)
        return turned

    def stored(self, keys: Tensor) -> Tensor:
        """Return keys as a cache stores them."""
        if self.dtype != FP8:
            return keys.to(self.dtype).double()
        codes, scales = quantize_f8e4m3(keys.float())
        return codes.double() * scales.double()[..., None]

    def expected(self, hidden: Tensor) -> Tensor:
        """Compute one whole text, in float64."""
        x, sizes = hidden.double(), self.sizes
        count = len(x)
        unseen = torch.ones(count, count).triu(1).bool()
        for each in self.weights:
            w = {name: tensor.double() for name, tensor in each.items()}

            def norm(rows: Tensor, weight: Tensor) -> Tensor:
                return F.rms_norm(rows, weight.shape, weight, 1e-6)

            normed = norm(x, w["attention_norm"])
            queries = normed @ w["query"].T
            if sizes.query_rank is not None:
                queries = norm(queries, w["query_norm"]) @ w["query_up"].T
            queries = queries * (1 + sizes.growth * torch.arange(count))[:, None]
            unrotated, rotated = torch.split(queries.view(count, HEADS, -1), [sizes.nope, sizes.rope], -1)
            latent, shared = torch.split(normed @ w["down"].T + w["bias"], [sizes.rank, sizes.rope], -1)
            kept = self.stored(torch.cat((self.turned(shared[:, None])[:, 0], norm(latent, w["norm"])), -1))
            of_heads = (w[name].view(HEADS, -1, sizes.rank) for name in ("key_up", "values"))
            keys, values = (torch.einsum("sr,hdr->shd", kept[:, sizes.rope :], up) for up in of_heads)
            scores = torch.einsum("thd,shd->hts", unrotated, keys)
            scores += torch.einsum("thd,sd->hts", self.turned(rotated), kept[:, : sizes.rope])
            weights = (scores * self.shape.scale).masked_fill(unseen, -torch.inf).softmax(-1)
            x = x + torch.einsum("hts,shd->thd", weights, values).flatten(1) @ w["output"].T
            normed = norm(x, w["mlp_norm"])
            x = x + (F.silu(normed @ w["gate"].T) * (normed @ w["up"].T)) @ w["mlp_down"].T
        return x

    def layers(self, isa: str, num_blocks: int = 96, **latent: Any) -> list[DecoderLayer]:
        """Return the layers with caches of NaN.

        :param latent: what differs in :class:`LatentAttention`
        """
        return [self._layer(isa, each, num_blocks, latent) for each in self.weights]

    def _layer(self, isa: str, w: dict[str, Tensor], num_blocks: int, latent: dict[str, Any]) -> DecoderLayer:
        def packed(name: str, bias: Tensor | None = None) -> Projection:
            return Projection(_packed(isa, w[name]), bias)

        absorbing = torch.unflatten(w["key_up"], 0, (HEADS, -1)).mT.flatten(0, 1)
        has_up = self.sizes.query_rank is not None
        own = LatentAttention(
            down=packed("down", w["bias"]),
            query_up=packed("query_up") if has_up else None,
            query_norm=w["query_norm"] if has_up else None,
            heads=PackedLatentHeads(
                absorbing=_packed(isa, absorbing),
                values=packed("values").weight,
                key_up=packed("key_up").weight,
                value_up=packed("values").weight,
            ),
            norm=w["norm"],
            norm_eps=1e-6,
            rope_dim=self.sizes.rope,
            dtype=torch.float32,
        )
        return DecoderLayer(
            shape=self.shape,
            cache=self._cache(num_blocks),
            qkv=(packed("query"),),
            latent=evolve(own, **latent),
            output=packed("output"),
            gate=packed("gate"),
            up=packed("up"),
            down=packed("mlp_down"),
            attention_norm=w["attention_norm"],
            mlp_norm=w["mlp_norm"],
            norm_eps=1e-6,
        )

    def _cache(self, num_blocks: int) -> LayerCache:
        key = torch.full((num_blocks, BLOCK, 1, self.shape.head_dim), torch.nan)
        if self.dtype == FP8:
            codes, scales = quantize_f8e4m3(key)
            return LayerCache(codes, codes, scales, scales, key_only=self.sizes.rope)
        key = key.to(self.dtype)
        return LayerCache(key, key, key_only=self.sizes.rope)


def _packed(isa: str, weight: Tensor) -> PackedWeight:
    rows, cols = weight.shape
    return pack_dense(library(isa), [weight.contiguous()], (rows, cols), torch.float32)


def texts(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    return [torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(length)) for length in lengths]


def run(
    stack: LatentStack,
    decoder: NativeDecoder,
    own: Sequence[Tensor],
    steps: Sequence[dict[int, int]] = STEPS,
    *,
    decompress: bool = True,
    read: int | None = None,
) -> list[Tensor]:
    """Run texts step by step, each in blocks of its own in random order.

    :param read: rows of each sequence in a step that are read; None: all
    :returns: the rows that are read of each text
    """
    blocks = -(-max(map(len, own)) // BLOCK)
    order = torch.randperm(blocks * len(own), generator=torch.Generator().manual_seed(9)).view(len(own), blocks).int()
    computed, parts = [0] * len(own), [[] for _ in own]  # type: tuple[list[int], list[list[Tensor]]]
    for step in steps:
        places = [(i, torch.arange(computed[i], computed[i] + count)) for i, count in step.items()]
        counts, ends = list(step.values()), [int(positions[-1]) + 1 for _, positions in places]
        marks = torch.tensor([end <= PROMPTS[i] for (i, _), end in zip(places, ends, strict=True)]).byte()
        batch = VarlenBatch(
            cumulated(torch.tensor(counts)),
            order[list(step)].contiguous(),
            torch.tensor(ends, dtype=torch.int32),
            in_chunks=marks,
            decompressed=marks if decompress else None,
        )
        hidden = torch.cat([own[i][positions] for i, positions in places])
        slots = torch.cat([order[i].long()[positions // BLOCK] * BLOCK + positions % BLOCK for i, positions in places])
        ropes = [stack.rope(torch.cat([positions for _, positions in places]))]
        of_read = None if read is None else cumulated(torch.tensor([min(read, count) for count in counts]))
        out = decoder(hidden, ropes, slots, batch, of_read)
        for (i, positions), part in zip(places, torch.split(out, counts), strict=True):
            parts[i].append(part[-min(read or len(part), len(part)) :])
            computed[i] = int(positions[-1]) + 1
    return [torch.cat(each) for each in parts]


def decoder_of(stack: LatentStack, isa: str, num_threads: int = 2, **latent: Any) -> NativeDecoder:
    layers = stack.layers(isa, **latent)
    return NativeDecoder(workspace(isa, num_threads), layers, interleaved=[stack.sizes.interleaved])


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.thinned("isa", "sizes", "dtype")
@every_level
@every_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8], ids=str)
def test_mixed_steps(isa: str, sizes: Sizes, dtype: torch.dtype) -> None:
    """Over latent vectors and over keys that are made of them, some heads at a time, of a prompt of several blocks."""
    stack, own = LatentStack(sizes, dtype), texts()
    expected = [stack.expected(text) for text in own]
    bytes_per_head = 2 * max(sizes.query, sizes.value) * 4 * LENGTHS[1]
    # Values on a rounding boundary of the cache fall either way.
    limit = {torch.float32: 1e-5, FP8: 2e-2}.get(dtype, 2e-3)
    for most_bytes in (1 << 26, 2 * bytes_per_head, 1):
        got = run(stack, decoder_of(stack, isa, most_bytes=most_bytes), own)
        assert max(map(relative, got, expected)) < limit


@every_level
@every_size
def test_queries_that_grow_with_their_position(isa: str, sizes: Sizes) -> None:
    """Also of rows that are read alone."""
    own = texts()
    plain, stack = LatentStack(sizes), LatentStack(evolve(sizes, growth=0.02))
    expected = [stack.expected(text) for text in own]
    assert relative(plain.expected(own[0]), expected[0]) > 1e-2
    got = run(stack, decoder_of(stack, isa), own)
    assert max(map(relative, got, expected)) < 1e-5
    read = run(stack, decoder_of(stack, isa), own, read=1)
    assert relative(read[3], expected[3][-1:]) < 1e-5


@every_level
def test_a_context_of_several_parts(isa: str) -> None:
    """Keys are made of 1,024 latent vectors at a time."""
    stack, own = LatentStack(NARROW_VALUES), texts([1100])
    step: dict[int, int] = {0: 1100}
    order = torch.arange(138).int()[None]
    batch = VarlenBatch(
        torch.tensor([0, 1100]).int(), order, torch.tensor([1100]).int(), torch.tensor([1]).byte(), None,
        torch.tensor([1]).byte(),
    )  # fmt: skip
    decoder = NativeDecoder(workspace(isa, 2), stack.layers(isa, 138), interleaved=[True])
    got = decoder(own[0].clone(), [stack.rope(torch.arange(step[0]))], torch.arange(step[0]), batch)
    assert relative(got, stack.expected(own[0])) < 1e-5


@pytest.mark.thinned("isa", "sizes", "precision")
@every_level
@every_size
@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.INT8], ids=lambda each: each.name)
def test_rounded_products(isa: str, sizes: Sizes, precision: Precision) -> None:
    stack, own = LatentStack(sizes, torch.bfloat16), texts()
    stack.shape = evolve(stack.shape, precision=precision)
    expected = [stack.expected(text) for text in own]
    got = run(stack, decoder_of(stack, isa, dtype=torch.bfloat16), own)
    # Where prompts' products are of 8-bit codes, these are off by more than bfloat16.
    is_coded = precision is Precision.INT8 and isa in ("avx512_vnni", "avx512_bf16")
    assert max(map(relative, got, expected)) < (4e-2 if is_coded else 1e-2)


@pytest.mark.thinned("isa", "sizes")
@every_level
@every_size
def test_what_is_not_decompressed_depends_on_no_step_or_thread(isa: str, sizes: Sizes) -> None:
    """Bit for bit; decompressed prompts are the same on any number of threads."""
    stack, own = LatentStack(sizes, torch.bfloat16), texts()
    whole = run(stack, decoder_of(stack, isa, 1), own, decompress=False)
    apart = [{0: 50}, {1: 164}, {0: 40, 2: 40}, {0: 1}, {0: 2}, {1: 1, 2: 1}, {2: 3}, {3: 31}]
    for num_threads, steps in ((3, STEPS), (1, apart), (2, apart)):
        got = run(stack, decoder_of(stack, isa, num_threads), own, steps, decompress=False)
        assert all(map(torch.equal, got, whole))
    once, again = (run(stack, decoder_of(stack, isa, num_threads), own) for num_threads in (1, 3))
    assert all(map(torch.equal, once, again))
    assert not torch.equal(once[0][:90], whole[0][:90])


@pytest.mark.thinned("isa", "sizes")
@every_level
@every_size
def test_rows_that_are_read(isa: str, sizes: Sizes) -> None:
    """In the last layer, a prompt's few rows that are read attend over latent vectors."""
    stack, own = LatentStack(sizes), texts()
    expected = [stack.expected(text) for text in own]
    ends = [[90, 91, 92, 93], [64, 164, 165], [40, 43, 44], [31]]
    for read, decompress in ((1, True), (2, False), (60, True)):
        got = run(stack, decoder_of(stack, isa), own, read=read, decompress=decompress)
        for each, text, of_text in zip(got, expected, ends, strict=True):
            rows = [range(max(first, end - read), end) for first, end in zip([0, *of_text], of_text, strict=False)]
            assert relative(each, text[[row for part in rows for row in part]]) < 1e-5
        if not decompress:
            whole = run(stack, decoder_of(stack, isa), own, decompress=False)
            assert torch.equal(got[1][-1], whole[1][-1])


def test_what_does_not_fit_is_refused() -> None:
    (layer, _), sizes = LatentStack(NARROW_VALUES).layers("portable"), NARROW_VALUES
    latent = layer.latent
    assert latent is not None
    for changed, said in (
        ({"query_norm": None}, "query_norm"),
        ({"rope_dim": 24}, "multiples of 16"),
        ({"rope_dim": 32}, "one key of 96 elements"),
        ({"dtype": FP8}, "float32, bfloat16 or float16"),
        ({"query_up": layer.output}, "shapes of latent attention"),
        ({"heads": evolve(latent.heads, values=latent.heads.absorbing)}, "shapes of latent attention"),
    ):
        with pytest.raises(ConfigError, match=said):
            evolve(layer, latent=evolve(latent, **changed))
    for others, said in (
        ({"qkv": (layer.qkv[0],) * 3}, "one weight, with latent attention"),
        ({"gates": "apart", "clip": 1.0}, "None, with gates and clip"),
        ({"shape": evolve(LatentStack(NARROW_VALUES).shape, window=4)}, "no window"),
    ):
        with pytest.raises(ConfigError, match=said):
            evolve(layer, **others)
    decoder = NativeDecoder(workspace("portable"), [layer])
    wide = torch.zeros(1, sizes.rope // 2 + 1)
    batch = VarlenBatch(torch.tensor([0, 1]).int(), torch.zeros(1, 1).int(), torch.tensor([1]).int())
    with pytest.raises(ConfigError, match="at most 8 columns"):
        decoder(torch.zeros(1, HIDDEN), [(wide, wide)], torch.zeros(1).long(), batch)
    for marks in (torch.zeros(2).byte(), torch.zeros(1)):
        with pytest.raises(ConfigError, match="decompressed"):
            evolve(batch, decompressed=marks)
