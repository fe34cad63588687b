"""Native decoder layers against the same arithmetic in float64, one operation after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from native_weights import every_level, needs_library, quantise_activations, random_weight, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.fp8 import quantise_f8e4m3
from paged_sdk.kernels.native.decoder import DecoderLayer, NativeDecoder
from paged_sdk.kernels.native.paged_attention import AttentionShape, LayerCache, VarlenBatch

pytestmark = needs_library

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, BLOCK = 256, 512, 4, 2, 64, 8
WIDTHS = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)


class Stack:
    """Two random layers, and their weights in float64."""

    def __init__(self, *, fused: bool, extras: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = AttentionShape(HEADS, KV_HEADS, SIZE, scale=SIZE**-0.5, window=20 if extras else None)
        self.dtype = dtype
        self.layers: list[DecoderLayer] = []
        self.weights: list[dict[str, Tensor]] = []
        for _ in range(2):
            rows = (sum(WIDTHS),) if fused else WIDTHS
            qkv = [random_weight(12, n, HIDDEN, generator) for n in rows]
            output, output_weight = random_weight(3, HIDDEN, HEADS * SIZE, generator)
            gate, gate_weight = random_weight(12, INNER, HIDDEN, generator)
            up, up_weight = random_weight(12, INNER, HIDDEN, generator)
            down, down_weight = random_weight(14, HIDDEN, INNER, generator)
            norms = {
                name: 0.2 * (1 + 0.1 * torch.randn(size, generator=generator))
                for name, size in (
                    ("attention_norm", HIDDEN),
                    ("mlp_norm", HIDDEN),
                    ("query_norm", SIZE),
                    ("key_norm", SIZE),
                )
            }
            biases = tuple(torch.randn(n, generator=generator) if extras else None for n in rows)
            self.weights.append(
                {"output": output_weight, "gate": gate_weight, "up": up_weight, "down": down_weight}
                | {"qkv": torch.cat([weight for _, weight in qkv])}
                | {name: norm.double() for name, norm in norms.items()}
                | {"bias": torch.cat([torch.zeros(n) if b is None else b for n, b in zip(rows, biases, strict=True)])}
            )
            self.layers.append(
                DecoderLayer(
                    shape=self.shape,
                    cache=self._cache(),
                    qkv=tuple(packed for packed, _ in qkv),
                    qkv_biases=biases,
                    norm_eps=1e-6,
                    activation="gelu_tanh" if extras else "silu",
                    output=output,
                    gate=gate,
                    up=up,
                    down=down,
                    attention_norm=norms["attention_norm"],
                    mlp_norm=norms["mlp_norm"],
                    query_norm=norms["query_norm"] if extras else None,
                    key_norm=norms["key_norm"] if extras else None,
                )
            )
        self.extras = extras

    def _cache(self) -> LayerCache:
        size = (16, BLOCK, KV_HEADS, SIZE)
        quantised = self.dtype == torch.float8_e4m3fn
        scales = [torch.full(size[:3], torch.nan) if quantised else None for _ in range(2)]
        key, value = (torch.full(size, torch.nan).to(self.dtype) for _ in range(2))
        return LayerCache(key, value, *scales)

    def fresh(self) -> list[DecoderLayer]:
        """The same layers with empty caches."""
        return [evolve(layer, cache=self._cache()) for layer in self.layers]

    def stored(self, vectors: Tensor) -> Tensor:
        """What a cache makes of vectors."""
        if self.dtype == torch.float8_e4m3fn:
            codes, scale = quantise_f8e4m3(vectors)
            return codes.double() * scale.double()[..., None]
        return vectors.to(self.dtype).double()

    def expected(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """One whole sequence, in float64."""
        x, count = hidden.double(), len(hidden)
        half = cosines.shape[1]
        distance = torch.arange(count)[:, None] - torch.arange(count)
        hidden_keys = distance < 0
        if self.shape.window is not None:
            hidden_keys |= distance >= self.shape.window

        def rotate(heads: Tensor) -> Tensor:
            a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
            c, s = cosines.double()[:, None], sines.double()[:, None]
            return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)

        for w in self.weights:
            normed = F.rms_norm(x, (HIDDEN,), w["attention_norm"], 1e-6)
            projected = quantise_activations(normed) @ w["qkv"].T + w["bias"]
            q, k, v = (part.reshape(count, -1, SIZE) for part in torch.split(projected, list(WIDTHS), dim=1))
            if self.extras:
                q, k = (F.rms_norm(t, (SIZE,), w[name], 1e-6) for t, name in ((q, "query_norm"), (k, "key_norm")))
            q, k = rotate(q), self.stored(rotate(k).float())
            v = self.stored(v.float())
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            scores = torch.einsum("thd,shd->hts", q, k) * self.shape.scale
            attended = torch.einsum("hts,shd->thd", scores.masked_fill(hidden_keys, -torch.inf).softmax(-1), v)
            x = x + quantise_activations(attended.flatten(1)) @ w["output"].T
            normed = quantise_activations(F.rms_norm(x, (HIDDEN,), w["mlp_norm"], 1e-6))
            gated = normed @ w["gate"].T
            gated = F.gelu(gated, approximate="tanh") if self.extras else F.silu(gated)
            x = x + quantise_activations(gated * (normed @ w["up"].T)) @ w["down"].T
        return x


class Prompt:
    """One sequence of 45 tokens in shuffled blocks."""

    def __init__(self, half: int, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.count = 45
        self.hidden = torch.randn(self.count, HIDDEN, generator=generator)
        angles = torch.arange(self.count)[:, None] * torch.rand(half, generator=generator)
        self.cosines, self.sines = angles.cos(), angles.sin()
        self.table = torch.randperm(16, generator=generator)[:6].int()
        positions = torch.arange(self.count)
        self.slots = self.table.long()[positions // BLOCK] * BLOCK + positions % BLOCK

    def run(self, decoder: NativeDecoder, chunks: list[int]) -> Tensor:
        parts, done = [], 0
        for chunk in chunks:
            rows = slice(done, done + chunk)
            done += chunk
            batch = VarlenBatch(
                torch.tensor([0, chunk], dtype=torch.int32), self.table[None], torch.tensor([done], dtype=torch.int32)
            )
            rotation = (self.cosines[rows], self.sines[rows])
            parts.append(decoder(self.hidden[rows].clone(), *rotation, self.slots[rows], batch))
        return torch.cat(parts)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "extras"])
def test_layers(isa: str, dtype: torch.dtype, fused: bool, extras: bool) -> None:
    """Extras: biases, norms of heads, a sliding window, GELU, partial rotation."""
    stack, prompt = Stack(fused=fused, extras=extras, dtype=dtype), Prompt(16 if extras else SIZE // 2)
    expected = stack.expected(prompt.hidden, prompt.cosines, prompt.sines)
    got = prompt.run(NativeDecoder(workspace(isa, 2), stack.layers), [prompt.count])
    # Values on a rounding boundary fall either way: of int8 activations, and of the cache, whose f8e4m3 steps are 6 %.
    assert relative(got, expected) < (2e-2 if dtype == torch.float8_e4m3fn else 4e-3)


@every_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_token_depends_on_no_chunk_or_thread(isa: str, dtype: torch.dtype) -> None:
    stack, prompt = Stack(fused=False, extras=True, dtype=dtype), Prompt(16)
    whole = prompt.run(NativeDecoder(workspace(isa, 1), stack.fresh()), [45])
    for num_threads, chunks in ((2, [45]), (1, [1] * 45), (1, [2, 30, 1, 12]), (2, [16, 9, 20])):
        assert torch.equal(prompt.run(NativeDecoder(workspace(isa, num_threads), stack.fresh()), chunks), whole)


@every_level
def test_cached_values_are_the_references(isa: str) -> None:
    """The f8e4m3 codes and scales of a value head are those of the torch quantiser."""
    stack, prompt = Stack(fused=True, extras=True, dtype=torch.float8_e4m3fn), Prompt(16)
    other = Stack(fused=True, extras=True, dtype=torch.float32)
    for each in (stack, other):
        prompt.run(NativeDecoder(workspace(isa), each.layers), [45])
    exact = other.layers[0].cache
    cache = stack.layers[0].cache
    assert cache.k_scale is not None
    assert cache.v_scale is not None
    for codes, scales, vectors in ((cache.key, cache.k_scale, exact.key), (cache.value, cache.v_scale, exact.value)):
        expected_codes, expected_scales = quantise_f8e4m3(vectors.flatten(0, 1)[prompt.slots])
        assert torch.equal(scales.flatten(0, 1)[prompt.slots], expected_scales)
        got = codes.view(torch.uint8).flatten(0, 1)[prompt.slots]
        assert torch.equal(got, expected_codes.view(torch.uint8))


def test_what_does_not_fit_is_refused() -> None:
    stack, prompt = Stack(fused=False, extras=False), Prompt(32)
    layer = stack.layers[0]
    for change in ({"output": layer.gate}, {"qkv": layer.qkv[:2]}, {"qkv_biases": (None,)}):
        with pytest.raises(ConfigError):
            evolve(layer, **change)
    decoder = NativeDecoder(workspace(), stack.layers)
    batch = VarlenBatch(
        torch.tensor([0, 45], dtype=torch.int32), prompt.table[None], torch.tensor([45], dtype=torch.int32)
    )
    hidden, cosines, sines, slots = prompt.hidden, prompt.cosines, prompt.sines, prompt.slots
    calls: list[Callable[[], Tensor]] = [
        lambda: decoder(hidden[:, :128], cosines, sines, slots, batch),
        lambda: decoder(hidden, cosines.double(), sines, slots, batch),
        lambda: decoder(hidden, cosines, sines[1:], slots, batch),
        lambda: decoder(hidden, cosines, sines, slots.int(), batch),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()
