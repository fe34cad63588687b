"""Adapters in native decoder layers, against the same arithmetic in float64."""

from __future__ import annotations

import functools

import pytest
import torch
from attrs import evolve
from test_native_decoder import HIDDEN, INNER, MATRICES, QWEN, SIZE, WIDTHS, Parts, Prompt, Stack, relative
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.lora import LoraPart, LoraWeights
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.kernels.native.lora import NativeAdapters, NativeLora
from paged_sdk.kernels.native.paged_attention import VarlenBatch, cumulated

pytestmark = needs_library

LENGTHS = (20, 3, 9, 8, 5)
ADAPTERS = (0, -1, 1, 2, 1)
GEMMA = Parts(head_norms=True, output_norms=True, gelu=True)
# The matrices of a projection's product, by their rows within it, and the number of the first of them.
PRODUCTS = {
    "qkv": (0, [slice(0, WIDTHS[0]), slice(WIDTHS[0], sum(WIDTHS[:2])), slice(sum(WIDTHS[:2]), sum(WIDTHS))]),
    "output": (4, [slice(0, HIDDEN)]),
    "gate_up": (5, [slice(0, INNER), slice(INNER, 2 * INNER)]),
    "down": (7, [slice(0, HIDDEN)]),
}
COLS = {"qkv": HIDDEN, "output": WIDTHS[0], "gate_up": HIDDEN, "down": INNER}


class RandomAdapter:
    """Holds a random adapter of two layers, and what it adds to their weights.

    :param rank: of its first matrix; those after it have one more each
    :param skipped: the products that it leaves alone
    :param scales: whether it scales what the base gives, too
    """

    def __init__(
        self, *, rank: int, dtype: torch.dtype, seed: int, skipped: tuple[str, ...] = (), scales: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers: list[dict[int, LoraWeights]] = []
        self.added: list[dict[str, Tensor]] = []
        for _ in range(2):
            weights, added = {}, {}
            for name, (number, rows) in PRODUCTS.items():
                if name in skipped:
                    continue
                downs, parts, first = [], [], 0
                gains = torch.stack([torch.ones(rows[-1].stop), torch.zeros(rows[-1].stop)])
                if scales:
                    gains += torch.randn(gains.shape, generator=generator) / 4
                whole = torch.zeros(rows[-1].stop, COLS[name], dtype=torch.float64)
                for place, each in enumerate(rows):
                    own = rank + place
                    down = (torch.randn(own, COLS[name], generator=generator) / 4).to(dtype)
                    up = torch.randn(own, each.stop - each.start, generator=generator).to(dtype)
                    whole[each] = up.double().T @ down.double()
                    downs.append(down)
                    parts.append(LoraPart(each, slice(first, first + own), up, gains[:, each] if scales else None))
                    first += own
                weights[number] = LoraWeights(torch.cat(downs), tuple(parts))
                added[name] = torch.cat([whole, gains.T.double()], dim=1)
            self.layers.append(weights)
            self.added.append(
                {name: value for name, value in added.items() if name != "gate_up"}
                | ({"gate": added["gate_up"][:INNER], "up": added["gate_up"][INNER:]} if "gate_up" in added else {})
            )
        self.native = NativeLora(self.layers)


class AdaptedStack(Stack):
    """Computes what a stack with an adapter does, whose input is not quantized."""

    def expected_with(self, adapter: RandomAdapter, hidden: Tensor, ropes: list[tuple[Tensor, ...]]) -> Tensor:
        plain = self.weights
        names = [{f"{name}_added": value for name, value in added.items()} for added in adapter.added]
        self.weights = [weights | added for weights, added in zip(plain, names, strict=True)]
        try:
            return self.expected(hidden, ropes)
        finally:
            self.weights = plain

    def multiply(self, name: str, rows: Tensor, weights: dict[str, Tensor]) -> Tensor:
        product = super().multiply(name, rows, weights)
        added = weights.get(f"{name}_added")
        if added is None:
            return product
        down, factors, terms = added[:, :-2], added[:, -2], added[:, -1]
        return product * factors + terms + rows @ down.T


@functools.lru_cache(maxsize=1)  # making it takes longer than a test
def latest_stack(parts: Parts, in_hadamard: frozenset[str]) -> AdaptedStack:
    return AdaptedStack(fused=False, parts=parts, in_hadamard=in_hadamard)


class Texts:
    """Holds several sequences of one step."""

    def __init__(self) -> None:
        self.prompt = Prompt(SIZE // 2, 24)
        tables = torch.randperm(16, generator=torch.Generator().manual_seed(0))[:15].int().view(5, 3)
        places = [(table.long()[:, None] * 8 + torch.arange(8)).flatten() for table in tables]
        self.slots = torch.cat([place[:length] for place, length in zip(places, LENGTHS, strict=True)])
        self.batch = VarlenBatch(cumulated(torch.tensor(LENGTHS)), tables, torch.tensor(LENGTHS).int())
        self.rows = [slice(*ends) for ends in zip(self.batch.cu_seqlens_q, self.batch.cu_seqlens_q[1:], strict=False)]

    def ropes(self, rows: slice) -> list[tuple[Tensor, ...]]:
        return [tuple(each[rows] for each in rope) for rope in self.prompt.ropes]

    def run(
        self, decoder: NativeDecoder, adapters: NativeAdapters | None, read: tuple[int, ...] | None = None
    ) -> Tensor:
        counts = None if read is None else cumulated(torch.tensor(read))
        hidden = self.prompt.hidden.clone()
        return decoder(hidden, self.prompt.ropes, self.slots, self.batch, counts, adapters)


def numbers(of_rows: tuple[int, ...] = ADAPTERS) -> Tensor:
    return torch.tensor(of_rows, dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS))


@every_level
@pytest.mark.parametrize(
    ("parts", "in_hadamard", "dtype"),
    [
        (QWEN, frozenset[str](), torch.float32),
        (QWEN, MATRICES, torch.float16),
        (GEMMA, frozenset({"output", "gate", "up"}), torch.bfloat16),
    ],
    ids=["qwen", "qwen hadamard", "gemma"],
)
def test_rows_of_several_adapters(isa: str, parts: Parts, in_hadamard: frozenset[str], dtype: torch.dtype) -> None:
    stack, texts = latest_stack(parts, in_hadamard), Texts()
    found = [
        RandomAdapter(rank=3, dtype=dtype, seed=1),
        RandomAdapter(rank=9, dtype=dtype, seed=2, skipped=("output", "gate_up")),
        RandomAdapter(rank=5, dtype=dtype, seed=3, scales=True),
    ]
    decoder = NativeDecoder(workspace(isa, 2), stack.fresh())
    got = texts.run(decoder, NativeAdapters([each.native for each in found], numbers()))
    plain = texts.run(NativeDecoder(workspace(isa, 2), stack.fresh()), None)
    for rows, number in zip(texts.rows, ADAPTERS, strict=True):
        hidden, ropes = texts.prompt.hidden[rows], texts.ropes(rows)
        if number < 0:
            # Bit for bit: a row without an adapter is none of their business.
            assert torch.equal(got[rows], plain[rows])
            continue
        expected = stack.expected_with(found[number], hidden, ropes)
        # Values on a rounding boundary of int8 activations fall either way.
        assert relative(got[rows], expected) < min(1e-2, relative(plain[rows], expected) / 20)


@every_level
@pytest.mark.parametrize("in_hadamard", [frozenset[str](), MATRICES], ids=["packed", "hadamard"])
def test_a_token_depends_on_no_neighbour_or_thread(isa: str, in_hadamard: frozenset[str]) -> None:
    stack, texts = latest_stack(GEMMA, in_hadamard), Texts()
    found = [RandomAdapter(rank=8, dtype=torch.bfloat16, seed=seed, scales=seed > 1).native for seed in (1, 2, 3)]

    def run(threads: int, adapters: NativeAdapters, read: tuple[int, ...] | None = None) -> Tensor:
        return texts.run(NativeDecoder(workspace(isa, threads), stack.fresh()), adapters, read)

    whole = run(1, NativeAdapters(found, numbers()))
    assert torch.equal(run(3, NativeAdapters(found, numbers())), whole)
    alone = run(2, NativeAdapters(found[1:], numbers((-1, -1, 0, -1, -1))))
    assert torch.equal(alone[texts.rows[2]], whole[texts.rows[2]])
    for read in ((1, 0, 9, 1, 2), (0, 3, 1, 0, 0)):
        part = run(2, NativeAdapters(found, numbers()), read)
        for rows, count in zip(texts.rows, read, strict=True):
            last = slice(rows.stop - count, rows.stop)
            assert torch.equal(part[last], whole[last])


@every_level
@pytest.mark.parametrize("has_gains", [False, True])
def test_updates_of_no_whole_panels_of_rows(isa: str, *, has_gains: bool) -> None:
    """Bit for bit as one update of all rows."""
    stack, texts, generator = latest_stack(GEMMA, MATRICES), Texts(), torch.Generator().manual_seed(0)
    down, up = torch.randn(4, HIDDEN, generator=generator) / 4, torch.randn(4, sum(WIDTHS), generator=generator)
    gains = torch.randn(2, sum(WIDTHS), generator=generator) if has_gains else None
    whole = LoraWeights(down, (LoraPart(slice(0, sum(WIDTHS)), slice(0, 4), up, gains),))
    parts = []
    for place, rows in enumerate((slice(0, 20), slice(20, 53), slice(53, sum(WIDTHS)))):
        own = None if gains is None else gains[:, rows]
        parts.append(LoraPart(rows, slice(4 * place, 4 * place + 4), up[:, rows], own))
    results = []
    for weights in (whole, LoraWeights(down.repeat(3, 1), tuple(parts))):
        native = NativeLora([{0: weights}] * 2)
        unpacked = native.weights()[1][0]
        assert torch.equal(unpacked.down, weights.down)
        for got, given in zip(unpacked.parts, weights.parts, strict=True):
            assert (got.rows, got.ranks) == (given.rows, given.ranks)
            assert torch.equal(got.up, given.up)
            assert (got.gains is None) == (given.gains is None)
            assert got.gains is None or given.gains is None or torch.equal(got.gains, given.gains)
        decoder = NativeDecoder(workspace(isa, 2), stack.fresh())
        results.append(texts.run(decoder, NativeAdapters([native], numbers((0, 0, -1, 0, 0)))))
    assert torch.equal(*results)
    plain = texts.run(NativeDecoder(workspace(isa, 2), stack.fresh()), None)
    assert relative(plain[texts.rows[0]], results[0][texts.rows[0]].double()) > 1e-2


def test_what_does_not_fit_is_refused() -> None:
    stack, texts = latest_stack(GEMMA, MATRICES), Texts()
    decoder = NativeDecoder(workspace(None, 1), stack.fresh())
    adapter = RandomAdapter(rank=4, dtype=torch.float32, seed=1)
    one_layer = NativeLora(adapter.layers[:1])
    for adapters in (
        NativeAdapters([adapter.native], numbers()[:-1]),
        NativeAdapters([adapter.native], numbers().long()),
        NativeAdapters([one_layer], numbers()),
    ):
        with pytest.raises(ConfigError):
            texts.run(decoder, adapters)
    crooked = evolve(adapter.layers[0][4], down=adapter.layers[0][4].down[:, :-8])
    with pytest.raises(ConfigError):
        NativeLora([{4: crooked}])
